"""A checkpoint folder, opened by its headers and read one tensor at a time.

Opening checks everything that can be known without the data: that the files are whole, that the index
and the shards agree, that names are unique. Only a pickle needs torch for that.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, Protocol

from converter.errors import CheckpointError
from converter.safetensors_file import Layout, SafetensorsFile, num_bytes
from converter.torch_file import TorchFile

if TYPE_CHECKING:
    import torch

#: Parts of a dotted name that wrappers (DDP, torch.compile, FSDP, activation checkpointing) add anywhere in it.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

_SHARD = re.compile(r"(model-\d+-of-\d+\.safetensors|pytorch_model-\d+-of-\d+\.bin)")
_LFS_POINTER = b"version https://git-lfs"
_CHUNK = 1 << 20
_NEEDED = (
    "Needed: config.json with model.safetensors or pytorch_model.bin, or with their shards and index. "
    "Is another folder meant?"
)


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: `name` is free of wrappers, `raw_name` is the one in `file`."""

    name: str
    raw_name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    nbytes: int


class WeightFile(Protocol):
    """What both containers offer; names are raw ones."""

    @property
    def layout(self) -> Mapping[str, Layout]:
        """Shape and dtype name of every tensor."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """One tensor's bytes, in pieces."""


class Checkpoint:
    """An opened checkpoint. `open` makes one, and nothing has to be closed.

    `tensors` goes by cleaned name, in file order; `files` are the weight files; `index` is their index
    where there is one.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        weights: Mapping[Path, WeightFile],
        *,
        index: Path | None = None,
        generation_config: dict[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.config = config
        self.index = index
        self.generation_config = generation_config
        self._weights = weights
        self.files = list(weights)
        self.tensors = _gather(weights)

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open a folder with `config.json` and weights.

        The weights are `model.safetensors`, `pytorch_model.bin`, or shards with the index of either;
        safetensors where both exist. A pickle may hold its dict of tensors under one key
        (`converter.torch_file.NESTING_KEYS`). Raises `CheckpointError` for anything damaged,
        incomplete, contradictory or unsafe.
        """
        folder = Path(path)
        try:
            if not folder.is_dir():
                raise _not_a_folder(folder)
            names = {entry.name for entry in folder.iterdir()}
            if "config.json" not in names:
                raise CheckpointError("the folder has no config.json", where=str(folder), fix=_NEEDED)
            config = _read_json(folder / "config.json")
            generation = folder / "generation_config.json"
            generation_config = _read_json(generation) if generation.name in names else None
            source = _find_weights(folder, names)
            index = source if source.suffix == ".json" else None
            weights = _open_shards(index, names) if index else {source: _open_weights(source)}
            return cls(folder, config, weights, index=index, generation_config=generation_config)
        except OSError as error:
            raise CheckpointError(
                f"the file cannot be read: {error.strerror or error}", where=str(error.filename or folder)
            ) from error

    @property
    def total_bytes(self) -> int:
        """Size of all tensors' data, as stored."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def num_parameters(self) -> int:
        """Number of stored elements: buffers count, and a tied pair counts as often as it is stored."""
        return sum(math.prod(info.shape) for info in self.tensors.values())

    def read(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype: a private view of the file, whose memory goes when it goes.

        Writing to it changes neither the file nor a later read. What another writer does to the file
        may show in it, so clone before patching a file in place.
        """
        info = self.tensors[name]
        return self._weights[info.file].read(info.raw_name)

    def same_tensor(self, a: str, b: str) -> bool:
        """Whether two tensors are equal in shape, dtype and every bit; compared in pieces."""
        first, second = self.tensors[a], self.tensors[b]
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        pieces = [self._weights[info.file].chunks(info.raw_name) for info in (first, second)]
        return all(x == y for x, y in zip(*pieces, strict=True))

    def sha256(self) -> dict[str, str]:
        """Hex digest of config.json, the index and every weight file, by name relative to the folder."""
        files = [self.path / "config.json", *([self.index] if self.index else []), *self.files]
        return {file.relative_to(self.path).as_posix(): _sha256(file) for file in files}


class SourceHash:
    """`Checkpoint.sha256` in a thread, beside the conversion: hashing holds no lock that Python needs."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._digests: dict[str, str] = {}
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="source-hash", daemon=True)

    def start(self) -> SourceHash:
        """Begin, and return self."""
        self._thread.start()
        return self

    def result(self) -> dict[str, str]:
        """Wait for the digests; an error of the thread is raised here."""
        self._thread.join()
        if self._error:
            raise self._error
        return self._digests

    def _run(self) -> None:
        try:
            self._digests = self._checkpoint.sha256()
        except Exception as error:  # handed over to `result`
            self._error = error


def clean_name(raw_name: str) -> str:
    """The name without the parts that wrappers added."""
    return ".".join(part for part in raw_name.split(".") if part not in WRAPPERS) or raw_name


def _not_a_folder(path: Path) -> CheckpointError:
    if path.exists():
        return CheckpointError("this is a file", where=str(path), fix=f"Give the folder that holds it: {path.parent}")
    return CheckpointError(
        "there is no such folder", where=str(path), fix="A model of the Hub is fetched with `hf download` first."
    )


def _find_weights(folder: Path, names: set[str]) -> Path:
    """The single weight file, or the index of several."""
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = single + ".index.json"
        if single in names and index in names:
            raise CheckpointError(
                f"both {single} and {index} are there, and they may hold different weights",
                where=str(folder),
                fix="Remove the one that does not belong.",
            )
        for name in (single, index):
            if name in names:
                return folder / name
    shards = sorted(filter(_SHARD.fullmatch, names))
    if any(name.endswith(".distcp") for name in names):
        fix = "This is sharded training state: consolidate first."
    elif shards:
        fix = f"The index that belongs to {shards[0]} is needed too."
    else:
        fix = _NEEDED
    raise CheckpointError("the folder has no weights", where=str(folder), fix=fix)


def _open_weights(path: Path) -> WeightFile:
    _refuse_placeholder(path)
    return TorchFile(path) if path.suffix == ".bin" else SafetensorsFile(path)


def _open_shards(index: Path, names: set[str]) -> dict[Path, WeightFile]:
    """The files that the index names, and any shard beside them that it should have named."""
    weight_map = _read_index(index)
    for tensor, shard in weight_map.items():
        if not (index.parent / shard).exists():
            raise CheckpointError(
                f"the shard {shard} is missing, which holds tensor '{tensor}'",
                where=str(index),
                fix="Download the missing file.",
            )
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    beside = {name for name in names if _SHARD.fullmatch(name) and name.endswith(suffix)}
    files = [index.parent / shard for shard in sorted(beside.union(weight_map.values()))]
    weights = {file: _open_weights(file) for file in files}
    _check_index(index, weight_map, weights)
    return weights


def _read_index(index: Path) -> dict[str, str]:
    """Tensor name -> shard, both plain names of things inside the folder."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("the index has no weight_map", where=str(index), fix="Download it again.")
    shards = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard:
            raise CheckpointError(f"the index maps tensor '{tensor}' to {shard!r}, not to a file", where=str(index))
        paths = (PurePosixPath(shard), PureWindowsPath(shard))
        if any(path.anchor or ".." in path.parts for path in paths):
            raise CheckpointError(
                f"the index maps tensor '{tensor}' to '{shard}', outside the folder",
                where=str(index),
                why="Shards are only read from beside their index",
            )
        shards[tensor] = PurePosixPath(shard).as_posix()
    return shards


def _check_index(index: Path, weight_map: Mapping[str, str], weights: Mapping[Path, WeightFile]) -> None:
    """Every tensor is in exactly the one shard that the index names."""
    homes = defaultdict(list)
    for file, weight_file in weights.items():
        for name in weight_file.layout:
            homes[name].append(file.relative_to(index.parent).as_posix())
    stale = "The index and the shards are from different saves"
    for name, files in homes.items():
        if len(files) > 1:
            what = f"tensor '{name}' is in two shards: {files[0]} and {files[1]}"
        elif name not in weight_map:
            what = f"tensor '{name}' of {files[0]} is absent from the index"
        elif weight_map[name] != files[0]:
            what = f"the index maps tensor '{name}' to {weight_map[name]}, but it is in {files[0]}"
        else:
            continue
        raise CheckpointError(what, where=str(index), why=stale)
    for name, shard in weight_map.items():
        if name not in homes:
            raise CheckpointError(
                f"the index maps tensor '{name}' to {shard}, but no shard holds it", where=str(index), why=stale
            )


def _gather(weights: Mapping[Path, WeightFile]) -> dict[str, TensorInfo]:
    """Every tensor by its cleaned name."""
    tensors: dict[str, TensorInfo] = {}
    for info in _infos(weights):
        if "flat_param" in info.raw_name or 0 in info.shape:
            raise CheckpointError(
                f"tensor '{info.raw_name}' of shape {list(info.shape)} is a piece of sharded training state",
                where=str(info.file),
                fix="Consolidate first: save the full state dict with the framework that trained it.",
            )
        twin = tensors.setdefault(info.name, info)
        if twin is not info:
            raise CheckpointError(
                f"'{twin.raw_name}' ({twin.file.name}) and '{info.raw_name}' ({info.file.name}) "
                f"are both '{info.name}' without their wrappers",
                where=str(info.file.parent),
                fix="Remove the one that does not belong.",
            )
    if not tensors:
        raise CheckpointError("the weight files hold no tensors", where=", ".join(map(str, weights)))
    return tensors


def _infos(weights: Mapping[Path, WeightFile]) -> Iterable[TensorInfo]:
    for file, weight_file in weights.items():
        for raw_name, (shape, dtype) in weight_file.layout.items():
            yield TensorInfo(clean_name(raw_name), raw_name, shape, dtype, file, num_bytes(shape, dtype))


def _read_json(path: Path) -> dict[str, Any]:
    _refuse_placeholder(path)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError("this is not valid JSON", where=str(path), why=str(error)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"this is a JSON {type(value).__name__} where an object is expected", where=str(path))
    return value


def _refuse_placeholder(path: Path) -> None:
    """Stop at a file that only stands for one."""
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
    if not start:
        raise CheckpointError("the file is empty", where=str(path), fix="Download or copy it again.")
    if start == _LFS_POINTER:
        raise CheckpointError(
            "this is a git-lfs pointer, not the file itself",
            where=str(path),
            fix="Run `git lfs pull` in the repository, or download with `hf download`.",
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
