"""`converter check`: every fault of a checkpoint, by the rules by which opening refuses it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

import converter
from converter import Fault, check
from converter.cli.main import main
from converter.errors import CheckpointError
from converter.families.opened import SourceModel
from converter.files import weights
from converter.files.checkpoint import Checkpoint

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
WTE, WPE, QKV = "transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.attn.c_attn.weight"
FIRST_OF_SHARD = "transformer.h.1.attn.c_proj.bias"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 5\n"


@pytest.fixture(scope="session")
def sound_single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(models.gpt2(), tmp_path_factory.mktemp("check") / "single")


@pytest.fixture(scope="session")
def sound_shards(sound_single: Path) -> Path:
    folder = sound_single.with_name("shards")
    shutil.copytree(sound_single, folder)
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    homes = {name: SHARDS[number * 3 // len(tensors)] for number, name in enumerate(sorted(tensors))}
    for shard in SHARDS:
        save_file({name: tensor for name, tensor in tensors.items() if homes[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": homes}))
    return folder


@pytest.fixture
def single(sound_single: Path, tmp_path: Path) -> Path:
    """A sound GPT-2 in one file, to be damaged."""
    return shutil.copytree(sound_single, tmp_path / "source")


@pytest.fixture
def shards(sound_shards: Path, tmp_path: Path) -> Path:
    """The same in three shards."""
    return shutil.copytree(sound_shards, tmp_path / "source")


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any], file: str = SINGLE) -> Path:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)
    return folder


def edit_header(folder: Path, change: Callable[[dict[str, Any]], Any], file: str = SINGLE) -> Path:
    """Change a header and leave the data as they are."""
    content = (folder / file).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return folder


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def told(faults: tuple[Fault, ...]) -> list[tuple[str, str | None]]:
    """File and tensor of each."""
    return [(fault.file.name, fault.tensor) for fault in faults]


# Sound checkpoints


@pytest.mark.parametrize("full", [False, True])
def test_a_sound_checkpoint_has_no_faults(sound_single: Path, sound_shards: Path, full: bool) -> None:
    assert check(sound_single, full) == check(sound_shards, full) == ()


def test_a_path_that_is_not_there_is_bad_usage(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        check(tmp_path / "absent.safetensors")


# One fault of each kind. The same rules refuse to open: what opening says is what check says first.

Damage = Callable[[Path], Any]


def cut(folder: Path) -> None:
    os.truncate(folder / SINGLE, (folder / SINGLE).stat().st_size - 7)


def leave_over(folder: Path) -> None:
    with (folder / SINGLE).open("ab") as file:
        file.write(b"abc")


def overlap(folder: Path) -> None:
    """The last tensor begins four bytes early, within the one before it, and the file ends with it."""

    def shift(header: dict[str, Any]) -> None:
        header[WTE]["data_offsets"] = [offset - 4 for offset in header[WTE]["data_offsets"]]

    edit_header(folder, shift)
    os.truncate(folder / SINGLE, (folder / SINGLE).stat().st_size - 4)


def twice(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length].decode().rstrip()
    entry = json.dumps(json.loads(text)[WTE])
    text = f'{text[:-1]},"{WTE}":{entry}}}'
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text.encode() + content[8 + length :])


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("false",)


def as_pickle(folder: Path, **others: Any) -> None:
    torch.save({**load_file(folder / SINGLE), **others}, folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


SINGLE_DAMAGES: dict[str, tuple[Damage, str, str | None, str]] = {
    "truncated": (cut, SINGLE, WTE, "truncated"),
    "left over": (leave_over, SINGLE, None, "3 bytes follow"),
    "overlap": (overlap, SINGLE, WTE, "it overlaps 'transformer.wpe.weight'"),
    "gap": (lambda f: edit_header(f, lambda h: h.pop(WPE)), SINGLE, WTE, "the bytes between are no tensor's"),
    "twice in the header": (twice, SINGLE, WTE, "twice"),
    "unknown dtype": (lambda f: edit_header(f, lambda h: h[WTE].update(dtype="F5")), SINGLE, WTE, "unknown dtype F5"),
    "wrong size": (lambda f: edit_header(f, lambda h: h[WTE].update(shape=[3])), SINGLE, WTE, "does not fill"),
    "malformed entry": (lambda f: edit_header(f, lambda h: h[WTE].pop("shape")), SINGLE, WTE, "malformed"),
    "garbage": (lambda f: (f / SINGLE).write_bytes(b"<html>404</html>"), SINGLE, None, "a web page"),
    "empty": (lambda f: (f / SINGLE).write_bytes(b""), SINGLE, None, "the file is empty"),
    "pointer": (lambda f: (f / SINGLE).write_text(LFS), SINGLE, None, "git-lfs pointer"),
    "no weights": (lambda f: (f / SINGLE).unlink(), "source", None, "no weights"),
    "zero size": (
        lambda f: edit_tensors(f, lambda t: t.update({WPE: torch.empty(0)})),
        SINGLE,
        WPE,
        "of shape [0] is a piece of sharded training state",
    ),
    "flat parameter": (
        lambda f: edit_tensors(f, lambda t: t.update({"h.0._flat_param": torch.ones(3)})),
        SINGLE,
        "h.0._flat_param",
        "a piece of sharded training state",
    ),
    "wrapped twice": (
        lambda f: edit_tensors(f, lambda t: t.update({f"module.{WTE}": torch.ones(3)})),
        "source",
        WTE,
        "without their wrappers",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "source", None, "no config.json"),
    "broken config": (lambda f: (f / "config.json").write_text('{"a": 1'), "config.json", None, "not valid JSON"),
    "repeated field": (
        lambda f: (f / "config.json").write_text('{"model_type": "gpt2", "n_head": 1, "n_head": 2}'),
        "config.json",
        None,
        "'n_head' stands twice",
    ),
    "no model_type": (lambda f: models.edit_config(f, model_type=...), "config.json", None, "no model_type"),
    "field of a wrong type": (lambda f: models.edit_config(f, n_head="3"), "config.json", None, "'n_head' is '3'"),
    "another shape": (lambda f: models.edit_config(f, n_positions=71), SINGLE, WPE, "the config means [71, 48]"),
    "unsafe pickle": (lambda f: as_pickle(f, x=Payload()), "pytorch_model.bin", None, "system, and loading that could"),
    "sparse tensor": (
        lambda f: as_pickle(f, x=torch.eye(3).to_sparse()),
        "pytorch_model.bin",
        "x",
        "'x' is not plain",
    ),
}

SHARD_DAMAGES: dict[str, tuple[Damage, str, str | None, str]] = {
    "missing shard": (lambda f: (f / SHARDS[1]).unlink(), INDEX, FIRST_OF_SHARD, "the shard model-00002"),
    "not in the index": (lambda f: edit_index(f, lambda m: m.pop(WTE)), INDEX, WTE, "absent from the index"),
    "in no shard": (lambda f: edit_index(f, lambda m: m.update(x=SHARDS[0])), INDEX, "x", "but no shard holds it"),
    "wrong shard": (
        lambda f: edit_index(f, lambda m: m.update({WTE: SHARDS[0]})),
        INDEX,
        WTE,
        "but it is in model-00003",
    ),
    "outside": (lambda f: edit_index(f, lambda m: m.update(x="../x.bin")), INDEX, "x", "outside the folder"),
    "single file too": (
        lambda f: save_file({"x": torch.ones(1)}, f / SINGLE),
        "source",
        None,
        "both model.safetensors",
    ),
    "in two shards": (
        lambda f: edit_tensors(f, lambda t: t.update({WTE: torch.ones(3)}), SHARDS[0]),
        INDEX,
        WTE,
        "is in two shards",
    ),
    "pointer": (lambda f: (f / SHARDS[2]).write_text(LFS), SHARDS[2], None, "git-lfs pointer"),
    "no weight_map": (lambda f: (f / INDEX).write_text("{}"), INDEX, None, "no weight_map"),
}

DAMAGES = [("single", name) for name in SINGLE_DAMAGES] + [("shards", name) for name in SHARD_DAMAGES]


@pytest.mark.parametrize(("kind", "name"), DAMAGES)
def test_a_fault_is_told_with_file_and_tensor_and_refused_with_the_same_words(
    kind: str, name: str, request: pytest.FixtureRequest, tmp_path: Path, text: Path
) -> None:
    folder: Path = request.getfixturevalue(kind)
    damage, file, tensor, words = (SINGLE_DAMAGES if kind == "single" else SHARD_DAMAGES)[name]
    damage(folder)
    faults = check(folder)
    assert len(faults) == 1, "one damage is one fault, without a train of others"
    assert (faults[0].file.name, faults[0].remark) == (file, False)
    assert faults[0].tensor == tensor
    assert words in faults[0].what
    with pytest.raises(CheckpointError) as caught:
        converter.convert(folder, tmp_path / "out", text=[text])
    assert faults[0].what.split(". ")[0] in str(caught.value)
    assert (str(faults[0].file), faults[0].tensor) == (caught.value.where, caught.value.tensor)
    assert not (tmp_path / "out").exists()
    if not has_config(folder):
        with pytest.raises(CheckpointError) as caught_again:
            converter.inspect(folder)
        assert str(caught_again.value) == str(caught.value)
    else:
        found = converter.inspect(folder)
        assert found.stops == (str(caught.value),)
        assert found.config_facts


def has_config(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "config.json").read_bytes()))
    except (OSError, ValueError):
        return False


# Many faults


def test_all_faults_of_an_index_are_told_at_once(shards: Path) -> None:
    (shards / SHARDS[1]).unlink()
    edit_tensors(shards, lambda t: t.update({"h.0._flat_param": torch.ones(3)}), SHARDS[0])
    os.truncate(shards / SHARDS[2], (shards / SHARDS[2]).stat().st_size - 1)
    edit_index(shards, lambda m: m.update({"x": SHARDS[0], WTE: SHARDS[0], "../y": "../y.safetensors"}))
    lost = sorted(
        name for name, home in json.loads((shards / INDEX).read_text())["weight_map"].items() if home == SHARDS[1]
    )
    (shards / "config.json").write_text("{")
    faults = check(shards)
    assert told(faults) == [
        ("config.json", None),
        (INDEX, "../y"),
        (INDEX, lost[0]),
        (SHARDS[2], WTE),
        (INDEX, "h.0._flat_param"),
        (INDEX, WTE),
        (INDEX, "x"),
        (SHARDS[0], "h.0._flat_param"),
    ]
    assert f"and {len(lost) - 1} more" in faults[2].what
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(shards)


def test_all_faults_of_a_header_are_told_at_once(single: Path) -> None:
    def damage(header: dict[str, Any]) -> None:
        header[WTE]["dtype"] = "F5"
        header[QKV]["shape"] = [-1, 144]
        header["transformer.ln_f.bias"] = 7
        header[WPE]["data_offsets"][0] -= 4

    faults = check(edit_header(single, damage))
    assert {tensor for _, tensor in told(faults)} == {WTE, QKV, "transformer.ln_f.bias", WPE}
    assert {fault.file for fault in faults} == {single / SINGLE}


def test_all_tensors_that_the_config_means_otherwise_are_told(single: Path) -> None:
    edit_tensors(single, lambda t: [t.pop(name) for name in (QKV, "transformer.ln_f.bias")])
    faults = check(models.edit_config(single, n_positions=71))
    assert [tensor for _, tensor in told(faults)] == ["h.0.attn.c_attn.weight", "ln_f.bias", WPE]


def test_all_tensors_of_a_pickle_that_are_not_plain_are_told(single: Path) -> None:
    as_pickle(single, x=torch.eye(3).to_sparse(), y=torch.ones(3, dtype=torch.complex128))
    assert told(check(single)) == [("pytorch_model.bin", "x"), ("pytorch_model.bin", "y")]


def test_a_family_that_we_do_not_know_is_a_remark(single: Path) -> None:
    (remark,) = check(models.edit_config(single, model_type="mamba"))
    assert remark.remark
    assert "'mamba'" in remark.what


# --full


def poison(folder: Path, name: str, value: float, file: str = SINGLE) -> None:
    """One number in a tensor."""
    edit_tensors(folder, lambda tensors: tensors[name].view(-1)[:1].fill_(value), file)


def zero_rows(folder: Path, name: str, *rows: int) -> None:
    edit_tensors(folder, lambda tensors: [tensors[name][row].zero_() for row in rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_nan_and_inf_are_counted(single: Path, dtype: torch.dtype) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(dtype)
        tensors[QKV].view(-1)[[5, 7]] = float("nan")
        tensors[QKV].view(-1)[9] = float("-inf")
        tensors["transformer.ln_f.bias"][0] = float("inf")

    edit_tensors(models.edit_config(single, dtype=str(dtype).removeprefix("torch.")), damage)
    assert check(single) == ()
    faults = check(single, full=True)
    assert {fault.tensor: fault.what.split(" contains ")[1] for fault in faults} == {
        QKV: "2 NaN and 1 Inf among 6912 numbers",
        "transformer.ln_f.bias": "1 Inf among 48 numbers",
    }
    assert not any(fault.remark for fault in faults)
    source = SourceModel.open(single)
    with pytest.raises(CheckpointError, match="contains NaN"):
        models.run(lambda ref: source.read_block(ref, torch.float32), source.spec, models.random_ids())


def test_float8_is_looked_into() -> None:
    assert weights.count_non_finite(torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)) == (1, 0)


def test_dead_rows_are_counted_and_are_no_fault(single: Path) -> None:
    zero_rows(single, WTE, 3, 11, 60)
    (remark,) = check(single, full=True)
    assert (remark.tensor, remark.remark) == (WTE, True)
    assert "3 of 61 rows" in remark.what


def test_a_weight_of_zeros_is_told_and_is_no_fault(single: Path) -> None:
    """A pruned model has such weights, and so has `up` where a GELU became a SwiGLU with one unit a neuron."""
    edit_tensors(single, lambda tensors: tensors[WTE].zero_())
    (remark,) = check(single, full=True)
    assert (remark.tensor, remark.remark) == (WTE, True)
    assert "zero throughout" in remark.what


def test_counts_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(50, 7)
    matrix[[0, 20, 49]] = 0
    matrix[[3, 33], 2] = float("nan")
    for piece in (1, 6, 7, 100, 1 << 22):
        monkeypatch.setattr(weights, "_PIECE", piece)
        assert weights.count_dead_rows(matrix) == 3
        assert weights.count_non_finite(matrix) == weights.count_non_finite(matrix.view(-1)) == (2, 0)


def test_the_data_of_damaged_files_are_read_where_they_can_be(shards: Path) -> None:
    """A cut tensor is not touched, and the others are looked into."""
    poison(shards, "transformer.ln_f.bias", float("nan"), SHARDS[2])
    os.truncate(shards / SHARDS[2], (shards / SHARDS[2]).stat().st_size - 1)
    edit_index(shards, lambda m: m.pop(QKV))
    assert told(check(shards, full=True)) == [(SHARDS[2], WTE), (INDEX, QKV), (SHARDS[2], "transformer.ln_f.bias")]


# The command


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["check", *map(str, arguments)])
    return result.exit_code, result.output


def test_exit_codes(sound_single: Path, single: Path, tmp_path: Path) -> None:
    assert run(sound_single) == (
        0,
        f"{sound_single}: sound, 0 remarks (files and headers; --full reads the tensors too)\n",
    )
    poison(single, WTE, float("nan"))
    assert run(single)[0] == 0
    code, output = run(single, "--full")
    assert code == 1
    assert f"fault: {single / SINGLE}: tensor '{WTE}' contains 1 NaN among 2928 numbers" in output
    assert "1 fault, 0 remarks" in output
    assert run(tmp_path / "absent.bin")[0] == 2
    assert run()[0] == 2


def test_a_remark_alone_leaves_the_exit_code_at_zero(single: Path) -> None:
    zero_rows(single, WTE, 3)
    code, output = run(single, "--full")
    assert (code, output.splitlines()[0].split(":")[0]) == (0, "remark")


def test_json(single: Path) -> None:
    zero_rows(single, WTE, 3)
    poison(single, WPE, float("inf"))
    code, output = run(single, "--full", "--json")
    found = json.loads(output)
    assert code == 1
    assert (found["sound"], found["full"], found["path"]) == (False, True, str(single))
    assert [(each["file"], each["tensor"]) for each in found["faults"]] == [(str(single / SINGLE), WPE)]
    assert [(each["file"], each["tensor"]) for each in found["remarks"]] == [(str(single / SINGLE), WTE)]


def test_a_fault_with_a_reason_reads_as_sentences(tmp_path: Path) -> None:
    tensors = models.tensors_of(models.gpt2())
    del tensors["transformer.ln_f.bias"]
    (fault,) = converter.check(models.write(tmp_path, models.config_of(models.gpt2()), tensors))
    assert fault.what == "tensor 'ln_f.bias' is missing. A gpt2 of this config has it"


# The tokenizer


def test_a_damaged_tokenizer_is_a_fault(single: Path) -> None:
    (single / "tokenizer.json").write_text('{"model": {"vocab": {"a"')
    (fault,) = check(single)
    assert (fault.file, fault.remark) == (single / "tokenizer.json", False)
    assert "cannot be read as JSON" in fault.what


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("file", "content", "what"),
    [
        ("tokenizer_config.json", "[]", "does not hold a JSON object"),
        ("tokenizer.json", {"model": []}, "holds no vocabulary"),
        ("tokenizer.json", {"version": "1.0"}, "holds no vocabulary"),
        ("tokenizer.json", {"model": {"vocab": 5}}, "holds no vocabulary"),
        ("tokenizer.json", {"model": {"vocab": {"a": "0"}}}, "ids are no whole numbers"),
        ("tokenizer.json", {"model": {"vocab": {"a": 0, "b": -1}}}, "ids are no whole numbers"),
        ("tokenizer.json", {"model": {"vocab": {"a": 0}}, "added_tokens": {"a": 1}}, "added_tokens are no list"),
        ("tokenizer.json", {"model": {"vocab": {"a": 0}}, "added_tokens": [[1, 2]]}, "added_tokens are no list"),
        ("vocab.json", {"a": None}, "ids are no whole numbers"),
    ],
)
def test_a_tokenizer_with_other_things_in_it_is_a_fault(single: Path, file, content, what, full: bool) -> None:
    (single / file).write_text(content if isinstance(content, str) else json.dumps(content))
    (fault,) = check(single, full)
    assert not fault.remark
    assert re.search(what, fault.what)


def test_a_config_that_is_broken_is_told_once(single: Path) -> None:
    (single / "config.json").write_text("{")
    assert len(check(single, full=True)) == 1


@pytest.mark.parametrize(
    "error",
    [
        ValueError("`tiktoken` is required to read a `tiktoken` file."),
        ImportError("LlamaConverter requires the protobuf library but it was not found in your environment."),
    ],
)
def test_a_tokenizer_that_needs_a_package_is_a_remark(single: Path, error, monkeypatch: pytest.MonkeyPatch) -> None:
    class Needy:
        vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012

        @classmethod
        def from_pretrained(cls, *_: Any, **__: Any) -> None:
            raise error

    (single / "tokenizer.model").write_bytes(b"anything")
    monkeypatch.setattr("converter.files.tokenizer._find_class", lambda name: Needy)
    (remark,) = check(single, full=True)
    assert remark.remark
    assert "needs a package that is not installed" in remark.what
    assert str(error) in remark.what + "."


def test_a_tokenizer_without_its_merges_is_a_fault_when_it_is_loaded(single: Path) -> None:
    (single / "vocab.json").write_text('{"a": 0, "b": 1}')
    assert check(single) == ()
    (fault,) = check(single, full=True)
    assert "merges.txt missing" in fault.what
    assert not fault.remark


def test_ids_without_a_row_are_a_fault(single: Path) -> None:
    rows = json.loads((single / "config.json").read_text())["vocab_size"]
    vocabulary = {f"t{index}": index for index in range(rows)}
    content: dict[str, Any] = {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}}
    (single / "tokenizer.json").write_text(json.dumps(content))
    assert check(single) == ()
    content["added_tokens"] = [{"id": rows, "content": "<new>"}]
    (single / "tokenizer.json").write_text(json.dumps(content))
    (fault,) = check(single)
    assert not fault.remark
    assert f"the tokenizer has {rows + 1} ids and the embeddings have {rows} rows" in fault.what
