"""Containers: how a checkpoint lies on the disk. One small file for each kind.

Whatever its kind, a container is opened by its headers and gives a config, and weight files that are read
one tensor at a time. To add one, write a file here with a `Container` and name it in `checkpoint.find_container`.

The rules bring what is wrong to `on_fault`, and go on where something is left to look at: so opening stops
at the first fault, and `converter check` lists them all, by the same rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from converter.errors import CheckpointError, OnFault
from converter.files.json_text import parse_json
from converter.files.pickles import TorchFile
from converter.files.safetensors import Layout, SafetensorsFile
from converter.files.strangers import refuse_other_format, refuse_stranger

if TYPE_CHECKING:
    import torch


class WeightFile(Protocol):
    """What every weight file offers; names are raw ones."""

    @property
    def names(self) -> Collection[str]:
        """Every tensor that the file lists."""

    @property
    def layout(self) -> Mapping[str, Layout]:
        """Shape and dtype name of every tensor that can be read: without faults, of all of them."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """One tensor's bytes, in pieces."""


@dataclass(frozen=True)
class Contents:
    """What was found in a container."""

    config: dict[str, Any]
    #: Where the config stands.
    config_file: Path
    weights: Mapping[Path, WeightFile]
    #: The files beside the weights that the checkpoint consists of.
    described_by: tuple[Path, ...] = ()
    generation_config: dict[str, Any] | None = None
    #: What else is in the weight files, and why it is left out.
    left_out: Mapping[str, str] = field(default_factory=dict)
    #: What a user should know about the files.
    remarks: tuple[str, ...] = ()


class Container(ABC):
    """One kind."""

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Whether this folder or file is of this kind, by its name and the names in it."""

    @abstractmethod
    def open(self, path: Path, on_fault: OnFault) -> Contents:
        """The contents. Raises a `CheckpointError` where a fault leaves nothing to go on with."""


def open_weights(path: Path, on_fault: OnFault) -> WeightFile:
    """A weight file, by the container that its suffix names."""
    refuse_special(path)
    refuse_other_format(path)
    return SafetensorsFile(path, on_fault) if path.suffix == ".safetensors" else TorchFile(path, on_fault)


def read_json(path: Path, on_fault: OnFault) -> dict[str, Any]:
    """The object in a JSON file."""
    refuse_placeholder(path)

    def repeated(name: str) -> None:
        why = "of the two, readers would silently take the last"
        on_fault(CheckpointError(f"'{name}' stands twice in one object", where=str(path), why=why))

    try:
        value = parse_json(path.read_bytes(), repeated)
    except ValueError as error:
        raise CheckpointError("this is not valid JSON", where=str(path), why=str(error)) from error
    if not isinstance(value, dict):
        what = f"this is a JSON {type(value).__name__} where an object is expected"
        raise CheckpointError(what, where=str(path), fix="Take the file from the original again")
    return value


def refuse_special(path: Path) -> None:
    """Stop at a pipe or a device, which reading would wait for or never end with."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise CheckpointError(
            "this is a pipe or a device", where=str(path), why="Only files are read", fix="Put a plain file there."
        )


def refuse_placeholder(path: Path) -> None:
    """Stop at a file that only stands for one."""
    refuse_special(path)
    refuse_stranger(path)
