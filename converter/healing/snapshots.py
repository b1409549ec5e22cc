"""Snapshots of a healing run: model, optimizer, step and random state, complete or not there at all.

A snapshot is written into a hidden folder, forced to the disk, and takes its name by one rename. What is in it the
trainee stores, so that another number of processes can read it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from converter.errors import CheckpointError, ConverterError
from converter.files.output import disk_errors, fsync
from converter.healing.trainee import Trainee

if TYPE_CHECKING:
    from accelerate import Accelerator

_PREFIX = "step-"
_STATE = "state.json"


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
                content = {
                    "step": step,
                    "trainee": trainee.kind,
                    "state": dict(state),
                }
                (partial / _STATE).write_text(json.dumps(content), encoding="utf-8")
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
        try:
            content = json.loads((path / _STATE).read_text(encoding="utf-8"))
            kind, state = str(content["trainee"]), dict(content["state"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError("the snapshot is damaged", where=str(path), why=str(error)) from error
        if kind != trainee.kind:
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
        return state

    def load_weights(self, step: int, trainee: Trainee) -> None:
        """Put the weights of a snapshot into a trainee."""
        trainee.load_weights(self._path(step))

    def _path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:08d}"

    def _prune(self, best: int | None) -> None:
        for step in self.steps()[: -self._keep]:
            if step != best:
                path = self._path(step)
                path.rename(path.with_name(f".{path.name}.removed"))  # half a snapshot must not keep its name
        for path in self.folder.glob(".*.removed"):
            shutil.rmtree(path)


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
