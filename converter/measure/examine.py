"""Everything that stops the conversion of a checkpoint, found by the rules by which `convert` refuses it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from converter.errors import ConverterError, UnsupportedError, reporting
from converter.families import Family, find_family
from converter.families.opened import SourceModel
from converter.files.checkpoint import Checkpoint
from converter.files.hub import local_path


@dataclass(frozen=True, eq=False)
class Examined:
    """A checkpoint with its faults, the first of which is what `convert` says of it."""

    checkpoint: Checkpoint
    #: None where we do not know it.
    family: Family | None
    #: The checkpoint read through its family; None where the config does not tell what the model is.
    source: SourceModel | None
    faults: tuple[ConverterError, ...]

    @property
    def unknown(self) -> bool:
        """Whether nothing is wrong but that we do not know its family."""
        return self.family is None and all(isinstance(fault, UnsupportedError) for fault in self.faults)


def examine(path: str | Path) -> Examined:
    """Open a checkpoint, by path or Hub id, and go on where something is wrong.

    Files that are damaged are not held against the config: one damage is one fault. Reads headers, and buffers that
    would be dropped. Raises ConverterError where there is no checkpoint to look at.
    """
    damage: list[ConverterError] = []
    checkpoint = Checkpoint.open(local_path(path), damage.append)
    family: Family | None = None
    source: SourceModel | None = None
    found: list[ConverterError] = []
    with reporting(found.append, checkpoint.path):
        try:
            family = find_family(checkpoint.config, str(checkpoint.config_file))
            source = SourceModel(checkpoint, found.append)
            if not (damage or found):
                source.check_contents(found.append)
        except UnsupportedError as error:
            found.append(error)
    return Examined(checkpoint, family, source, tuple(damage or found))
