"""`check`, `inspect`, a dry run and `convert` agree on what is sound, and say it in the same words (case U6)."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from test_rope_containers import EVEN, WIDE, gguf_file, meta_folder
from test_rope_families import make
from torch import Tensor

import converter
from converter.cli.main import main
from converter.conversion.run import plan_conversion
from converter.errors import ConverterError

RECIPES = {"gpt2": "gpt2-to-llama-naive", "llama": "llama-to-llama"}
MATRICES = {"gpt2": "transformer.h.1.mlp.c_fc.weight", "llama": "model.layers.1.mlp.up_proj.weight"}


def refusal(act: Callable[[], Any]) -> str | None:
    try:
        act()
    except ConverterError as error:
        return str(error)
    return None


def agreed(path: Path, recipe: str, out: Path) -> str | None:
    """What all four say of a checkpoint: the refusal, or None for a sound one."""
    said = refusal(lambda: converter.convert(path, out, recipe=recipe, verify=False))
    assert refusal(lambda: plan_conversion(path, recipe)) == said
    faults = [fault for fault in converter.check(path) if not fault.remark]
    stops = converter.inspect(path).stops
    assert bool(faults) == bool(stops) == (said is not None), (faults, stops, said)
    if said is not None:
        assert stops[0] == said
        assert faults[0].what in said
        assert not out.exists()
    return said


def tensors(change: Callable[[dict[str, Tensor], str], Any]) -> Callable[[Path, str], None]:
    def damage(folder: Path, family: str) -> None:
        found = load_file(folder / "model.safetensors")
        change(found, MATRICES[family])
        save_file(found, folder / "model.safetensors")

    return damage


def config(**changes: Any) -> Callable[[Path, str], None]:
    return lambda folder, family: models.edit_config(folder, **changes) and None


def retyped(dtype: torch.dtype) -> Callable[[Path, str], None]:
    return tensors(lambda found, name: found.update({name: found[name].to(dtype)}))


def mask(content: Tensor) -> Callable[[Path, str], None]:
    return tensors(lambda found, name: found.update({"transformer.h.1.attn.bias": content}))


def tokenizer(content: Any) -> Callable[[Path, str], None]:
    return lambda folder, family: (folder / "tokenizer.json").write_text(json.dumps(content)) and None


TRIANGLE = torch.ones(models.CONTEXT, models.CONTEXT).tril()[None, None]
WORDS = {f"t{index}": index for index in range(models.VOCAB + 1)}

#: Damage -> what is said of it; None where the checkpoint stays sound.
DAMAGES: dict[str, tuple[Callable[[Path, str], None], str | None]] = {
    "nothing": (lambda folder, family: None, None),
    "int8": (retyped(torch.int8), "is of type int8"),
    "uint8": (retyped(torch.uint8), "is of type uint8"),
    "bool": (retyped(torch.bool), "is of type bool"),
    "fp8": (retyped(torch.float8_e4m3fn), "is of type float8_e4m3fn"),
    "fp8 scale": (
        tensors(lambda found, name: found.update({name: found[name].half(), name + "_scale_inv": torch.ones(1)})),
        "_scale_inv' [1] is unknown",
    ),
    "half": (retyped(torch.float16), None),
    "float64": (retyped(torch.float64), None),
    "left over": (
        tensors(lambda found, name: found.update({name + "_extra": torch.ones(2)})),
        "_extra' [2] is unknown",
    ),
    "missing": (tensors(lambda found, name: found.pop(name)), "is missing"),
    "transposed": (tensors(lambda found, name: found.update({name: found[name].T.contiguous()})), "has shape"),
    "no rows": (tensors(lambda found, name: found.update({name: found[name][:0]})), "sharded training state"),
    "quantised": (config(quantization_config={"quant_method": "gptq"}), "quantization_config"),
    "encoder": (config(is_encoder_decoder=True), "is_encoder_decoder"),
    "tokenizer of other things": (tokenizer({"model": []}), "holds no vocabulary"),
    "tokenizer too large": (
        tokenizer({"model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "t0"}}),
        "62 ids and the embeddings have 61 rows",
    ),
}
OF_GPT2: dict[str, tuple[Callable[[Path, str], None], str | None]] = {
    "window": (mask(TRIANGLE.triu(-8)), "windowed"),
    "window before the end": (mask(TRIANGLE.triu(-(models.CONTEXT - 2))), "windowed"),
    "full mask": (mask(torch.ones_like(TRIANGLE)), "not the plain causal triangle"),
    "causal mask": (mask(TRIANGLE), None),
    "causal mask of bytes": (mask(TRIANGLE.to(torch.uint8)), None),
    "activation": (config(activation_function="swish9"), "swish9"),
    "head lost": (config(tie_word_embeddings=False), "no tensor 'lm_head.weight'"),
}
CASES = [(family, name, *case) for family in RECIPES for name, case in DAMAGES.items()]
CASES += [("gpt2", name, *case) for name, case in OF_GPT2.items()]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], Path]:
    return lambda family: models.save(getattr(models, family)(), tmp_path / "source")


@pytest.mark.parametrize(
    ("family", "damage", "words"),
    [(family, damage, words) for family, _, damage, words in CASES],
    ids=[f"{family} {name}" for family, name, *_ in CASES],
)
def test_all_four_say_the_same(family, damage, words, saved, tmp_path) -> None:
    damage(saved(family), family)
    said = agreed(tmp_path / "source", RECIPES[family], tmp_path / "out")
    assert (said is None) is (words is None)
    assert words is None or (said is not None and words in said)


@pytest.mark.parametrize("seed", range(20))
def test_all_four_say_the_same_of_several_damages_at_once(seed, saved, tmp_path) -> None:
    chance = random.Random(seed)
    family = chance.choice(list(RECIPES))
    pool = [*DAMAGES.values(), *(OF_GPT2.values() if family == "gpt2" else ())]
    saved(family)
    for damage, _ in chance.sample([each for each in pool if each[1] != "is missing"], 3):
        damage(tmp_path / "source", family)
    agreed(tmp_path / "source", RECIPES[family], tmp_path / "out")


@pytest.mark.parametrize("kind", ["meta", "gguf"])
def test_all_four_say_the_same_of_other_containers(kind, tmp_path) -> None:
    if kind == "meta":
        path, recipe = meta_folder(tmp_path / "meta", make("Llama", EVEN), 1), "meta-to-hf"
    else:
        path, recipe = gguf_file(tmp_path / "model.gguf", make("Llama", WIDE), "llama"), "gguf-to-hf"
    assert agreed(path, recipe, tmp_path / "out") is None
    if kind == "meta":
        shard = torch.load(path / "consolidated.00.pth")
        name = "layers.1.feed_forward.w1.weight"
        torch.save({**shard, name: shard[name].to(torch.int8)}, path / "consolidated.00.pth")
        assert "is of type int8" in str(agreed(path, recipe, tmp_path / "again"))


def test_a_tokenizer_that_does_not_load_is_refused_before_the_walk(saved, tmp_path) -> None:
    """Its JSON is sound, so only `--full` and what converts look closer."""
    (saved("gpt2") / "vocab.json").write_text('{"a": 0}')
    said = refusal(lambda: plan_conversion(tmp_path / "source", RECIPES["gpt2"]))
    assert said is not None
    assert "merges.txt missing" in said
    (fault,) = converter.check(tmp_path / "source", full=True)
    assert fault.what in said


@pytest.mark.parametrize(("name", "words"), [("int8", "is of type int8"), ("window", "windowed")])
def test_eval_and_verify_run_nothing_that_does_not_convert(name, words, saved, tmp_path) -> None:
    """transformers would take the numbers for weights, and ignore the mask."""
    damage, _ = (DAMAGES | OF_GPT2)[name]
    damage(saved("gpt2"), "gpt2")
    sound, text = models.save(models.gpt2(), tmp_path / "sound"), models.write_ids(tmp_path / "ids.npy")
    for measure in (converter.evaluate, lambda path, text: converter.verify(sound, path, text=text)):
        assert words in str(refusal(lambda measure=measure: measure(tmp_path / "source", text=text)))


# inspect answers on everything with a config


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [*map(str, arguments)], env={"COLUMNS": "300"})
    return result.exit_code, result.output


def test_inspect_answers_for_a_family_that_we_do_not_know(saved, tmp_path) -> None:
    models.edit_config(saved("gpt2"), model_type="mamba", expand=2)
    code, output = run("inspect", tmp_path / "source")
    assert code == 0
    for words in ("mamba", "expand", "n_embd", "does not convert", "float32", "parameters"):
        assert words in output
    code, output = run("inspect", tmp_path / "source", "--json")
    found = json.loads(output)
    assert (code, found["family"], found["spec"]) == (0, None, None)
    assert found["config_facts"]["expand"] == 2
    assert "mamba" in found["stops"][0]
    assert found["bytes"] > 0


def test_inspect_answers_with_the_spec_where_tensors_are_wrong(saved, tmp_path) -> None:
    tensors(lambda found, name: [found.pop(name), found.update(x=torch.ones(1))])(saved("gpt2"), "gpt2")
    found = converter.inspect(tmp_path / "source")
    assert found.family == "gpt2"
    assert found.spec is not None
    assert found.spec.num_layers == 3
    assert [words in stop for words, stop in zip(("is missing", "'x' [1] is unknown"), found.stops, strict=True)] == [
        True,
        True,
    ]
    assert run("inspect", tmp_path / "source", "--mapping")[0] == 0


def test_inspect_answers_without_weights(saved, tmp_path) -> None:
    (saved("llama") / "model.safetensors").unlink()
    code, output = run("inspect", tmp_path / "source")
    assert code == 0
    shown = re.sub(r"[\s│]+", " ", output)
    assert "the folder has no weights" in shown
    assert "no tensors" in shown


def test_inspect_shows_odd_values_on_one_line_each(saved, tmp_path) -> None:
    models.edit_config(saved("gpt2"), model_type="odd\n\x1b[31m\ud800", owner="x" * 100_000)
    code, output = run("inspect", tmp_path / "source")
    assert code == 0
    assert r"\x1b[31m\ud800" in output
    assert "\x1b" not in output
    assert len(output) < 20_000
