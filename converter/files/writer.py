"""Writing a checkpoint's weights in any order, with the layout of every file known first.

Shards are created at full size with their headers in place, so that a full disk shows at once and a
tensor goes straight to its bytes: memory holds one tensor, and a killed run can go on.
"""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from converter.errors import CheckpointError, ConverterError
from converter.files.json_text import write_json
from converter.files.output import disk_errors
from converter.files.safetensors import Layout, build_header, num_bytes, total_size

if TYPE_CHECKING:
    import torch

#: Bytes of a transposed tensor that are laid out at once.
_PIECE = 4 << 20
METADATA = {"format": "pt"}  # transformers refuses a file that does not say so
_NO_ALLOCATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)  # file systems that cannot reserve space
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class _Place:
    """Where a tensor goes, and what it must be."""

    file: Path
    start: int
    layout: Layout


class CheckpointWriter:
    """Safetensors shards of a fixed layout, each tensor written once.

    `tensors` maps every name to its shape and dtype name, in the order in which they fill the shards
    of at most `max_shard_size` bytes (a larger tensor has one to itself). With `resume` the files of
    an earlier writer of the same layout are kept, and `already_written` has what they hold: names, and the CRC-32 of
    each tensor's bytes, which are read once to see that they are those that were written.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, Layout],
        max_shard_size: int,
        metadata: Mapping[str, str] = METADATA,
        *,
        resume: bool = False,
        already_written: Mapping[str, int] | None = None,
    ) -> None:
        self.folder = folder
        self.files: list[Path] = []
        self._sums = dict(already_written or {})
        self._places: dict[str, _Place] = {}
        self._unsynced: set[Path] = set()
        assert self._sums.keys() <= tensors.keys(), f"not in the layout: {sorted(self._sums.keys() - tensors.keys())}"
        assert resume or not self._sums, "a new file holds nothing yet"
        shards = plan_shards(tensors, max_shard_size)
        self._remove_others(shards)
        for file_name, shard in shards.items():
            file = folder / file_name
            header, starts = build_header(shard, metadata)
            self._create(file, header, size=len(header) + total_size(shard), keep=self._sums.keys() & shard.keys())
            self.files.append(file)
            self._places |= {name: _Place(file, starts[name], layout) for name, layout in shard.items()}
        for name, saved in self._sums.items():
            self._check(name, self._places[name], saved)
        if len(shards) > 1:
            self._write_index(shards, total_size(tensors))

    @property
    def written(self) -> dict[str, int]:
        """The tensors that are in the files: name -> CRC-32 of its bytes."""
        return dict(self._sums)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put one tensor in its place; it must have the planned shape and dtype exactly."""
        import torch

        place = self._places[name]
        layout = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        assert layout == place.layout, f"{name}: planned {place.layout}, got {layout}"
        assert name not in self._sums, f"{name} is written twice"
        found = 0
        with disk_errors(place.file), place.file.open("r+b", buffering=0) as file:
            file.seek(place.start)
            for piece in _pieces(tensor.detach().cpu()):
                data = piece.reshape(-1).view(torch.uint8).numpy()
                found, left = zlib.crc32(data.data, found), data.data
                while left:  # one call to the system writes 2 GB at most
                    left = left[file.write(left) :]
        self._sums[name] = found
        self._unsynced.add(place.file)

    def sync(self) -> None:
        """Force what was written to the disk: call it before noting anywhere that it is there.

        Another thread may write at the same time: what it has written by now is on the disk, too.
        """
        for path in sorted(self._unsynced.copy()):
            self._unsynced.discard(path)  # before the sync: what is written during it is noted again
            with disk_errors(path), path.open("rb") as file:
                os.fsync(file.fileno())

    def finish(self) -> None:
        """Check that the layout is filled, and sync."""
        missing = sorted(self._places.keys() - self._sums.keys())
        assert not missing, f"never written: {', '.join(missing)}"
        self.sync()

    def _check(self, name: str, place: _Place, saved: int) -> None:
        """Read what an earlier run wrote, and raise where it is something else by now."""
        found, left = 0, num_bytes(*place.layout)
        with disk_errors(place.file), place.file.open("rb") as file:
            file.seek(place.start)
            while left and (piece := file.read(min(left, _PIECE))):
                found = zlib.crc32(piece, found)
                left -= len(piece)
        if found != saved:
            raise CheckpointError(
                f"tensor '{name}' of the unfinished run is damaged",
                where=str(place.file),
                tensor=name,
                why="Its bytes are not those that were written",
                fix="Use --overwrite to start again.",
            )

    def _remove_others(self, shards: Iterable[str]) -> None:
        """Remove weights of another layout, which a run that was killed at its very start may have left."""
        for file in set(self.folder.glob("model*.safetensors*")) - {self.folder / name for name in shards}:
            file.unlink()

    def _create(self, file: Path, header: bytes, size: int, keep: Collection[str]) -> None:
        """A file of full size that begins with the header; with `keep`, it has to be there already."""
        with disk_errors(file):
            if keep:
                if not _has_header(file, header, size):
                    raise CheckpointError(
                        f"the unfinished file is not the one that '{min(keep)}' was written to",
                        where=str(file),
                        why="It is missing, or of another layout",
                        fix="Use --overwrite to start again.",
                    )
                return
            file.unlink(missing_ok=True)  # never written through: a link would lead elsewhere, a pipe would wait
            with file.open("xb") as handle:
                handle.write(header)
                handle.flush()
                _allocate(handle.fileno(), size)
        self._unsynced.add(file)

    def _write_index(self, shards: Mapping[str, Mapping[str, Layout]], size: int) -> None:
        weight_map = {name: file for file, shard in shards.items() for name in shard}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        path = self.folder / "model.safetensors.index.json"
        with disk_errors(path):
            write_json(path, index)
        self._unsynced.add(path)


def plan_shards(tensors: Mapping[str, Layout], max_shard_size: int) -> dict[str, dict[str, Layout]]:
    """File name -> its tensors: filled in order, a new one begun where the next tensor does not fit."""
    shards: list[dict[str, Layout]] = [{}]
    room = max_shard_size
    for name, layout in tensors.items():
        size = num_bytes(*layout)
        if size > room and shards[-1]:
            shards.append({})
            room = max_shard_size
        shards[-1][name] = layout
        room -= size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def parse_size(text: str | int) -> int:
    """Bytes of "5GB" (5 * 10**9), "500MB", "2GiB" (2 * 2**30) or "1000"; a number is what it is."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    size = round(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size < 1:
        raise ConverterError(f"'{text}' is not a size", fix="Write it like 5GB, 500MB or 2GiB.")
    return size


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's elements in order, as contiguous pieces: a transposed one is laid out a few rows at a time."""
    if tensor.is_contiguous() or tensor.ndim < 2:
        yield tensor.contiguous()
        return
    rows = max(1, _PIECE // max(1, tensor[0].numel() * tensor.element_size()))
    buffer = tensor.new_empty(min(rows, len(tensor)), *tensor.shape[1:])
    for start in range(0, len(tensor), rows):
        part = tensor[start : start + rows]
        yield buffer[: len(part)].copy_(part)


def _has_header(file: Path, header: bytes, size: int) -> bool:
    if file.is_symlink() or not file.is_file() or file.stat().st_size != size:
        return False
    with file.open("rb") as handle:
        return handle.read(len(header)) == header


def _allocate(handle: int, size: int) -> None:
    """Reserve the space where the system can, so that a full disk shows before the work begins."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, 0, size)
        except OSError as error:
            if error.errno not in _NO_ALLOCATION:
                raise
    os.truncate(handle, size)
