"""The command line: exit codes, what is printed where, what is imported, and what verification catches."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

import converter
from converter.cli.main import main

NAIVE = ("--recipe", "gpt2-to-llama-naive")


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def ok(*arguments: Any) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 that hardly uses its positions, so that a right conversion costs little."""
    model = models.gpt2()
    with torch.no_grad():
        model.transformer.wpe.weight *= 0.02
        for layer in model.transformer.h:
            layer.attn.c_attn.weight[:, :96] *= 0.02
            layer.attn.c_attn.bias[:96] *= 0.02
    return models.save(model, tmp_path_factory.mktemp("cli") / "source")


@pytest.fixture(scope="module")
def target(source: Path, text: Path) -> Path:
    """Its conversion."""
    folder = source.parent / "llama"
    ok("convert", source, folder, "--text", text)
    return folder


# Help and imports


def children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_is_quick_and_imports_no_torch() -> None:
    code = "import sys; from converter.cli.main import main; main(['--help'], standalone_mode=False); assert not {m}"
    code = code.format(m="{'torch', 'transformers', 'numpy'} & set(sys.modules)")
    before = children_seconds()
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert children_seconds() - before < 0.5
    assert "inspect" in found.stdout


@pytest.mark.parametrize("options", [[], ["--mapping"], ["--json"]])
def test_inspect_imports_no_torch(options: list[str], source: Path) -> None:
    command = ["inspect", str(source), *options]
    code = f"import sys; from converter.cli.main import main; main({command}, standalone_mode=False)"
    code += "; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_every_command_shows_an_example() -> None:
    commands = [(name, command) for name, command in main.commands.items()]
    commands += [(f"recipes {name}", command) for name, command in main.commands["recipes"].commands.items()]  # type: ignore[attr-defined]
    for name, command in commands:
        assert "Example:" in str(command.help), name
        assert f"converter {name}" in str(command.help), name
        assert ok(*name.split(), "--help").output


def test_python_m_converter_is_the_same_command(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "converter", "inspect", tmp_path / "none"], check=False, capture_output=True, text=True
    )
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith(f"converter: {tmp_path / 'none'}: ")


# Errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "SOURCE"], "Missing argument 'DST'"),
        (["convert", "SOURCE", "OUT", "--dtype", "int8"], "'int8' is not one of"),
        (["convert", "SOURCE", "OUT", "--colour"], "No such option"),
        (["convert", "NOWHERE", "OUT"], "NOWHERE"),
        (["convert", "SOURCE", "OUT", *NAIVE, "--set", "gelu_to_swiglu.units=5"], "must be one of: 1, 2, 3"),
        (["convert", "SOURCE", "OUT", *NAIVE, "--max-shard-size", "big"], "'big' is not a size"),
        (["convert", "SOURCE", "OUT"], "needs text"),
        (["convert", "SOURCE", "OUT", "--recipe", "gpt2-to-lama"], "Did you mean 'gpt2-to-llama'?"),
        (["verify", "SOURCE", "SOURCE", "--text", "missing.npy"], "no such file"),
        (["verify", "SOURCE", "SOURCE", "--text", "TEXT", "--context", "100"], "the models see 72 tokens at most"),
        (["inspect", "SOURCE/model.safetensors/x"], ""),
        (["recipes", "show", "nothing"], "there is no recipe 'nothing'"),
        (["frobnicate"], "No such command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_and_bad_input_end_with_2_and_one_paragraph(
    arguments: list[str], words: str, source: Path, text: Path, tmp_path: Path
) -> None:
    places = {"SOURCE": str(source), "OUT": str(tmp_path / "out"), "TEXT": str(text)}
    result = run(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2
    assert words.lower() in result.stderr.lower()
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_debug_adds_the_traceback_and_keeps_the_exit_code(source: Path, tmp_path: Path) -> None:
    result = run("--debug", "convert", source, tmp_path / "out")
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.rstrip().splitlines()[-1].startswith("converter convert: op '")


def test_a_target_that_exists_is_replaced_only_when_asked(source: Path, tmp_path: Path) -> None:
    command = ("convert", source, tmp_path / "out", *NAIVE, "--no-verify")
    ok(*command)
    assert "--overwrite" in run(*command).stderr
    assert run(*command).exit_code == 2
    ok(*command, "--overwrite")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# Output


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "SOURCE", "--json"],
        ["convert", "SOURCE", "OUT", *NAIVE, "--json"],
        ["convert", "SOURCE", "OUT", "--text", "TEXT", "--json"],
        ["convert", "SOURCE", "OUT", "--dry-run", "--json"],
        ["verify", "SOURCE", "TARGET", "--text", "TEXT", "--json"],
    ],
    ids=" ".join,
)
def test_json_is_pure_json(arguments: list[str], source: Path, target: Path, text: Path, tmp_path: Path) -> None:
    places = {"SOURCE": source, "OUT": tmp_path / "out", "TEXT": text, "TARGET": target}

    def no_constant(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    result = ok(*(places.get(argument, argument) for argument in arguments))
    assert json.loads(result.stdout, parse_constant=no_constant)
    assert result.stderr == ""


def test_dry_run_shows_the_accounts_and_writes_nothing(source: Path, tmp_path: Path) -> None:
    output = ok("convert", source, tmp_path / "out", "--dry-run", "--set", "gelu_to_swiglu.units=3").output
    for words in ("gelu_to_swiglu(units=3", "lossy, calibrated", "exact", "used", "dropped", "ignored", "peak memory"):
        assert words in output
    (row,) = (line for line in output.splitlines() if "model.layers.{0...2}.mlp.gate_proj.weight" in line)
    assert "240x48" in row
    assert not list(tmp_path.iterdir())
    plan = json.loads(ok("convert", source, tmp_path / "out", "--dry-run", "--json").stdout)
    assert {step["name"]: (step["exact"], step["needed"]) for step in plan["steps"]} == {
        "fold_attention_scale": (True, False),
        "untie_head": (True, True),
        "layernorm_to_rmsnorm": (True, True),
        "fold_final_norm_bias": (False, True),
        "gelu_to_swiglu": (False, True),
        "learned_positions_to_rope": (False, True),
        "fit_blocks": (False, True),
        "cast": (True, True),
    }
    assert plan["peak_bytes"] > 0
    assert plan["bytes"] == sum(4 * torch.Size(each["shape"]).numel() for each in plan["tensors"].values())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["TAKEN"], "the output folder holds a checkpoint"),
        (["OUT", "--max-shard-size", "5 apples"], "5 apples"),
        (["OUT", "--text", "missing.txt"], "missing.txt"),
    ],
    ids=["target", "shards", "text"],
)
def test_dry_run_looks_at_target_text_and_shards(arguments: list[str], why: str, source: Path, tmp_path: Path) -> None:
    places = {"TAKEN": shutil.copytree(source, tmp_path / "taken"), "OUT": tmp_path / "out"}
    result = run("convert", source, *(places.get(argument, argument) for argument in arguments), "--dry-run")
    assert result.exit_code == 2
    assert why in result.stderr.replace("\n", " ")


def test_dry_run_sees_what_the_conversion_would_refuse(source: Path, tmp_path: Path) -> None:
    folder = models.edit_config(Path(shutil.copytree(source, tmp_path / "relu")), activation_function="relu")
    result = run("convert", folder, tmp_path / "out", "--dry-run", "--set", "gelu_to_swiglu.units=2")
    assert result.exit_code == 2
    assert "Set units to 1" in result.stderr


def test_convert_prints_the_damage_by_op_and_the_verification(source: Path, text: Path, tmp_path: Path) -> None:
    output = ok("convert", source, tmp_path / "out", "--text", text).output
    for words in ("fold_final_norm_bias", "gelu_to_swiglu(units=1", "exact", "lossy", "KL to source", "positions"):
        assert words in output
    assert f"Wrote {tmp_path / 'out'}" in output.replace("\n", "")


def test_recipes_are_listed_shown_copied_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "gpt2-to-llama " in ok("recipes", "list").output
    ok("recipes", "copy", "gpt2-to-llama", "mine.yaml")
    assert Path("mine.yaml").read_text() == ok("recipes", "show", "gpt2-to-llama").output
    assert "theta: 10000.0" in ok("recipes", "check", "mine.yaml").output
    assert "the file exists" in run("recipes", "copy", "gpt2-to-llama", "mine.yaml").stderr
    Path("mine.yaml").write_text(Path("mine.yaml").read_text().replace("units", "unit"))
    result = run("recipes", "check", "mine.yaml")
    assert result.exit_code == 2
    assert "unknown parameter 'unit' of gelu_to_swiglu. Did you mean 'units'?" in result.stderr
    assert "mine.yaml:" in result.stderr


def test_inspect_says_what_looks_wrong(tmp_path: Path) -> None:
    model = models.gpt2(tie_word_embeddings=False)
    folder = models.save(model, tmp_path, tie_word_embeddings=True, bos_token_id=50256, dtype="float16")
    found = json.loads(ok("inspect", folder, "--json").stdout)
    text = "\n".join(found["warnings"])
    for words in ("the files rule", "50256 has no embedding", "the config says float16", "its ratio 1.67"):
        assert words in text


# Verification


def swap_halves(folder: Path, copy: Path) -> Path:
    """The same folder with gate and up exchanged."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    swapped = {
        next((name.replace(a, b) for a, b in other.items() if a in name), name): tensor
        for name, tensor in tensors.items()
    }
    save_file(swapped, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_verify_passes_a_conversion_and_fails_swapped_halves(
    source: Path, target: Path, text: Path, tmp_path: Path
) -> None:
    ok("verify", source, target, "--text", text)
    wrong = swap_halves(target, tmp_path / "swapped")
    result = run("verify", source, wrong, "--text", text)
    assert result.exit_code == 1
    assert "nats per token from" in result.stderr
    assert "KL to source" in result.stdout
    found = json.loads(run("verify", source, wrong, "--text", text, "--json").stdout)
    assert found["passed"] is False
    assert found["total"]["kl"] > 0.1
    ok("verify", source, wrong, "--text", text, "--max-kl", 100)


def test_verify_holds_two_llamas_to_the_rounding_of_a_cast(text: Path, tmp_path: Path) -> None:
    source = models.save(models.llama(), tmp_path / "source")
    ok("convert", source, tmp_path / "again", "--dtype", "bfloat16")
    ok("verify", source, source, "--text", text)
    wrong = swap_halves(source, tmp_path / "swapped")
    assert run("verify", source, wrong, "--text", text).exit_code == 1


def test_verify_has_null_in_json_for_figures_that_are_not_finite(source: Path, text: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(source, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    save_file({name: tensor * torch.nan for name, tensor in tensors.items()}, broken / "model.safetensors")
    result = run("verify", source, broken, "--text", text, "--json")
    assert result.exit_code == 1
    assert "NaN" not in result.stdout
    assert json.loads(result.stdout)["total"]["kl"] is None


def test_verify_refuses_other_vocabularies(source: Path, text: Path, tmp_path: Path) -> None:
    other = models.save(models.gpt2(vocab_size=64), tmp_path / "other")
    result = run("verify", source, other, "--text", text)
    assert result.exit_code == 2
    assert "vocabularies of 61 and 64 tokens" in result.stderr


def test_a_failed_conversion_ends_with_1(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from converter.ops.untie_head import UntieHead

    def wrong(self: UntieHead, block: Any, *rest: Any) -> Any:
        return type(block)({role: tensor * 1.001 for role, tensor in block.items()})

    monkeypatch.setattr(UntieHead, "apply", wrong)
    result = run("convert", source, tmp_path / "out", *NAIVE)
    assert result.exit_code == 1
    assert "exact op 'untie_head' changed the function" in result.stderr
    assert not list(tmp_path.iterdir())


def test_what_the_input_puts_into_a_message_is_one_printable_line(tmp_path):
    odd = "odd\n\x1b[31m\ud800name" + "x" * 100_000
    model = models.save(models.gpt2(), tmp_path / "model", activation_function=odd)
    result = run("convert", model, tmp_path / "out")
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.isprintable()
    assert r"\x1b[31m\ud800name" in line
    assert len(line) < 2_000


def test_notes_are_printable_and_short_too(tmp_path):
    model = models.save(models.gpt2(), tmp_path / "model", **{"odd\n\x1b[31m\ud800name": "x" * 100_000})
    notes = [note for note in converter.inspect(model).warnings if "\\ud800name" in note]
    assert notes
    assert all(note.isprintable() and len(note) < 1_000 for note in notes)


def test_a_name_that_is_no_text_is_printed_as_an_escape(tmp_path):
    folder = models.save(models.gpt2(), tmp_path / "model")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("{", r'{"\ud800": 1, "\ud800": 2, ', 1))
    for arguments in ((), ("--json",)):
        result = run("check", folder, *arguments)
        assert result.exit_code == 1
        assert r"\ud800" in result.output


@pytest.mark.parametrize("field", ["attn_pdrop", "use_cache"])
def test_a_config_that_transformers_refuses_is_one_paragraph(field, source, text, tmp_path):
    folder = models.edit_config(shutil.copytree(source, tmp_path / "model"), **{field: 1.1})
    result = run("eval", folder, "--text", text)
    assert result.exit_code == 2
    assert "transformers refuses this config" in result.output
    assert len(result.output.splitlines()) == 1


def test_settings_of_the_whole_process_are_a_commands_and_a_users_stand() -> None:
    code = """
        import os, sys
        import converter
        assert not {"OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE"} & set(os.environ)
        os.environ["KMP_BLOCKTIME"] = "7"
        from converter.cli.main import main
        main(["recipes", "list"], standalone_mode=False)
        assert "torch" not in sys.modules
        assert os.environ["OMP_WAIT_POLICY"] == "passive"
        assert os.environ["KMP_BLOCKTIME"] == "7"
    """
    names = ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "THP_MEM_ALLOC_ENABLE")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=clean, check=True, stdout=subprocess.DEVNULL)
