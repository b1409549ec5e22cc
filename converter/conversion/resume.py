"""What a walk has finished, on disk, so that a killed one goes on to the same bytes.

After each block the journal holds the number of finished blocks, what was found out so far, and the
activation streams. It is replaced in one step: a kill leaves the journal of the block before or of
this one, never half of one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.files.output import damaged_work, disk_errors, fsync, write_whole

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
        if not path.is_file():
            return None
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            return dict(saved["state"]), load_file(self.folder / Path(saved["streams"]).name)
        except (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
            raise damaged_work(path, error) from error

    def save(self, block: int, state: Mapping[str, Any], streams: Mapping[str, Tensor]) -> None:
        """Replace the journal by the state after a block."""
        from safetensors.torch import save_file

        with disk_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
            name = f"streams-{block}.safetensors"
            save_file({key: tensor.contiguous() for key, tensor in streams.items()}, self.folder / name)
            fsync(self.folder / name)
            write_whole(self.folder / _STATE, json.dumps({"state": dict(state), "streams": name}))
            for old in self.folder.glob("streams-*.safetensors"):
                if old.name != name:
                    old.unlink()
