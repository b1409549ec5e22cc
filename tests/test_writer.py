"""Writing checkpoints: the layout of the shards, exact bytes, and resuming."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from converter.errors import CheckpointError, ConverterError
from converter.files.checkpoint import Checkpoint
from converter.files.safetensors import Layout, total_size
from converter.files.writer import CheckpointWriter, parse_size, plan_shards

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
]  # fmt: skip


def layout_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Layout]:
    return {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}


def write_all(folder: Path, tensors: Mapping[str, torch.Tensor], max_shard_size: int = 10**9) -> None:
    writer = CheckpointWriter(folder, layout_of(tensors), max_shard_size)
    for name in reversed(list(tensors)):
        writer.write(name, tensors[name])
    writer.finish()


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"{name}.weight": torch.randn(3, 5, generator=generator) for name in "abcd"}


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


# Bytes and shards


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    tensor = torch.randint(0, 2, (3, 7), generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    write_all(tmp_path, {"w": tensor, "scalar": tensor[1, 1].clone()})
    found = read_all(tmp_path)
    assert found["w"].dtype == tensor.dtype
    assert torch.equal(found["w"].view(torch.uint8), tensor.view(torch.uint8))
    assert found["scalar"].shape == ()


def test_nan_payloads_and_infinities_are_kept(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800000, -1, 0x00000001], dtype=torch.int32)
    write_all(tmp_path, {"w": bits.view(torch.float32)})
    assert torch.equal(read_all(tmp_path)["w"].view(torch.int32), bits)


def test_mixed_dtypes_are_aligned_for_readers_that_map(tmp_path: Path) -> None:
    tensors = {"odd": torch.ones(3, dtype=torch.bool), "half": torch.ones(3).half(), "long": torch.arange(5)}
    write_all(tmp_path, tensors)
    assert same(read_all(tmp_path), tensors)
    header = (tmp_path / "model.safetensors").read_bytes()
    assert int.from_bytes(header[:8], "little") % 8 == 0


def test_views_are_written_contiguous(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    tensors = {"turned": base.T, "strided": base[:, ::2], "expanded": base[:1].expand(4, 8), "tied": base}
    write_all(tmp_path, tensors)
    assert same(read_all(tmp_path), tensors)


def test_parameters_are_written_without_their_graph(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    write_all(tmp_path, {"w": parameter * 2})
    assert read_all(tmp_path)["w"].tolist() == [2, 2]


def test_shards_are_filled_in_order(tmp_path: Path) -> None:
    tensors = {
        "a": torch.zeros(4),
        "b": torch.zeros(4),
        "huge": torch.zeros(100),
        "c": torch.zeros(8),
        "d": torch.ones(1),
    }
    shards = plan_shards(layout_of(tensors), max_shard_size=32)
    assert [list(shard) for shard in shards.values()] == [["a", "b"], ["huge"], ["c"], ["d"]]
    write_all(tmp_path, tensors, max_shard_size=32)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total_size(layout_of(tensors)) == 468
    assert index["weight_map"]["huge"] == "model-00002-of-00004.safetensors"
    assert same(read_all(tmp_path), tensors)


def test_what_is_written_opens_as_a_checkpoint(tmp_path: Path) -> None:
    tensors = some_tensors()
    write_all(tmp_path, tensors, max_shard_size=120)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    assert len(checkpoint.files) == 2
    assert same({name: checkpoint.read(name) for name in checkpoint.tensors}, tensors)


@pytest.mark.parametrize("max_shard_size", [10**9, 20_000])
def test_transformers_loads_it(tmp_path: Path, max_shard_size: int) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    write_all(tmp_path, model.state_dict(), max_shard_size)
    config.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert same(loaded.state_dict(), model.state_dict())


# Every tensor, exactly once, exactly as planned


def test_a_wrong_shape_or_dtype_is_caught(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, {"w": ((2, 3), "float32")}, 10**9)
    with pytest.raises(AssertionError, match=r"w: planned \(\(2, 3\), 'float32'\), got \(\(3, 2\), 'float32'\)"):
        writer.write("w", torch.zeros(3, 2))
    with pytest.raises(AssertionError, match="'float16'"):
        writer.write("w", torch.zeros(2, 3).half())


def test_writing_twice_or_an_unknown_name_is_caught(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, {"w": ((2,), "float32")}, 10**9)
    writer.write("w", torch.zeros(2))
    with pytest.raises(AssertionError, match="w is written twice"):
        writer.write("w", torch.zeros(2))
    with pytest.raises(KeyError, match="v"):
        writer.write("v", torch.zeros(2))


def test_finish_names_what_is_missing(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, layout_of(some_tensors()), 10**9)
    writer.write("b.weight", torch.zeros(3, 5))
    with pytest.raises(AssertionError, match=r"never written: a\.weight, c\.weight, d\.weight"):
        writer.finish()


# Resuming


def test_a_writer_goes_on_where_another_stopped(tmp_path: Path) -> None:
    tensors = some_tensors()
    layout = layout_of(tensors)
    first = CheckpointWriter(tmp_path, layout, 120)
    first.write("a.weight", tensors["a.weight"])
    first.write("c.weight", tensors["c.weight"])
    first.sync()
    second = CheckpointWriter(tmp_path, layout, 120, resume=True, already_written=first.written)
    second.write("b.weight", tensors["b.weight"])
    second.write("d.weight", tensors["d.weight"])
    second.finish()
    assert second.written.keys() == set(tensors)
    assert same(read_all(tmp_path), tensors)


@pytest.mark.parametrize("change", ["layout", "size", "missing", "bit"])
def test_resuming_on_other_files_is_refused(tmp_path: Path, change: str) -> None:
    layout = layout_of(some_tensors())
    file = tmp_path / "model.safetensors"
    first = CheckpointWriter(tmp_path, layout, 10**9)
    first.write("a.weight", torch.zeros(3, 5))
    first.sync()
    if change == "layout":
        layout["b.weight"] = ((5, 3), "float32")
    elif change == "size":
        os.truncate(file, 300)
    elif change == "bit":
        content = file.read_bytes()
        file.write_bytes(content.replace(bytes(60), bytes(59) + b"\1", 1))
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match="--overwrite") as caught:
        CheckpointWriter(tmp_path, layout, 10**9, resume=True, already_written=first.written)
    assert str(file) in str(caught.value)
    assert "'a.weight'" in str(caught.value)


def test_resuming_from_before_the_first_tensor_starts_afresh(tmp_path: Path) -> None:
    tensors = some_tensors()
    CheckpointWriter(tmp_path, layout_of(tensors), 60)  # four shards and an index, of which none must stay
    writer = CheckpointWriter(tmp_path, layout_of(tensors), 10**9, resume=True)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert same(read_all(tmp_path), tensors)


# File systems


def test_a_file_system_that_cannot_reserve_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    write_all(tmp_path, some_tensors())
    assert same(read_all(tmp_path), some_tensors())


def test_a_full_disk_shows_before_any_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConverterError, match="the disk is full") as caught:
        CheckpointWriter(tmp_path, {"w": ((2,), "float32")}, 10**9)
    assert str(tmp_path / "model.safetensors") in str(caught.value)


# Sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("2GiB", 2**31), ("1.5 kb", 1500), ("2.3GB", 2_300_000_000), ("77", 77)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "0", "5XB", "5GB or so", "1e9", "five"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ConverterError, match="Write it like 5GB") as caught:
        parse_size(text)
    assert f"'{text}'" in str(caught.value)
