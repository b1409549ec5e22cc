"""What a walk has finished, on disk, so that a killed one goes on to the same bytes.

After each block the journal holds the number of finished blocks, what was found out so far, and the
activation streams. It is replaced in one step: a kill leaves the journal of the block before or of
this one, never half of one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.errors import ConverterError
from converter.files.output import disk_errors, fsync

if TYPE_CHECKING:
    from torch import Tensor


class Journal:
    """The state of one walk, in a hidden folder beside the unfinished files.

    `fingerprint` describes what is converted, and how: a journal of something else is refused.
    """

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any]) -> None:
        self.folder = folder / ".walk"
        self._fingerprint = json.loads(json.dumps(fingerprint))

    def load(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The last saved state and its streams; None where nothing was finished.

        Raises ConverterError where the unfinished conversion is another one.
        """
        from safetensors.torch import load_file

        path = self.folder / "state.json"
        if not path.is_file():
            return None
        saved = json.loads(path.read_text(encoding="utf-8"))
        changed = [key for key, value in self._fingerprint.items() if saved["fingerprint"].get(key) != value]
        if changed:
            raise ConverterError(
                f"the unfinished conversion is another one: its {', '.join(changed)} differ",
                where=str(self.folder.parent),
                fix="Repeat the command that was interrupted, or start again with --overwrite",
            )
        return saved["state"], load_file(self.folder / saved["streams"])

    def save(self, block: int, state: Mapping[str, Any], streams: Mapping[str, Tensor]) -> None:
        """Replace the journal by the state after a block."""
        from safetensors.torch import save_file

        with disk_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
            name = f"streams-{block}.safetensors"
            save_file({key: tensor.contiguous() for key, tensor in streams.items()}, self.folder / name)
            content = {"fingerprint": self._fingerprint, "state": dict(state), "streams": name}
            fresh = self.folder / "state.json.new"
            fresh.write_text(json.dumps(content), encoding="utf-8")
            for path in (self.folder / name, fresh):
                fsync(path)
            fresh.replace(self.folder / "state.json")
            fsync(self.folder)
            for old in self.folder.glob("streams-*.safetensors"):
                if old.name != name:
                    old.unlink()

    def remove(self) -> None:
        """The walk is over."""
        shutil.rmtree(self.folder, ignore_errors=True)
