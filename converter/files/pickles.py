"""Weights as `torch.save` wrote them: a pickle of a dict of tensors.

A pickle can name any function and call it, so it is loaded with `weights_only=True` always, and what
that refuses is refused here with the offending global named.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from converter.errors import CheckpointError, OnFault, raise_fault
from converter.files.safetensors import Layout, is_known_dtype

if TYPE_CHECKING:
    import torch

#: Keys under which trainers keep the state dict.
NESTING_KEYS = ("state_dict", "model", "module", "model_state_dict")

#: What numpy's numbers and arrays are made by when they are unpickled.
_SCALAR: Any = np.float64(0).__reduce__()[0]
_RECONSTRUCT: Any = np.zeros(0).__reduce__()[0]
#: What training runs keep beside the weights that holds values and does nothing: types of the standard library, and
#: numpy's numbers and arrays of them. Under the names that older versions of their modules gave them as well.
_INERT: dict[str, Callable[..., Any]] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "collections.defaultdict": lambda *default: {},
    "pathlib.Path": pathlib.Path,
    "pathlib.PosixPath": pathlib.PurePosixPath,
    "pathlib.WindowsPath": pathlib.PureWindowsPath,
    "pathlib._local.PosixPath": pathlib.PurePosixPath,
    "pathlib._local.WindowsPath": pathlib.PureWindowsPath,
    "builtins.dict": dict,
    "builtins.list": list,
    "builtins.int": int,
    "builtins.float": float,
    "numpy.dtype": np.dtype,
    "numpy.ndarray": np.ndarray,
    **{
        f"numpy.{core}.multiarray.{name}": function
        for core in ("core", "_core")
        for name, function in (("scalar", _SCALAR), ("_reconstruct", _RECONSTRUCT))
    },
    **{
        f"numpy.dtypes.{kind.__name__}": kind
        for kind in (type(np.dtype(code)) for code in (*"?bBhHiIlLqQefd", "S", "U"))
    },
}
#: What torch says of a type that it refuses.
_REFUSED = re.compile(r"(?:GLOBAL |class |``)([\w.]+)")
#: How `torch.save` began a file before torch 1.6: a pickle of this number.
_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
#: The protocol of pickles that torch reads as values alone.
_PROTOCOL = 2
#: A mapping is renewed once tensors of this many bytes came from it: their pages count as memory until then.
_REMAP_AFTER = 64 << 20
_CHUNK = 16 << 20


class TorchFile:
    """One file of `torch.save`: a dict of tensors, or a training run's that has one under a `NESTING_KEYS` key.

    `left_out` names what such a dict holds beside it, with the reason.

    With `entry` the tensors are under that key of a larger dict, and `beside` has its other keys, with their
    values where those are plain (numbers, text, lists and dicts of them) and None otherwise.

    `layout` has the tensors that can be read, `names` all of them. The zip format (torch 1.6 and later) is
    mapped, and read a tensor at a time. The older one has no random access: such a file stays in memory
    while this object lives.
    """

    def __init__(self, path: Path, on_fault: OnFault = raise_fault, *, entry: str | None = None) -> None:
        self.path = path
        self._entry = entry
        with path.open("rb") as file:
            self._mapped = file.read(4) == b"PK\x03\x04"
        self._handed_out: dict[int, int] = {}  # address of a storage: bytes
        self.left_out: dict[str, str] = {}
        loaded = self._load()
        self.beside = {
            key: value if _is_plain(value) else None
            for key, value in (loaded.items() if entry is not None and isinstance(loaded, dict) else ())
            if isinstance(key, str) and key != entry
        }
        state = self._find_state(loaded)
        self.names = list(state)
        self._state = {name: tensor.detach() for name, tensor in state.items() if self._check(name, tensor, on_fault)}
        self.layout: dict[str, Layout] = {
            name: (tuple(tensor.shape), _dtype_name(tensor)) for name, tensor in self._state.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """One tensor that nobody else holds: writing to it changes neither the file nor a later read."""
        if not self._mapped:
            return self._state[name].clone()
        address = self._state[name].untyped_storage().data_ptr()
        if address in self._handed_out or sum(self._handed_out.values()) > _REMAP_AFTER:
            self._remap()
            address = self._state[name].untyped_storage().data_ptr()
        tensor = self._state[name]
        self._handed_out[address] = tensor.nbytes
        return tensor

    def chunks(self, name: str) -> Iterator[bytes]:
        """The tensor's bytes in order, some megabytes at a time."""
        import torch

        data = self.read(name).contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(data), _CHUNK):
            yield data[start : start + _CHUNK].tobytes()

    def _remap(self) -> None:
        self._state.clear()  # the old mapping goes before the new one comes
        self._handed_out.clear()
        state = self._find_state(self._load())
        self._state = {name: state[name].detach() for name in self.layout}

    def _load(self) -> Any:
        import torch

        if self._mapped:
            _refuse_compressed(self.path)
        inert: list[Any] = [(kind, name) for name, kind in _INERT.items()]
        try:
            with warnings.catch_warnings(), torch.serialization.safe_globals(inert):
                warnings.simplefilter("ignore")  # torch warns of pickle protocols that it then refuses
                return torch.load(self.path, map_location="cpu", weights_only=True, mmap=self._mapped)
        except Exception as error:  # a damaged file makes the unpickler fail in any way
            with torch.serialization.safe_globals(inert):
                raise self._refusal(error) from error

    def _find_state(self, loaded: Any) -> dict[str, torch.Tensor]:
        """The dict of tensors, or an error that names what else is there."""
        import torch

        if isinstance(loaded, dict) and self._entry is not None:
            if self._entry not in loaded:
                raise CheckpointError(
                    f"the file has no entry '{self._entry}'",
                    where=str(self.path),
                    why=f"Its entries are {_first([repr(key) for key in loaded], 8) or 'none'}",
                )
            loaded = loaded[self._entry]
        elif isinstance(loaded, dict):
            loaded, self.left_out = self._nested(loaded)
        if not isinstance(loaded, dict):
            what = f"the file holds a {type(loaded).__name__}, not a dict of tensors"
            raise CheckpointError(what, where=str(self.path), fix=self._resave)
        others = [
            f"{key!r} ({type(value).__name__})"
            for key, value in loaded.items()
            if not (isinstance(key, str) and isinstance(value, torch.Tensor))
        ]
        if others:
            raise CheckpointError(
                f"the file holds more than named tensors: {_first(others)}", where=str(self.path), fix=self._resave
            )
        return loaded

    def _nested(self, loaded: dict[Any, Any]) -> tuple[Any, dict[str, str]]:
        """The state dict of a training run's checkpoint, and what is beside it; a dict of tensors is one itself."""
        import torch

        if any(isinstance(value, torch.Tensor) for value in loaded.values()):
            return loaded, {}
        held = [key for key in NESTING_KEYS if isinstance(loaded.get(key), dict) and loaded[key]]
        if not held:
            return loaded, {}
        if len(held) > 1:
            raise CheckpointError(
                f"the file has weights under '{held[0]}' and under '{held[1]}'",
                where=str(self.path),
                why="Which of them is the model is not known",
                fix=self._resave,
            )
        found, deeper = self._nested(loaded[held[0]])
        others = {str(key): "an entry beside the model, of the training run" for key in loaded if key != held[0]}
        return found, others | deeper

    def _check(self, name: str, tensor: torch.Tensor, on_fault: OnFault) -> bool:
        """Whether a tensor is plain numbers in memory."""
        import torch

        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if plain and tensor.device.type == "cpu" and not tensor.is_quantized and is_known_dtype(_dtype_name(tensor)):
            if tensor.nbytes <= self.path.stat().st_size:
                return True
            on_fault(
                CheckpointError(
                    f"tensor '{name}' of shape {list(tensor.shape)} is larger than the file",
                    where=str(self.path),
                    tensor=name,
                    why="It repeats numbers, which no weight of a model does",
                    fix="Download or copy the file again.",
                )
            )
            return False
        kind = f"{type(tensor).__name__}, {tensor.layout}, {tensor.dtype}, on {tensor.device}"
        on_fault(
            CheckpointError(
                f"tensor '{name}' is not plain: {kind}",
                where=str(self.path),
                tensor=name,
                fix="Consolidate, densify or dequantise the checkpoint first.",
            )
        )
        return False

    def _refusal(self, error: Exception) -> CheckpointError:
        """Why a file is not loaded. Torch's own words advise to load it unsafely, and are never passed on."""
        protocol, torch_saved = _protocol(self.path, zipped=self._mapped)
        if protocol is not None and protocol != _PROTOCOL:
            return CheckpointError(
                f"the file is a pickle of protocol {protocol}, and only those of protocol {_PROTOCOL} are read safely",
                where=str(self.path),
                why="torch.save writes protocol 2 unless it is told otherwise",
                fix=self._resave,
            )
        unsafe = self._unsafe(error)
        if unsafe:
            sharded = any(name.startswith("torch.distributed.") for name in unsafe)
            return CheckpointError(
                f"the pickle needs {_first(unsafe)}, and loading that could run code",
                where=str(self.path),
                why="Only tensors and plain values are read from a pickle",
                fix="This is sharded training state: consolidate first." if sharded else self._resave,
            )
        if protocol is not None and not torch_saved:
            return CheckpointError(
                "the file is a pickle that torch.save did not write", where=str(self.path), fix=self._resave
            )
        return CheckpointError(
            "the file is damaged, or torch.save did not write it",
            where=str(self.path),
            why=f"Reading it ended with a {type(error).__name__}",
            fix="Download or copy it again.",
        )

    def _unsafe(self, error: Exception) -> list[str]:
        """What the pickle names that is more than values."""
        import torch

        if self._mapped:
            try:
                return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(self.path))
            except Exception:  # a damaged file
                return []
        found = _REFUSED.search(str(error))
        return [found[1]] if found else []

    @property
    def _resave(self) -> str:
        saved = "model.state_dict()" if self._entry is None else f"{{'{self._entry}': model.state_dict(), ...}}"
        return f"Where you trust the file, load it and save its tensors alone: torch.save({saved}, ...)."


def _refuse_compressed(path: Path) -> None:
    """Stop at a zip file whose entries may unpack to any size: torch.save stores them as they are."""
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):  # the last for a zip of a later version
        return  # torch says what is wrong
    if packed:
        raise CheckpointError(
            f"the entry '{packed[0]}' is compressed",
            where=str(path),
            why="torch.save never compresses, and what it unpacks to has no bound",
            fix="Unpack the file with a zip program and pack it again without compression, if you trust it",
        )


def _is_plain(value: Any) -> bool:
    """Whether a value is numbers, text, or lists and dicts of them, each looked at once, however often it is held."""
    waiting, seen = [value], set[int]()
    while waiting:
        value = waiting.pop()
        if not isinstance(value, (dict, list, tuple)):
            if value is not None and not isinstance(value, (str, int, float)):
                return False
        elif id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, dict):
                if not all(isinstance(key, str) for key in value):
                    return False
                waiting += value.values()
            else:
                waiting += value
    return True


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _first(items: list[str], count: int = 3) -> str:
    return ", ".join(items[:count]) + (f" and {len(items) - count} more" if len(items) > count else "")


def _protocol(path: Path, *, zipped: bool) -> tuple[int | None, bool]:
    """The protocol of a file's pickle, None where there is none, and whether it begins as torch.save's."""
    start = b""
    if zipped:
        try:
            with zipfile.ZipFile(path) as archive:
                name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
                with archive.open(name) as file:
                    start = file.read(2)
        except Exception:  # a damaged archive
            return None, False
    else:
        with path.open("rb") as file:
            start = file.read(2 + len(_MAGIC))
    protocol = start[1] if start[:1] == b"\x80" and len(start) > 1 else None
    return protocol, zipped or start[2:] == _MAGIC
