"""The safetensors container: an 8-byte length, a JSON header, then the tensors' bytes.

The header is read and written here rather than by the `safetensors` package, because a fault has to
name its file and tensor, because a writer has to know every offset before it has any data, and
because reading has to stay flat in memory: each tensor gets a mapping of its own, which lasts as long
as the tensor. Measured on a 1 GB file: the process grows by the largest tensor, at the speed of the
page cache.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from converter.errors import CheckpointError, OnFault, raise_fault, reporting
from converter.files.json_text import parse_json

if TYPE_CHECKING:
    import torch

#: Shape and dtype name ("float32", "bfloat16", ...) of a stored tensor.
Layout: TypeAlias = tuple[tuple[int, ...], str]

#: Torch's name of each dtype that the container can hold: its code there, and its bytes an element.
_DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_NAMES = {code: name for name, (code, _) in _DTYPES.items()}

#: The safetensors package reads no longer header than this.
_MAX_HEADER = 100_000_000
_CHUNK = 1 << 20


def is_known_dtype(dtype: str) -> bool:
    """Whether the container can hold this dtype."""
    return dtype in _DTYPES


def num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Size of a tensor's data."""
    return math.prod(shape) * _DTYPES[dtype][1]


def total_size(tensors: Mapping[str, Layout]) -> int:
    """Size of all tensors' data."""
    return sum(num_bytes(*layout) for layout in tensors.values())


def build_header(tensors: Mapping[str, Layout], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """A file's first bytes, and where in the file each tensor's data starts.

    Tensors lie in the given order, wide dtypes before narrow ones: a reader that maps the file needs
    every tensor aligned to its element.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts = {}
    end = 0
    for name in sorted(tensors, key=lambda name: -_DTYPES[tensors[name][1]][1]):
        shape, dtype = tensors[name]
        start, end = end, end + num_bytes(shape, dtype)
        entries[name] = {"dtype": _DTYPES[dtype][0], "shape": list(shape), "data_offsets": [start, end]}
        starts[name] = start
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


class SafetensorsFile:
    """One file, its header checked on opening: every byte of data belongs to exactly one tensor.

    `layout` has the tensors that can be read, `names` all that the header has.
    """

    def __init__(self, path: Path, on_fault: OnFault = raise_fault) -> None:
        self.path = path
        self.names: list[str] = []
        self.layout: dict[str, Layout] = {}
        self._starts: dict[str, int] = {}
        self._on_fault = on_fault
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _MAX_HEADER):
                raise self._damaged(f"Its header claims {length} bytes of a file of {size}")
            entries = self._parse(file.read(length))
        self._place(entries, data_start=8 + length, data_size=size - 8 - length)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, mapped privately: writing to it changes neither the file nor a later read."""
        import torch

        shape, dtype = self.layout[name]
        start = self._starts[name]
        page = start - start % mmap.ALLOCATIONGRANULARITY
        length = start - page + num_bytes(shape, dtype)
        with self.path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=page)
        data = torch.frombuffer(mapping, dtype=torch.uint8, offset=start - page)
        element = _DTYPES[dtype][1]
        if start % element:  # legal in the format, but vector instructions want aligned elements
            data = data.clone()
        tensor: torch.Tensor = data.view(getattr(torch, dtype)).reshape(shape)
        return tensor

    def span(self, name: str) -> tuple[int, int]:
        """Where in the file a tensor's data starts, and its size."""
        return self._starts[name], num_bytes(*self.layout[name])

    def chunks(self, name: str) -> Iterator[bytes]:
        """The tensor's bytes in order, some megabytes at a time."""
        left = num_bytes(*self.layout[name])
        with self.path.open("rb") as file:
            file.seek(self._starts[name])
            while left:
                chunk = file.read(min(left, _CHUNK))
                if not chunk:
                    raise self._damaged("It became shorter while it was read", name)
                left -= len(chunk)
                yield chunk

    def _parse(self, text: bytes) -> dict[str, Any]:
        try:
            entries = parse_json(text, lambda name: self._on_fault(self._damaged("The header has it twice", name)))
        except ValueError as error:
            raise self._damaged("Its header is not JSON") from error
        if not isinstance(entries, dict):
            raise self._damaged("Its header is not a JSON object")
        entries.pop("__metadata__", None)
        return entries

    def _place(self, entries: dict[str, Any], *, data_start: int, data_size: int) -> None:
        """Check each entry, and that the entries tile the data from first byte to last."""
        self.names = list(entries)
        spans = []
        for name, entry in entries.items():
            with reporting(self._on_fault, self.path):
                start, end = self._span(name, entry)
                spans.append((start, end, name))
                layout = self._layout(name, entry)
                if end - start != num_bytes(*layout):
                    code, shape = entry["dtype"], entry["shape"]
                    raise self._damaged(f"Shape {shape} of {code} does not fill its {end - start} bytes", name)
                if end <= data_size:
                    self.layout[name] = layout
                    self._starts[name] = data_start + start
        self._check_tiling(sorted(spans), data_size, complete=len(spans) == len(entries))

    def _span(self, name: str, entry: Any) -> tuple[int, int]:
        match entry:
            case {"dtype": str(), "shape": [*_], "data_offsets": [int(start), int(end)]} if 0 <= start <= end:
                return start, end
        raise self._damaged("Its header entry is malformed", name)

    def _layout(self, name: str, entry: dict[str, Any]) -> Layout:
        code, shape = entry["dtype"], entry["shape"]
        if code not in _NAMES:
            known = f"known are {', '.join(_NAMES)}"
            what = f"tensor '{name}' has the unknown dtype {code}"
            raise CheckpointError(what, where=str(self.path), tensor=name, why=known)
        if not all(type(size) is int and size >= 0 for size in shape):
            raise self._damaged(f"Its shape is {shape}", name)
        return tuple(shape), _NAMES[code]

    def _check_tiling(self, spans: list[tuple[int, int, str]], data_size: int, *, complete: bool) -> None:
        """Spans in order leave no gap, do not overlap and end with the file; not `complete`, they may have gaps."""
        expected, before = 0, ""
        for start, end, name in spans:
            if start < expected or (start > expected and complete):
                relation = f"it overlaps '{before}'" if start < expected else "the bytes between are no tensor's"
                why = f"Its data starts at byte {start} where byte {expected} is next: {relation}"
                self._on_fault(self._damaged(why, name))
            if end > expected:
                expected, before = end, name
        if expected > data_size:
            cut = next(name for _, end, name in spans if end > data_size)
            self._on_fault(
                CheckpointError(
                    f"the file is truncated: its header promises {expected} bytes of tensors and {data_size} are there",
                    where=str(self.path),
                    tensor=cut,
                    why=f"The first tensor that is not whole is '{cut}'.",
                    fix="Download or copy it again.",
                )
            )
        if expected < data_size and complete:
            self._on_fault(self._damaged(f"{data_size - expected} bytes follow the last tensor"))

    def _damaged(self, why: str, name: str | None = None) -> CheckpointError:
        what = f"tensor '{name}' is damaged" if name is not None else "this is not a sound safetensors file"
        fix = "Download or copy the file again."
        return CheckpointError(what, where=str(self.path), tensor=name, why=why + ".", fix=fix)
