"""Reading checkpoints: what loads, what is refused and with which words, and how much memory it takes."""

from __future__ import annotations

import argparse
import collections
import datetime
import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from converter.errors import CheckpointError
from converter.files.checkpoint import Checkpoint, TensorInfo, clean_name, hash_beside

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
BIN = "pytorch_model.bin"


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"{name}.weight": torch.randn(3, 5, generator=generator) for name in "abcd"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config and no weights yet."""
    path = tmp_path / "source"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "gpt2"}')
    return path


def shard(folder: Path, **weight_map: str | None) -> None:
    """Two shards with a, b and c, d; `weight_map` changes the right index, and None removes from it."""
    tensors = some_tensors()
    save_file({name: tensors[name] for name in ("a.weight", "b.weight")}, folder / SHARDS[0])
    save_file({name: tensors[name] for name in ("c.weight", "d.weight")}, folder / SHARDS[1])
    right: dict[str, str | None] = {name: SHARDS[name[0] in "cd"] for name in tensors}
    right |= {f"{name}.weight": file for name, file in weight_map.items()}
    index = {"weight_map": {name: file for name, file in right.items() if file is not None}}
    (folder / INDEX).write_text(json.dumps(index))


def refusal(folder: Path | str) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


def assert_says(message: str, *words: object) -> None:
    for word in words:
        assert str(word) in message


def assert_holds(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


# What loads


def test_single_safetensors(folder: Path) -> None:
    save_file(some_tensors(), folder / SINGLE)
    checkpoint = Checkpoint.open(str(folder))
    assert_holds(checkpoint, some_tensors())
    assert checkpoint.config == {"model_type": "gpt2"}
    assert checkpoint.generation_config is None
    assert checkpoint.files == [folder / SINGLE]
    assert checkpoint.tensors["a.weight"] == TensorInfo("a.weight", "a.weight", (3, 5), "float32", folder / SINGLE, 60)
    assert (checkpoint.total_bytes, checkpoint.num_parameters) == (240, 60)


def test_sharded_safetensors(folder: Path) -> None:
    shard(folder)
    checkpoint = Checkpoint.open(folder)
    assert_holds(checkpoint, some_tensors())
    assert checkpoint.files == [folder / name for name in SHARDS]


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_pickle(folder: Path, zipped: bool) -> None:
    torch.save(some_tensors(), folder / BIN, _use_new_zipfile_serialization=zipped)
    assert_holds(Checkpoint.open(folder), some_tensors())


def test_sharded_torch_pickles(folder: Path) -> None:
    tensors = some_tensors()
    weight_map = {}
    for number, name in enumerate(tensors, start=1):
        weight_map[name] = f"pytorch_model-{number:05d}-of-00004.bin"
        torch.save({name: tensors[name]}, folder / weight_map[name])
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_holds(Checkpoint.open(folder), tensors)


def test_safetensors_are_preferred_to_a_pickle(folder: Path) -> None:
    save_file(some_tensors(), folder / SINGLE)
    (folder / BIN).write_bytes(b"never looked at")
    assert_holds(Checkpoint.open(folder), some_tensors())


def test_files_linked_as_in_the_hub_cache(folder: Path, tmp_path: Path) -> None:
    shard(folder)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(list(folder.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    assert_holds(Checkpoint.open(folder), some_tensors())


def test_generation_config_is_read(folder: Path) -> None:
    save_file(some_tensors(), folder / SINGLE)
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert Checkpoint.open(folder).generation_config == {"eos_token_id": 3}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "uint8", "bool"])
@pytest.mark.parametrize("file", [SINGLE, BIN])
def test_dtypes_and_scalars(folder: Path, dtype: str, file: str) -> None:
    tensors = {
        "matrix": torch.randn(3, 5).mul(9).to(getattr(torch, dtype)),
        "scalar": torch.tensor(1).to(getattr(torch, dtype)),
    }
    save_file(tensors, folder / file) if file == SINGLE else torch.save(tensors, folder / file)
    checkpoint = Checkpoint.open(folder)
    assert_holds(checkpoint, tensors)
    assert [(info.shape, info.dtype) for info in checkpoint.tensors.values()] == [((3, 5), dtype), ((), dtype)]


def test_tensors_that_are_not_aligned_to_their_elements(folder: Path) -> None:
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "float": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    text = json.dumps(header).encode()
    data = b"\x07" + torch.tensor([1.5, -2.5]).numpy().tobytes()
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert Checkpoint.open(folder).read("float").tolist() == [1.5, -2.5]


@pytest.mark.parametrize("file", [SINGLE, BIN])
def test_a_tensor_that_was_read_can_be_written_to(folder: Path, file: str) -> None:
    tensors = some_tensors()
    save_file(tensors, folder / file) if file == SINGLE else torch.save(tensors, folder / file)
    checkpoint = Checkpoint.open(folder)
    checkpoint.read("a.weight").zero_()
    assert_holds(checkpoint, tensors)


def test_tensors_that_share_storage_in_a_pickle(folder: Path) -> None:
    tensor = torch.randn(4, 6)
    torch.save({"whole": tensor, "tied": tensor, "turned": tensor.T, "part": tensor[1]}, folder / BIN)
    checkpoint = Checkpoint.open(folder)
    checkpoint.read("tied").zero_()
    assert_holds(checkpoint, {"whole": tensor, "tied": tensor, "turned": tensor.T, "part": tensor[1]})


def test_parameters_in_a_pickle_come_without_gradient(folder: Path) -> None:
    torch.save({"w": torch.nn.Parameter(torch.ones(2))}, folder / BIN)
    assert not Checkpoint.open(folder).read("w").requires_grad


@pytest.mark.parametrize("key", ["state_dict", "model", "module"])
def test_a_state_dict_nested_alone(folder: Path, key: str) -> None:
    torch.save({key: some_tensors()}, folder / BIN)
    assert_holds(Checkpoint.open(folder), some_tensors())


# S3: wrapped names


@pytest.mark.parametrize(
    "raw",
    [
        "module.h.0.mlp.weight",
        "_orig_mod.module.h.0.mlp.weight",
        "module._orig_mod.h.0.mlp.weight",
        "h.0._checkpoint_wrapped_module.mlp.weight",
        "_fsdp_wrapped_module.h.0._fsdp_wrapped_module._orig_mod.mlp.weight",
    ],
)
def test_wrappers_are_stripped_anywhere(folder: Path, raw: str) -> None:
    save_file({raw: torch.arange(4.0)}, folder / SINGLE)
    checkpoint = Checkpoint.open(folder)
    info = checkpoint.tensors["h.0.mlp.weight"]
    assert (info.name, info.raw_name) == ("h.0.mlp.weight", raw)
    assert checkpoint.read("h.0.mlp.weight").tolist() == [0, 1, 2, 3]


def test_only_whole_parts_are_wrappers() -> None:
    assert clean_name("submodule.module_list.0.weight") == "submodule.module_list.0.weight"


def test_a_collision_after_stripping_names_both(folder: Path) -> None:
    save_file({"module.a": torch.ones(2), "_orig_mod.a": torch.zeros(2)}, folder / SINGLE)
    assert_says(refusal(folder), "'module.a'", "'_orig_mod.a'", "'a'", SINGLE)


# Folders


def test_missing_folder(tmp_path: Path) -> None:
    assert_says(refusal(tmp_path / "absent"), tmp_path / "absent", "no such file or folder")


def test_a_file_instead_of_the_folder(folder: Path) -> None:
    save_file(some_tensors(), folder / SINGLE)
    assert_says(refusal(folder / SINGLE), "this is a file", f"Give the folder that holds it: {folder}")


def test_no_config(folder: Path) -> None:
    save_file(some_tensors(), folder / SINGLE)
    (folder / "config.json").unlink()
    assert_says(refusal(folder), folder, "no config.json")


def test_broken_config(folder: Path) -> None:
    save_file(some_tensors(), folder / SINGLE)
    (folder / "config.json").write_text('{"a": 1,\n "b": }')
    assert_says(refusal(folder), folder / "config.json", "not valid JSON", "line 2")


def test_config_that_is_no_object(folder: Path) -> None:
    save_file(some_tensors(), folder / SINGLE)
    (folder / "config.json").write_text("[1]")
    assert_says(refusal(folder), folder / "config.json", "list where an object is expected")


def test_no_weights(folder: Path) -> None:
    assert_says(refusal(folder), folder, "no weights", "model.safetensors or pytorch_model.bin")


def test_shards_without_an_index(folder: Path) -> None:
    shard(folder)
    (folder / INDEX).unlink()
    assert_says(refusal(folder), "no weights", f"index that belongs to {SHARDS[0]}")


def test_distributed_checkpoint(folder: Path) -> None:
    (folder / "__0_0.distcp").write_bytes(b"x")
    assert_says(refusal(folder), "Consolidate first")


def test_dangling_link(folder: Path) -> None:
    (folder / SINGLE).symlink_to(folder / "blob")
    assert_says(refusal(folder), folder / SINGLE, "cannot be read", "No such file")


@pytest.mark.parametrize("name", [SINGLE, BIN, "config.json"])
def test_git_lfs_pointers(folder: Path, name: str) -> None:
    if name == "config.json":
        save_file(some_tensors(), folder / SINGLE)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 5\n")
    assert_says(refusal(folder), folder / name, "git-lfs pointer", "git lfs pull")


# Damaged safetensors


@pytest.mark.parametrize("name", [SINGLE, BIN])
def test_empty_file(folder: Path, name: str) -> None:
    (folder / name).touch()
    assert_says(refusal(folder), folder / name, "empty")


def test_truncated_data(folder: Path) -> None:
    save_file(some_tensors(), folder / SINGLE)
    os.truncate(folder / SINGLE, (folder / SINGLE).stat().st_size - 7)
    assert_says(refusal(folder), folder / SINGLE, "truncated", "promises 240 bytes", "233 are there")


def test_bytes_after_the_data(folder: Path) -> None:
    save_file(some_tensors(), folder / SINGLE)
    with (folder / SINGLE).open("ab") as file:
        file.write(b"abc")
    assert_says(refusal(folder), folder / SINGLE, "3 bytes follow the last tensor")


@pytest.mark.parametrize("start", [b"abc", b"\xff" * 8, b"\x08" + b"\0" * 20])
def test_garbage_instead_of_a_header(folder: Path, start: bytes) -> None:
    (folder / SINGLE).write_bytes(start)
    assert_says(refusal(folder), folder / SINGLE, "not a sound safetensors file")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [2]}, "malformed"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, "8"]}, "malformed"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "shape is [-2]"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "does not fill its 8 bytes"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "starts at byte 4"),
        ({"dtype": "F5", "shape": [2], "data_offsets": [0, 8]}, "unknown dtype F5"),
    ],
)
def test_header_entries_that_contradict_the_data(folder: Path, entry: dict[str, object], words: str) -> None:
    text = json.dumps({"some.weight": entry}).encode()
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert_says(refusal(folder), folder / SINGLE, "'some.weight'", words)


# F1: index and shards


def test_a_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / SHARDS[1]).unlink()
    assert_says(refusal(folder), folder / INDEX, "missing", SHARDS[1], "'c.weight'")


def test_a_tensor_absent_from_the_index(folder: Path) -> None:
    shard(folder, b=None)
    assert_says(refusal(folder), folder / INDEX, "'b.weight'", SHARDS[0], "absent from the index")


def test_a_whole_shard_absent_from_the_index(folder: Path) -> None:
    shard(folder, c=None, d=None)
    assert_says(refusal(folder), "'c.weight'", SHARDS[1], "absent from the index")


def test_a_tensor_mapped_to_the_wrong_shard(folder: Path) -> None:
    shard(folder, b=SHARDS[1])
    assert_says(refusal(folder), f"maps tensor 'b.weight' to {SHARDS[1]}, but it is in {SHARDS[0]}")


def test_a_tensor_of_the_index_in_no_shard(folder: Path) -> None:
    shard(folder, e=SHARDS[0])
    assert_says(refusal(folder), f"maps tensor 'e.weight' to {SHARDS[0]}, but no shard holds it")


def test_a_tensor_in_two_shards(folder: Path) -> None:
    shard(folder)
    save_file(some_tensors(), folder / SHARDS[1])
    assert_says(refusal(folder), "'a.weight' is in two shards", *SHARDS)


def test_a_single_file_beside_an_index(folder: Path) -> None:
    shard(folder)
    save_file(some_tensors(), folder / SINGLE)
    assert_says(refusal(folder), folder, f"both {SINGLE} and {INDEX}")


@pytest.mark.parametrize("outside", ["/etc/passwd", "../secret.safetensors", "sub/../../x", "C:\\x", "..\\x"])
def test_index_paths_stay_in_the_folder(folder: Path, outside: str) -> None:
    shard(folder, a=outside)
    assert_says(refusal(folder), folder / INDEX, "'a.weight'", outside, "outside the folder")


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_an_index_without_weight_map(folder: Path, index: object) -> None:
    shard(folder)
    (folder / INDEX).write_text(json.dumps(index))
    assert_says(refusal(folder), folder / INDEX, "no weight_map")


def test_an_index_that_maps_to_no_name(folder: Path) -> None:
    shard(folder)
    (folder / INDEX).write_text('{"weight_map": {"a.weight": 3}}')
    assert_says(refusal(folder), folder / INDEX, "'a.weight'", "3, not to a file")


# F4: sharded training state


@pytest.mark.parametrize(
    ("name", "shape"), [("h.0.weight", (0,)), ("h.0._flat_param", (8,)), ("_fsdp_wrapped_module.flat_param_0", (8,))]
)
def test_sharded_training_state(folder: Path, name: str, shape: tuple[int, ...]) -> None:
    save_file({"a": torch.ones(1), name: torch.ones(shape)}, folder / SINGLE)
    assert_says(refusal(folder), folder / SINGLE, f"'{name}'", "Consolidate first")


# F2: unsafe and damaged pickles


class Payload:
    """Creates a file when it is unpickled carelessly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_payload_is_refused_and_not_run(folder: Path, zipped: bool, protocol: int) -> None:
    made = folder / "made"
    tensors = {"a": torch.ones(2), "b": Payload(made)}
    torch.save(tensors, folder / BIN, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    words = (f"{os.name}.system", "run code") if protocol == 2 else ("protocol 4", "torch.save(model.state_dict()")
    assert_says(refusal(folder), folder / BIN, *words)
    assert not made.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_payload_pickled_without_torch(folder: Path, protocol: int) -> None:
    made = folder / "made"
    (folder / BIN).write_bytes(pickle.dumps({"a": Payload(made)}, protocol=protocol))
    fault = refusal(folder)
    assert_says(fault, folder / BIN, f"{os.name}.system" if protocol == 2 else f"protocol {protocol}")
    assert "weights_only" not in fault
    assert not made.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_type_that_is_not_known_to_be_inert_is_named(folder: Path, zipped: bool) -> None:
    state = {"model": some_tensors(), "when": datetime.timedelta(1)}
    torch.save(state, folder / BIN, _use_new_zipfile_serialization=zipped)
    assert_says(refusal(folder), folder / BIN, "datetime.timedelta", "torch.save(model.state_dict()")


#: What training runs keep beside the weights.
BESIDE = {
    "args": argparse.Namespace(lr=1e-3, out=Path("out")),
    "loss": np.float64(2.5),
    "step": np.int64(3),
    "seed": np.array([1, 2], np.uint32),
    "history": collections.defaultdict(list, {"loss": [1.0]}),
    "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("key", ["model", "state_dict", "module", "model_state_dict"])
def test_a_training_run_is_read_and_what_is_beside_the_weights_is_named(folder: Path, key: str, zipped: bool) -> None:
    tensors = some_tensors()
    torch.save({key: tensors, **BESIDE}, folder / BIN, _use_new_zipfile_serialization=zipped)
    checkpoint = Checkpoint.open(folder)
    assert_holds(checkpoint, tensors)
    assert set(checkpoint.left_out) == set(BESIDE)


def test_two_models_in_one_file_are_an_error(folder: Path) -> None:
    torch.save({"model": some_tensors(), "state_dict": some_tensors()}, folder / BIN)
    assert_says(refusal(folder), folder / BIN, "'state_dict'", "'model'")


FIRST_BYTES = {
    "a web page": b"<!DOCTYPE html><html><head><title>404</title></head></html>",
    "an XML message": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    "a git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    "begins with zeros": bytes(4096),
    "a JSON text": b'{"error": "Repository not found"}',
    "a GGUF file": b"GGUF" + bytes(100),
    "an HDF5 file": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "a gzip archive": b"\x1f\x8b\x08" + bytes(100),
}


@pytest.mark.parametrize("file", [SINGLE, BIN])
@pytest.mark.parametrize("what", FIRST_BYTES)
def test_what_is_no_weight_file_is_told_by_its_first_bytes(folder: Path, what: str, file: str) -> None:
    (folder / file).write_bytes(FIRST_BYTES[what])
    fault = refusal(folder)
    assert_says(fault, folder / file, what)
    assert re.search(r"Download|Run|Load|Unpack|Name it", fault)


def test_formats_under_each_other_s_names_are_told(folder: Path) -> None:
    save_file(some_tensors(), folder / BIN)
    assert_says(refusal(folder), folder / BIN, "a safetensors file", "pytorch_model.safetensors")
    (folder / BIN).unlink()
    torch.save(some_tensors(), folder / SINGLE)
    assert_says(refusal(folder), folder / SINGLE, "a pickle of torch.save", "pytorch_model.bin")


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "model.fp16.safetensors": ["variant 'fp16'", "Rename model.fp16.safetensors to model.safetensors"],
        "model.fp16.safetensors.index.json": ["variant 'fp16'", "model.safetensors.index.json"],
        "adapter_config.json": ["PEFT adapter", "merge_and_unload"],
        "global_step100": ["DeepSpeed", "zero_to_fp32.py"],
        "mp_rank_00_model_states.pt": ["DeepSpeed", "zero_to_fp32.py"],
        "pytorch_model_fsdp_0": ["FSDP", "merge-weights"],
        "__0_0.distcp": ["FSDP", "merge-weights"],
        "epoch=1.ckpt": ["Lightning", "pytorch_model.bin"],
        "lit_model.pth": ["LitGPT", "litgpt convert_from_litgpt"],
        "tf_model.h5": ["TensorFlow", "from_tf=True"],
        "flax_model.msgpack": ["Flax", "from_flax=True"],
        "weights.bin": ["under a name of their own", "pytorch_model.bin"],
    }.items(),
)
@pytest.mark.parametrize("config", [True, False])
def test_a_folder_of_another_program_is_told_by_its_names(folder: Path, name: str, words: list[str], config: bool):
    (folder / name).write_bytes(b"x")
    if not config:
        (folder / "config.json").unlink()
    assert_says(refusal(folder), folder, *words)


def test_a_single_file_is_told_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "last.ckpt"
    torch.save({"state_dict": some_tensors()}, file)
    with pytest.raises(CheckpointError, match=r"Lightning.*pytorch_model\.bin"):
        Checkpoint.open(file)


def test_files_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    tensors = some_tensors()
    (first, second) = list(tensors)[:2]
    for part, name in (("a", first), ("b", second)):
        (tmp_path / part).mkdir()
        save_file({name: tensors[name]}, tmp_path / part / "model.safetensors")
    weight_map = {first: "a/model.safetensors", second: "b/model.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path)
    files = {"config.json", "model.safetensors.index.json", *weight_map.values()}
    assert checkpoint.stats().keys() == checkpoint.sha256().keys() == files


@pytest.mark.parametrize("zipped", [True, False])
def test_a_whole_module(folder: Path, zipped: bool) -> None:
    torch.save(torch.nn.Linear(2, 2), folder / BIN, _use_new_zipfile_serialization=zipped)
    assert_says(refusal(folder), folder / BIN, "torch.nn.modules.linear.Linear")


def test_sharded_tensors_in_a_pickle(folder: Path) -> None:
    (folder / BIN).write_bytes(b"\x80\x02ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n.")
    assert_says(refusal(folder), folder / BIN, "ShardedTensor", "consolidate first")


def test_entries_that_are_no_tensors_are_named(folder: Path) -> None:
    torch.save({**some_tensors(), "step": 7}, folder / BIN)
    assert_says(refusal(folder), folder / BIN, "'step' (int)")


def test_a_pickle_of_something_else(folder: Path) -> None:
    torch.save([torch.ones(2)], folder / BIN)
    assert_says(refusal(folder), folder / BIN, "holds a list, not a dict")


def test_a_sparse_tensor(folder: Path) -> None:
    torch.save({"w": torch.eye(3).to_sparse()}, folder / BIN)
    assert_says(refusal(folder), folder / BIN, "'w' is not plain", "sparse")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_pickle(folder: Path, zipped: bool) -> None:
    torch.save(some_tensors(), folder / BIN, _use_new_zipfile_serialization=zipped)
    os.truncate(folder / BIN, (folder / BIN).stat().st_size - 100)
    assert_says(refusal(folder), folder / BIN, "damaged")


@pytest.mark.parametrize("data", [b"x", b"hello world", b"PK\x03\x04"])
def test_garbage_instead_of_a_pickle(folder: Path, data: bytes) -> None:
    (folder / BIN).write_bytes(data)
    assert_says(refusal(folder), folder / BIN, "damaged")


# C7 and the rest of the interface


@pytest.mark.parametrize("file", [SINGLE, BIN])
def test_same_tensor_compares_bits(folder: Path, file: str) -> None:
    wte = torch.randn(3000, 2000)  # more than one chunk
    wte[0, 0] = float("nan")
    head = wte.clone()
    head[-1, -1] += 1e-3
    tensors = {
        "wte": wte,
        "tied": wte.clone(),
        "head": head,
        "flat": wte.reshape(-1).clone(),
        "zero": torch.zeros(2),
        "minus": -torch.zeros(2),
        "half": torch.zeros(2).half(),
    }
    save_file(tensors, folder / file) if file == SINGLE else torch.save(tensors, folder / file)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.same_tensor("wte", "tied")
    assert not checkpoint.same_tensor("wte", "head")
    assert not checkpoint.same_tensor("wte", "flat")
    assert not checkpoint.same_tensor("zero", "minus")
    assert not checkpoint.same_tensor("zero", "half")


def test_sha256_covers_config_index_and_weights(folder: Path) -> None:
    shard(folder)
    checkpoint = Checkpoint.open(folder)
    digests = hash_beside(checkpoint).result()
    assert digests == checkpoint.sha256()
    expected = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in digests}
    assert digests == expected
    assert list(digests) == ["config.json", INDEX, *SHARDS]


def test_an_error_while_hashing_comes_with_the_result(folder: Path) -> None:
    save_file(some_tensors(), folder / SINGLE)
    checkpoint = Checkpoint.open(folder)
    (folder / SINGLE).unlink()
    with pytest.raises(FileNotFoundError):
        hash_beside(checkpoint).result()


def run(code: str, *arguments: object) -> str:
    """Run code in a fresh interpreter."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_opening_safetensors_needs_no_torch(folder: Path) -> None:
    shard(folder)
    run(
        """
        import sys
        from converter.files.checkpoint import Checkpoint
        checkpoint = Checkpoint.open(sys.argv[1])
        assert checkpoint.same_tensor("a.weight", "a.weight") and checkpoint.sha256()
        assert "torch" not in sys.modules
        """,
        folder,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("file", "limit"), [(SINGLE, 32), (BIN, 112)])
def test_memory_stays_at_the_largest_tensor(tmp_path_factory: pytest.TempPathFactory, file: str, limit: int) -> None:
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text("{}")
    tensors = {f"h.{layer}.weight": torch.full((8 << 20,), 1.0, dtype=torch.bfloat16) for layer in range(24)}  # 400 MB
    save_file(tensors, folder / file) if file == SINGLE else torch.save(tensors, folder / file)
    grown = run(
        """
        import sys
        import torch
        from converter.files.checkpoint import Checkpoint

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        checkpoint = Checkpoint.open(sys.argv[1])
        checkpoint.read("h.0.weight").sum()
        before, peak = resident(), 0
        for name in checkpoint.tensors:
            tensor = checkpoint.read(name)
            tensor.sum()
            peak = max(peak, resident())
            del tensor
            checkpoint.same_tensor(name, "h.0.weight")
            peak = max(peak, resident())
        print(peak - before)
        """,
        folder,
    )
    shutil.rmtree(folder)
    assert int(grown) < limit << 20, f"grew by {int(grown) >> 20} MB of a 400 MB file"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name, tmp_path):
    folder = models.save(models.gpt2(), tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name}: this is a pipe or a device"):
        Checkpoint.open(folder)


def test_a_compressed_pickle_is_refused_before_it_is_unpacked(tmp_path):
    folder = models.save(models.gpt2(), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10_000_000))
    with pytest.raises(CheckpointError, match="is compressed"):
        Checkpoint.open(folder)


def test_a_tensor_without_data_is_refused(folder):
    torch.save({"a.weight": torch.zeros(3, 5, device="meta")}, folder / BIN)
    with pytest.raises(CheckpointError, match=r"'a\.weight' is not plain: .* on meta"):
        Checkpoint.open(folder)


def test_a_tensor_larger_than_its_file_is_refused(folder):
    torch.save({"a.weight": torch.zeros(1).expand(10**6, 10**6)}, folder / BIN)
    with pytest.raises(CheckpointError, match=r"'a\.weight' of shape .* is larger than the file"):
        Checkpoint.open(folder)


def test_an_index_does_not_leave_the_folder_by_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    save_file(some_tensors(), tmp_path / "elsewhere" / SINGLE)
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    weight_map = dict.fromkeys(some_tensors(), f"sub/{SINGLE}")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert_says(refusal(folder), folder / INDEX, "outside the folder")
