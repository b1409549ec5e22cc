"""Recipes: strict, with file, line and the nearest right word in every complaint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from converter.conversion.recipe import Recipe, load_recipe, parse_recipe, shipped_recipes
from converter.conversion.settings import VerifySettings
from converter.errors import RecipeError
from converter.ops.gelu_to_swiglu import GeluToSwiglu
from converter.ops.learned_positions_to_rope import LearnedPositionsToRope
from converter.ops.untie_head import UntieHead

HEAD = "name: mine\ntarget: llama\n"
STEPS = (
    HEAD + "steps:\n  - untie_head\n  - gelu_to_swiglu: {units: 2}\n  - learned_positions_to_rope:\n      theta: 5e5\n"
)


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "mine.yaml", overrides)
    return str(caught.value)


def with_step(step: str) -> str:
    return f"{HEAD}steps:\n  - {step}\n"


def test_a_recipe_is_its_ops_in_order() -> None:
    recipe = parse_recipe(STEPS, "mine.yaml")
    assert (recipe.name, recipe.target) == ("mine", "llama")
    assert recipe.steps == (UntieHead(), GeluToSwiglu(units=2), LearnedPositionsToRope(theta=5e5))
    assert recipe.places == ("mine.yaml:4", "mine.yaml:5", "mine.yaml:6")


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_parses_and_survives_a_round_trip(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description
    again = parse_recipe(recipe.to_yaml(), "again")
    assert again == Recipe(**{**vars(recipe), "places": again.places})


def test_a_round_trip_keeps_every_parameter() -> None:
    recipe = parse_recipe(STEPS + "verify: {tokens: 100, context: 8}\ncalibration: {tokens: 99}\n", "mine.yaml")
    text = recipe.to_yaml()
    assert "theta: 500000.0" in text
    again = parse_recipe(text, "mine.yaml")
    assert (again.steps, again.verify, again.calibration) == (recipe.steps, recipe.verify, recipe.calibration)
    assert again.verify == VerifySettings(100, 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # typos
        (STEPS + "calibraton: {}\n", "mine.yaml:8: unknown key 'calibraton' in recipe. Did you mean 'calibration'?"),
        (with_step("untie_hed"), "mine.yaml:4: there is no op 'untie_hed'. Did you mean 'untie_head'?"),
        (with_step("gelu_to_swiglu: {unit: 2}"), "mine.yaml:4: unknown parameter 'unit' of gelu_to_swiglu. Did you"),
        (with_step("untie_head: {a: 1}"), "unknown parameter 'a' of untie_head. Untie_head has no parameters"),
        (STEPS + "verify: {token: 1}\n", "mine.yaml:8: unknown parameter 'token' of verify. Did you mean 'tokens'?"),
        (STEPS.replace("llama", "lama"), "mine.yaml:2: there is no target family 'lama'. Did you mean 'llama'?"),
        (STEPS.replace("target: llama", "target: nanogpt"), "mine.yaml:2: there is no target family 'nanogpt'"),
        (
            STEPS + "source: gpt2\n",
            "mine.yaml:8: recipe names a source family. Delete the line: a recipe fits every model whose facts its ops",
        ),
        # duplicates
        (STEPS + "name: other\n", "mine.yaml:8: 'name' stands twice in recipe"),
        (with_step("gelu_to_swiglu: {units: 2, units: 3}"), "mine.yaml:4: 'units' stands twice in the parameters of"),
        # shapes
        (HEAD, "mine.yaml: the recipe has no 'steps'"),
        ("", "mine.yaml: recipe must be a mapping"),
        ("- a\n", "mine.yaml:1: recipe must be a mapping"),
        (HEAD + "steps: untie_head\n", "mine.yaml:3: steps must be a list"),
        (with_step("{untie_head: , gelu_to_swiglu: }"), "mine.yaml:4: a step is one op's name"),
        (with_step("[untie_head]"), "mine.yaml:4: a step must be a mapping"),
        (with_step("gelu_to_swiglu: 2"), "mine.yaml:4: the parameters of gelu_to_swiglu must be a mapping"),
        (HEAD + "steps: [\n", "mine.yaml:4: this is not YAML"),
        (HEAD + "steps: []\n---\n", "this is not YAML"),
        # types
        (STEPS.replace("name: mine", "name: 1"), "mine.yaml:1: name is 1, and must be text"),
        (STEPS.replace("name: mine", "name: 2024-13-45"), "mine.yaml:1: the value of name cannot be read"),
        (STEPS.replace("name: mine", "name: !!python/name:os.system"), "mine.yaml:1: the value of name cannot be read"),
        (STEPS.replace("name: mine", "name: {[1]: 2}"), "mine.yaml:1: the value of name cannot be read"),
        (STEPS + "verify: {tokens: many}\n", "mine.yaml:8: verify.tokens is 'many', and must be a whole number"),
        (STEPS + "verify: {tokens: 1.5}\n", "mine.yaml:8: verify.tokens is 1.5, and must be a whole number"),
        (STEPS + "verify: {tokens: yes}\n", "mine.yaml:8: verify.tokens is True, and must be a whole number"),
        (STEPS + "verify: {tokens: }\n", "mine.yaml:8: verify.tokens is None, and must be a whole number"),
        (
            STEPS.replace("5e5", "large"),
            "mine.yaml:7: learned_positions_to_rope.theta is 'large', and must be a number",
        ),
        (STEPS.replace("5e5", "true"), "mine.yaml:7: learned_positions_to_rope.theta is True, and must be a number"),
        # choices
        (
            with_step("gelu_to_swiglu: {units: 4}"),
            "mine.yaml:4: gelu_to_swiglu.units is 4, and must be one of: 1, 2, 3",
        ),
        (with_step("gelu_to_swiglu: {units: 2.0}"), "gelu_to_swiglu.units is 2.0, and must be one of"),
        (with_step("gelu_to_swiglu: {units: true}"), "gelu_to_swiglu.units is True, and must be one of"),
        (with_step("gelu_to_swiglu: {units: '2'}"), "gelu_to_swiglu.units is '2', and must be one of"),
        (with_step("cast: {dtype: bfloat61}"), "must be one of: float32, bfloat16, float16. Did you mean 'bfloat16'?"),
        # ranges
        (
            STEPS.replace("5e5", "0"),
            "mine.yaml:7: learned_positions_to_rope.theta is 0.0, and must be a number above 1",
        ),
        (STEPS.replace("5e5", ".nan"), "theta is nan, and must be a number above 1"),
        (STEPS.replace("5e5", ".inf"), "theta is inf, and must be a number above 1"),
        (with_step("fold_final_norm_bias: {ridge: -1e-6}"), "ridge is -1e-06, and must be a number above 0"),
        (with_step("fold_final_norm_bias: {ridge: .inf}"), "ridge is inf, and must be a number above 0"),
        (with_step("fold_final_norm_bias: {iterations: -1}"), "iterations is -1, and must not be negative"),
        (STEPS + "verify: {tokens: 1}\n", "mine.yaml:8: verify.tokens is 1, and must be at least 2"),
        (STEPS + "calibration:\n  context: 1\n", "mine.yaml:9: calibration.context is 1, and must be at least 2"),
    ],
)
def test_a_mistake_is_told_with_its_line(text: str, words: str) -> None:
    assert words in refusal(text)


@pytest.mark.parametrize("text", ["1e6", "1.0e+6", "1000000", "1000000.0", "'1e6'"])
def test_a_number_may_be_written_in_any_way(text: str) -> None:
    recipe = parse_recipe(STEPS.replace("5e5", text), "mine.yaml")
    assert recipe.steps[-1] == LearnedPositionsToRope(theta=1e6)
    assert parse_recipe(STEPS, "m", [f"learned_positions_to_rope.theta={text}"]).steps[-1] == recipe.steps[-1]


@pytest.mark.parametrize("empty", ["untie_head", "untie_head:", "untie_head: {}", "untie_head: null"])
def test_a_step_without_parameters(empty: str) -> None:
    assert parse_recipe(with_step(empty), "mine.yaml").steps == (UntieHead(),)


# Overrides


def test_overrides_change_steps_and_settings() -> None:
    recipe = parse_recipe(
        STEPS, "mine.yaml", ["gelu_to_swiglu.units=3", "learned_positions_to_rope.theta = 2e4", "verify.tokens=64"]
    )
    assert recipe.steps[1:] == (GeluToSwiglu(3), LearnedPositionsToRope(2e4))
    assert recipe.verify.tokens == 64
    assert recipe.places == ("mine.yaml:4", "mine.yaml:5", "mine.yaml:6")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("gelu_to_swiglu.units", "an override has the form step.param=value"),
        ("units=2", "an override has the form step.param=value"),
        ("gelu_to_swiglu.unit=2", "unknown parameter 'unit' of gelu_to_swiglu. Did you mean 'units'?"),
        ("gelu_to_swiglu.units=4", "gelu_to_swiglu.units is 4, and must be one of: 1, 2, 3"),
        ("gelu_to_swiglu.units=", "gelu_to_swiglu.units is None, and must be one of: 1, 2, 3"),
        ("gelu_to_swiglu.units=[", "'[' is not a value"),
        ("gelu_to_swigl.units=2", "recipe 'mine' has no step 'gelu_to_swigl'. Did you mean 'gelu_to_swiglu'?"),
        ("fold_final_norm_bias.ridge=1", "recipe 'mine' has no step 'fold_final_norm_bias'"),
        ("learned_positions_to_rope.theta=1", "theta is 1.0, and must be a number above 1"),
        ("verify.token=2", "unknown parameter 'token' of verify. Did you mean 'tokens'?"),
        ("verify.tokens=1", "verify.tokens is 1, and must be at least 2"),
    ],
)
def test_a_wrong_override_is_told_with_itself(override: str, words: str) -> None:
    message = refusal(STEPS, override)
    assert message.startswith(f"--set {override}: ")
    assert words in message


# Files and names


def test_a_file_wins_over_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("gpt2-to-llama").name == "gpt2-to-llama"
    Path("gpt2-to-llama").write_text(STEPS)
    assert load_recipe("gpt2-to-llama").name == "mine"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt2-to-lama", "there is no recipe 'gpt2-to-lama'. Did you mean 'gpt2-to-llama'?"),
        ("no/such/llama-to-llama.yaml", "there is no recipe file 'no/such/llama-to-llama.yaml'"),
    ],
)
def test_a_recipe_that_is_not_there(name: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(name)
    assert words in str(caught.value)


def test_a_recipe_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="the recipe cannot be read"):
        load_recipe(str(tmp_path / "r.yaml"))


def test_listing_the_recipes_imports_no_torch() -> None:
    code = (
        "import sys; from converter.cli.main import main; main(['recipes', 'list'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    listed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert [line.split()[0] for line in listed.splitlines()] == list(shipped_recipes())
    assert load_recipe("gpt2-to-llama").description in listed


def test_a_recipe_that_is_nested_too_deeply_is_refused():
    with pytest.raises(RecipeError, match="mine: this is nested too deeply"):
        parse_recipe("name: " + "[" * 10_000 + "]" * 10_000, "mine")
