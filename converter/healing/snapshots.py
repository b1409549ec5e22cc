"""Snapshots of a healing run: model, optimizer, step and random state, complete or not there at all.

A snapshot is written into a hidden folder, forced to the disk, and takes its name by one rename. What is in it the
trainee stores, so that another number of processes can read it.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from converter.errors import ConverterError
from converter.files.output import disk_errors, fsync, read_whole, write_whole
from converter.healing.launch import first
from converter.healing.trainee import Trainee, damaged

if TYPE_CHECKING:
    from accelerate import Accelerator

_PREFIX = "step-"
_STATE = "state.json"
_PIECE = 1 << 24


class Snapshots:
    """The snapshots of one run, in `folder`; the newest `keep` are kept, and that of the best evaluation."""

    def __init__(self, folder: Path, keep: int, accelerator: Accelerator) -> None:
        self.folder, self._keep, self._accelerator = folder, keep, accelerator

    def steps(self) -> list[int]:
        """The steps that have a snapshot, in order. A folder without its final name is none."""
        return sorted(int(path.name.removeprefix(_PREFIX)) for path in self.folder.glob(f"{_PREFIX}*"))

    def save(self, step: int, state: Mapping[str, Any], trainee: Trainee, best: int | None) -> None:
        """Write the snapshot of a step, by all processes together, then remove what need not be kept."""
        final = self._path(step)
        partial = self.folder / f".{final.name}.partial"
        main = self._accelerator.is_main_process
        with disk_errors(self.folder):
            if main:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self._accelerator.wait_for_everyone()
            trainee.save(partial)
            torch.save(_random_state(), partial / f"random-{self._accelerator.process_index}.pt")
            self._accelerator.wait_for_everyone()
            if main:
                content = {"step": step, "trainee": trainee.kind, "state": dict(state), "sums": _sums(partial)}
                write_whole(partial / _STATE, content)
                for folder, _, files in os.walk(partial):
                    for name in (*files, "."):
                        fsync(Path(folder, name))
                partial.rename(final)
                fsync(self.folder)
                self._prune(best)
        self._accelerator.wait_for_everyone()

    def load(self, step: int, trainee: Trainee) -> dict[str, Any]:
        """Put a snapshot into a trainee, and return the state that was saved with it.

        Raises ConverterError where another kind of trainee wrote it, or a part of it is missing.
        """
        path = self._path(step)
        content = self._checked(path)
        if (kind := content["trainee"]) != trainee.kind:
            raise ConverterError(
                f"the unfinished run was trained by {kind}, and this launch trains by {trainee.kind}",
                where=str(self.folder),
                why="The two keep their state in different ways",
                fix="Go on with a launch of the same kind, with DeepSpeed or without; the stage and the number of "
                "processes may be others",
            )
        trainee.load(path)
        random = path / f"random-{self._accelerator.process_index}.pt"
        if random.is_file():  # another number of processes has none for some
            _set_random_state(torch.load(random, weights_only=True))
        state: dict[str, Any] = content["state"]
        return state

    def load_weights(self, step: int, trainee: Trainee) -> None:
        """Put the weights of a snapshot into a trainee."""
        self._checked(self._path(step))
        trainee.load_weights(self._path(step))

    def _checked(self, path: Path) -> dict[str, Any]:
        """What state.json holds; raises CheckpointError, on all processes, where any file is not as it was written."""

        def check() -> None:
            for name, saved in read_whole(path / _STATE)["sums"].items():
                file = path / name
                if not file.is_file() or _sum(file) != saved:
                    raise damaged(path / Path(name).parts[0], f"{name} is not what was written")

        first(self._accelerator, check)
        content: dict[str, Any] = read_whole(path / _STATE)
        return content

    def _path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:08d}"

    def _prune(self, best: int | None) -> None:
        for step in self.steps()[: -self._keep]:
            if step != best:
                path = self._path(step)
                path.rename(path.with_name(f".{path.name}.removed"))  # half a snapshot must not keep its name
        for path in self.folder.glob(".*.removed"):
            shutil.rmtree(path)


def _sums(folder: Path) -> dict[str, int]:
    """CRC-32 of every file; torch leaves those of its own files unread."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): _sum(file) for file in files}


def _sum(file: Path) -> int:
    found = 0
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE):
            found = zlib.crc32(piece, found)
    return found


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
