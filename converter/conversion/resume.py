"""What a walk has finished, on disk, so that a killed one goes on to the same bytes.

After each block the journal holds the number of finished blocks, what was found out so far, and the
activation streams. It is replaced in one step: a kill leaves the journal of the block before or of
this one, never half of one.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.files.output import damaged_work, disk_errors, fsync, read_whole, write_whole

if TYPE_CHECKING:
    from torch import Tensor

_STATE = "state.json"


class Journal:
    """The state of one walk, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The last saved state and its streams; None where nothing was finished.

        Raises CheckpointError where the journal is damaged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.folder / _STATE
        if not os.path.lexists(path):
            return None
        saved = read_whole(path)
        file = self.folder / saved["streams"]
        try:
            if not file.is_file():
                raise ValueError("it is no file")
            streams = load_file(file)
            if _sum(streams) != saved["sum"]:
                raise ValueError("its numbers are not those that were written")
        except (OSError, ValueError, SafetensorError) as error:
            raise damaged_work(file, error) from error
        return saved["state"], streams

    def save(self, block: int, state: Mapping[str, Any], streams: Mapping[str, Tensor]) -> None:
        """Replace the journal by the state after a block."""
        from safetensors.torch import save_file

        with disk_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
            name = f"streams-{block}.safetensors"
            save_file({key: tensor.contiguous() for key, tensor in streams.items()}, self.folder / name)
            fsync(self.folder / name)
            write_whole(self.folder / _STATE, {"state": dict(state), "streams": name, "sum": _sum(streams)})
            for old in self.folder.glob("streams-*.safetensors"):
                if old.name != name:
                    old.unlink()


def _sum(streams: Mapping[str, Tensor]) -> int:
    """CRC-32 of names, shapes, dtypes and numbers."""
    import torch

    found = 0
    for name, tensor in sorted(streams.items()):
        found = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), found)
        found = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return found
