"""Files and folders that people take for a checkpoint, told by their names or first bytes, with what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from converter.errors import CheckpointError

_AGAIN = "Download it again; `hf download` fetches the files themselves."
#: First bytes, in lower case and without white space before them: what they are, and what to do.
_STARTS = (
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself", "Run `git lfs pull`, or `hf download`."),
    (b"<!doctype html", "a web page, not the file that its name says", _AGAIN),
    (b"<html", "a web page, not the file that its name says", _AGAIN),
    (b"<?xml", "an XML message, which servers send in the place of a file", _AGAIN),
    (b"<error", "an XML message, which servers send in the place of a file", _AGAIN),
)
#: First bytes of other formats of weights.
_FORMATS = (
    (b"GGUF", "a GGUF file", "Name it *.gguf, and give the file itself."),
    (
        b"\x89HDF",
        "an HDF5 file of TensorFlow or Keras",
        "Load it with transformers 4 (from_tf=True) and save it again.",
    ),
    (b"\x93NUMPY", "a NumPy array", "Save the named tensors as model.safetensors."),
    (b"\x1f\x8b", "a gzip archive", "Unpack it first."),
    (b"\xfd7zXZ", "an xz archive", "Unpack it first."),
    (b"(\xb5/\xfd", "a zstandard archive", "Unpack it first."),
)
_VARIANT = re.compile(r"(model|pytorch_model)\.(\w+)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
_NO_TORCH = "Load it with transformers 4 (from_{0}=True), which still reads it, and save it again."
_LIGHTNING = "PyTorch Lightning and others save training runs under this name"
_RENAME = "Put it into a folder with the model's config.json, as pytorch_model.bin."
#: Names that files of other programs have: what they are, and what to do.
_NAMES = (
    (r"lit_model\.pth|lit_config\.json|model_config\.yaml", "LitGPT's format", "Run `litgpt convert_from_litgpt`."),
    (r"adapter_(config\.json|model\.(safetensors|bin))", "a PEFT adapter, which holds no model of its own",
     "Merge it into its base: load it with PEFT, `merge_and_unload()`, and save the result."),
    (r"(bf16_)?zero_pp_rank_.*|.*mp_rank_\d+_model_states\.pt|global_step\d+|zero_to_fp32\.py", "DeepSpeed's sharded "
     "training state", "Consolidate first: `python zero_to_fp32.py FOLDER OUT`, which DeepSpeed puts beside it."),
    (r"pytorch_model_fsdp_\d+|.*\.distcp|pytorch_model_fsdp\.bin|\.metadata", "FSDP's sharded training state",
     "Consolidate first: `accelerate merge-weights FOLDER OUT`."),
    (r"tf_model.*\.h5|.*\.ckpt\.(index|meta|data.*)", "TensorFlow weights", _NO_TORCH.format("tf")),
    (r"flax_model.*\.msgpack", "Flax weights", _NO_TORCH.format("flax")),
    (r".*\.onnx", "an ONNX graph", "Take the checkpoint that it was exported from."),
    (r"consolidated\.\d\d\.pth", "weights in Meta's format", "Give the folder, with Meta's params.json in it."),
    (r".*\.gguf", "a GGUF file", "Give the file itself."),
    (r".*\.ckpt", "a checkpoint of a training run, as PyTorch Lightning saves it", _RENAME),
    (r".*\.(pth|pt|bin)", "weights under a name of their own", _RENAME),
    (r".*\.safetensors", "weights under a name of their own",
     "Put them into a folder with the model's config.json, as model.safetensors."),
)  # fmt: skip


def told_by_name(names: Iterable[str]) -> tuple[str, str, str] | None:
    """(name, what it is, what to do) of the first of these names that other programs give; None where none is known."""
    listed = sorted(names)
    for name in listed:
        if variant := _VARIANT.fullmatch(name):
            plain = f"{variant[1]}{variant[3] or ''}.{variant[4]}{variant[5] or ''}"
            fix = f"Rename {name} to {plain}, and shards and names in an index likewise, if this is the one to convert."
            return name, f"the variant '{variant[2]}' of the weights", fix
    for pattern, what, fix in _NAMES:
        for name in listed:
            if re.fullmatch(pattern, name):
                return name, what, fix
    return None


def refuse_stranger(path: Path) -> None:
    """Stop at a file that only stands for one: empty, a pointer, or what a server sent in its place."""
    with path.open("rb") as file:
        start = file.read(512)
    if not start:
        raise CheckpointError("the file is empty", where=str(path), fix="Download or copy it again.")
    if not start.strip(b"\0"):
        raise CheckpointError(
            "the file begins with zeros",
            where=str(path),
            why="Space was reserved for it, and a download or a copy never filled it",
            fix="Download or copy it again.",
        )
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for beginning, what, fix in _STARTS:
        if text.startswith(beginning):
            raise CheckpointError(f"this is {what}", where=str(path), fix=fix)


def refuse_other_format(path: Path) -> None:
    """Stop at a weight file of another format than its name says."""
    refuse_stranger(path)
    with path.open("rb") as file:
        start = file.read(512)
    kind = next(((what, fix) for beginning, what, fix in _FORMATS if start.startswith(beginning)), None)
    if kind is None and path.suffix != ".safetensors" and start[8:9] == b"{":
        length = int.from_bytes(start[:8], "little")
        if length < path.stat().st_size:
            kind = "a safetensors file", f"Rename it to {path.with_suffix('.safetensors').name}."
    if kind is None and path.suffix == ".safetensors" and (start[:4] == b"PK\x03\x04" or start[:2] == b"\x80\x02"):
        kind = (
            "a pickle of torch.save",
            f"Rename it to {path.with_suffix('.bin').name.replace('model', 'pytorch_model')}.",
        )
    if kind is None and _is_json(start, path):
        kind = "a JSON text", "Download it again: a server may have sent a message in its place."
    if kind is not None:
        raise CheckpointError(f"this is {kind[0]}, not what its name says", where=str(path), fix=kind[1])


def _is_json(start: bytes, path: Path) -> bool:
    if not start.lstrip().startswith((b"{", b"[")) or path.stat().st_size > len(start):
        return False
    try:
        json.loads(start)
    except ValueError:
        return False
    return True
