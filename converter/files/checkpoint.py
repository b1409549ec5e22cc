"""A checkpoint, opened by its headers and read one tensor at a time.

Opening checks everything that can be known without the data: that the files are whole, that the index
and the shards agree, that names are unique. Only a pickle needs torch for that. How the files lie on the
disk is the business of `converter.files.container`.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from converter.errors import CheckpointError, OnFault, UnfinishedSwapError, raise_fault, reporting
from converter.files.container import Container, Contents, WeightFile, refuse_placeholder, refuse_special
from converter.files.gguf import GGUFContainer
from converter.files.hub import hub_id
from converter.files.huggingface import HuggingFaceFolder
from converter.files.llama_meta import LlamaMetaFolder
from converter.files.nanogpt import NanoGPTFile
from converter.files.safetensors import SafetensorsFile, num_bytes
from converter.files.strangers import told_by_name

if TYPE_CHECKING:
    import torch

#: Parts of a dotted name that wrappers (DDP, torch.compile, FSDP, activation checkpointing) add anywhere in it.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

_CHUNK = 1 << 20


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: `name` is free of wrappers, `raw_name` is the one in `file`."""

    name: str
    raw_name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    nbytes: int


#: What is there while rows are moved in place: which ones, and where to (`converter.rope.journal`).
SWAP_PLAN = Path(".rope-swap", "plan")


class Checkpoint:
    """An opened checkpoint. `open` makes one, and nothing has to be closed.

    `path` is its folder and `opened` what was opened: the same, or a file in it. `tensors` goes by cleaned
    name, in file order; `files` are the weight files; `left_out` is what else they hold, with the reason.
    """

    def __init__(self, opened: Path, contents: Contents, on_fault: OnFault = raise_fault) -> None:
        self.opened = opened
        self.path = opened if opened.is_dir() else opened.parent
        self.config = contents.config
        self.config_file = contents.config_file
        self.generation_config = contents.generation_config
        self.left_out = contents.left_out
        self.remarks = contents.remarks
        self._weights = contents.weights
        self.files = list(contents.weights)
        self._described_by = contents.described_by
        self.tensors = _gather(contents.weights, on_fault)

    @classmethod
    def open(cls, path: str | Path, on_fault: OnFault = raise_fault) -> Checkpoint:
        """Open a folder or a file of a kind that `converter.files.container` knows.

        Raises `CheckpointError` where there is no such thing. Anything damaged, incomplete, contradictory or
        unsafe is raised too; with another `on_fault` it is brought there, and the checkpoint has what is left.
        """
        path = Path(path)
        with reporting(raise_fault, path):
            container = find_container(path)
        if (path if path.is_dir() else path.parent).joinpath(SWAP_PLAN).exists():
            on_fault(
                UnfinishedSwapError(
                    "an in-place swap of RoPE layouts was stopped half-way here, so its rows are in two layouts",
                    where=str(path),
                    fix="Finish it with the same command again, or undo it with `converter rope swap --roll-back`",
                )
            )
        contents = Contents({}, path, {})
        with reporting(on_fault, path):
            contents = container.open(path, on_fault)
        return cls(path, contents, on_fault)

    @property
    def name(self) -> str:
        """What people call it: a Hub id, or the name of the folder, and of the file if one was opened."""
        folder = self.path.resolve()
        name = hub_id(folder) or folder.name
        return name if self.opened == self.path else f"{name}/{self.opened.name}"

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

    def start(self, name: str) -> int | None:
        """The byte of its file at which a tensor's data begins; None where the file is no plain container of bytes."""
        info = self.tensors[name]
        weights = self._weights[info.file]
        return weights.span(info.raw_name)[0] if isinstance(weights, SafetensorsFile) else None

    def same_tensor(self, a: str, b: str) -> bool:
        """Whether two tensors are equal in shape, dtype and every bit; compared in pieces."""
        first, second = self.tensors[a], self.tensors[b]
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        pieces = [self._weights[info.file].chunks(info.raw_name) for info in (first, second)]
        return all(x == y for x, y in zip(*pieces, strict=True))

    @property
    def all_files(self) -> list[Path]:
        """The config, the index where there is one, and every weight file."""
        return list(dict.fromkeys([*self._described_by, *self.files]))

    def stats(self) -> dict[str, list[int]]:
        """Size and time of all files, to know an untouched checkpoint again by."""
        stats = {file.relative_to(self.path).as_posix(): file.stat() for file in self.all_files}
        return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}

    def sha256(self) -> dict[str, str]:
        """Hex digest of all files, by name relative to the folder."""
        return {file.relative_to(self.path).as_posix(): _sha256(file) for file in self.all_files}


def hash_beside(checkpoint: Checkpoint) -> Future[dict[str, str]]:
    """`Checkpoint.sha256` in a thread beside the caller's work: hashing holds no lock that Python needs.

    A process that ends does not wait for it.
    """
    future: Future[dict[str, str]] = Future()

    def work() -> None:
        try:
            future.set_result(checkpoint.sha256())
        except Exception as error:  # raised by `result`
            future.set_exception(error)

    threading.Thread(target=work, name="source-hash", daemon=True).start()
    return future


def clean_name(raw_name: str) -> str:
    """The name without the parts that wrappers added."""
    return ".".join(part for part in raw_name.split(".") if part not in WRAPPERS) or raw_name


def _gather(weights: Mapping[Path, WeightFile], on_fault: OnFault) -> dict[str, TensorInfo]:
    """Every tensor by its cleaned name."""
    tensors: dict[str, TensorInfo] = {}
    for info in _infos(weights):
        if "flat_param" in info.raw_name or 0 in info.shape:
            on_fault(
                CheckpointError(
                    f"tensor '{info.raw_name}' of shape {list(info.shape)} is a piece of sharded training state",
                    where=str(info.file),
                    tensor=info.raw_name,
                    fix="Consolidate first: save the full state dict with the framework that trained it.",
                )
            )
            continue
        twin = tensors.setdefault(info.name, info)
        if twin is not info and twin.raw_name != info.raw_name:
            on_fault(
                CheckpointError(
                    f"'{twin.raw_name}' ({twin.file.name}) and '{info.raw_name}' ({info.file.name}) "
                    f"are both '{info.name}' without their wrappers",
                    where=str(info.file.parent),
                    tensor=info.raw_name,
                    fix="Remove the one that does not belong.",
                )
            )
    if weights and not any(weight_file.names for weight_file in weights.values()):
        where = str(next(iter(weights)))
        on_fault(CheckpointError("the weight files hold no tensors", where=where, fix="Download or copy them again"))
    return tensors


def _infos(weights: Mapping[Path, WeightFile]) -> Iterable[TensorInfo]:
    for file, weight_file in weights.items():
        for raw_name, (shape, dtype) in weight_file.layout.items():
            yield TensorInfo(clean_name(raw_name), raw_name, shape, dtype, file, num_bytes(shape, dtype))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def find_container(path: Path) -> Container:
    """The kind that a path is of, special kinds before general ones; raises where it is none."""
    if not path.exists():
        raise CheckpointError("there is no such file or folder", where=str(path), fix="Check the spelling")
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not file.name.startswith("."):
            refuse_special(file)
    for container in (NanoGPTFile(), LlamaMetaFolder(), GGUFContainer(), HuggingFaceFolder()):
        if container.recognises(path):
            return container
    refuse_placeholder(path)
    told = None if path.with_name("config.json").exists() else told_by_name([path.name])
    what, fix = told[1:] if told else ("a file", f"Give the folder that holds it: {path.parent}")
    raise CheckpointError(f"this is {what}", where=str(path), fix=fix)
