"""A folder in Hugging Face's format: config.json, and weights in one file or in shards with an index."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from converter.errors import CheckpointError, OnFault, reporting
from converter.files.container import Container, Contents, WeightFile, open_weights, read_json
from converter.files.pickles import TorchFile
from converter.files.strangers import told_by_name

_SHARD = re.compile(r"(model-\d+-of-\d+\.safetensors|pytorch_model-\d+-of-\d+\.bin)")
_NEEDED = (
    "Needed: config.json with model.safetensors or pytorch_model.bin, or with their shards and index. "
    "Is another folder meant?"
)
_STALE = "The index and the shards are from different saves"


class HuggingFaceFolder(Container):
    """`config.json` with `model.safetensors`, `pytorch_model.bin`, or the shards and index of either.

    safetensors where both exist. A pickle may be a training run's checkpoint, with its dict of tensors under a key
    (`converter.files.pickles.NESTING_KEYS`).
    """

    def recognises(self, path: Path) -> bool:
        return path.is_dir()

    def open(self, path: Path, on_fault: OnFault) -> Contents:
        names = {entry.name for entry in path.iterdir()}
        config: dict[str, Any] = {}
        if "config.json" in names:
            with reporting(on_fault, path):
                config = read_json(path / "config.json", on_fault)
        else:
            told = told_by_name(names) if not has_weights(path) else None
            on_fault(
                CheckpointError(
                    "the folder has no config.json",
                    where=str(path),
                    why=f"{told[0]} is {told[1]}" if told else None,
                    fix=told[2] if told else _NEEDED,
                )
            )
        generation_config = None
        if "generation_config.json" in names:
            with reporting(on_fault, path):
                generation_config = read_json(path / "generation_config.json", on_fault)
        described_by, weights = [path / "config.json"], dict[Path, WeightFile]()
        with reporting(on_fault, path):
            source = _find_weights(path, names, on_fault)
            if source.suffix == ".json":
                described_by.append(source)
                weights = _open_shards(source, names, on_fault)
            else:
                weights = {source: open_weights(source, on_fault)}
        left_out = {
            key: why for file in weights.values() if isinstance(file, TorchFile) for key, why in file.left_out.items()
        }
        return Contents(config, path / "config.json", weights, tuple(described_by), generation_config, left_out)


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights by one of the names of this format."""
    names = {entry.name for entry in folder.iterdir()}
    return any(name in names for single in _SINGLES for name in (single, single + ".index.json"))


_SINGLES = ("model.safetensors", "pytorch_model.bin")


def _find_weights(folder: Path, names: set[str], on_fault: OnFault) -> Path:
    """The single weight file, or the index of several."""
    for single in _SINGLES:
        index = single + ".index.json"
        if single in names and index in names:
            on_fault(
                CheckpointError(
                    f"both {single} and {index} are there, and they may hold different weights",
                    where=str(folder),
                    fix="Remove the one that does not belong.",
                )
            )
        for name in (index, single):
            if name in names:
                return folder / name
    shards = sorted(filter(_SHARD.fullmatch, names))
    told = None if shards else told_by_name(names)
    if told is not None:
        name, kind, fix = told
        raise CheckpointError(
            "the folder has no weights that can be read", where=str(folder), why=f"{name} is {kind}", fix=fix
        )
    fix = f"The index that belongs to {shards[0]} is needed too." if shards else _NEEDED
    raise CheckpointError("the folder has no weights", where=str(folder), fix=fix)


def _open_shards(index: Path, names: set[str], on_fault: OnFault) -> dict[Path, WeightFile]:
    """The files that the index names, and any shard beside them that it should have named."""
    weight_map = _read_index(index, on_fault)
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    shards = {name for name in names if _SHARD.fullmatch(name) and name.endswith(suffix)}
    weights: dict[Path, WeightFile] = {}
    for shard in sorted(shards.union(weight_map.values())):
        file = index.parent / shard
        if not file.exists():
            tensors = [tensor for tensor, home in weight_map.items() if home == shard]
            more = f" and {len(tensors) - 1} more" if tensors[1:] else ""
            what = f"the shard {shard} is missing, which holds tensor '{tensors[0]}'{more}"
            fix = "Download the missing file."
            on_fault(CheckpointError(what, where=str(index), tensor=tensors[0], fix=fix))
            continue
        with reporting(on_fault, file):
            weights[file] = open_weights(file, on_fault)
    _check_index(index, weight_map, weights, on_fault)
    return weights


def _read_index(index: Path, on_fault: OnFault) -> dict[str, str]:
    """Tensor name -> shard, both plain names of things inside the folder."""
    weight_map = read_json(index, on_fault).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("the index has no weight_map", where=str(index), fix="Download it again.")
    shards = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard:
            what = f"the index maps tensor '{tensor}' to {shard!r}, not to a file"
            on_fault(CheckpointError(what, where=str(index), tensor=tensor, fix="Download the index again"))
            continue
        paths = (PurePosixPath(shard), PureWindowsPath(shard))
        folder = index.parent.resolve()
        linked = (
            not (index.parent / shard).parent.resolve().is_relative_to(folder)
        )  # a file may be a link: the Hub's are
        if linked or any(path.anchor or ".." in path.parts for path in paths):
            what = f"the index maps tensor '{tensor}' to '{shard}', outside the folder"
            why = "Shards are only read from beside their index"
            on_fault(CheckpointError(what, where=str(index), tensor=tensor, why=why))
            continue
        shards[tensor] = PurePosixPath(shard).as_posix()
    return shards


def _check_index(
    index: Path, weight_map: Mapping[str, str], weights: Mapping[Path, WeightFile], on_fault: OnFault
) -> None:
    """Every tensor is in exactly the one shard that the index names."""

    def fault(name: str, what: str) -> None:
        on_fault(CheckpointError(what, where=str(index), tensor=name, why=_STALE))

    homes = defaultdict(list)
    for file, weight_file in weights.items():
        for name in weight_file.names:
            homes[name].append(file.relative_to(index.parent).as_posix())
    for name, files in homes.items():
        if len(files) > 1:
            fault(name, f"tensor '{name}' is in two shards: {files[0]} and {files[1]}")
        elif name not in weight_map:
            fault(name, f"tensor '{name}' of {files[0]} is absent from the index")
        elif weight_map[name] != files[0]:
            fault(name, f"the index maps tensor '{name}' to {weight_map[name]}, but it is in {files[0]}")
    for name, shard in weight_map.items():
        if name not in homes and index.parent / shard in weights:
            fault(name, f"the index maps tensor '{name}' to {shard}, but no shard holds it")
