"""Swap the layout of a checkpoint where it lies: journaled, so that a kill at any moment loses nothing.

    .rope-swap/old     the bytes of every tensor that moves, as they were, copied by the kernel
    .rope-swap/plan    what is to be done; it appears, by a rename, when `old` is on the disk

Without a plan nothing has been touched, and the journal is thrown away. With one, the new bytes are made from `old`,
not from the files, so that doing it again, from any state in between, gives the same; so does undoing
it. The journal goes when everything is on the disk, plan first. Swapping back restores every byte.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from converter.errors import CheckpointError, ConverterError
from converter.output import disk_errors
from converter.rope.moves import Move, plan_moves, total_bytes, write_move
from converter.rope.scores import here, verify_scores
from converter.rope.settle import STAMP, Settlement, declared_voices, settle, stamped
from converter.rope.swap import (
    Say,
    SwapReport,
    announcement,
    kernel_copy,
    look,
    make_report,
    open_source,
    other_weights,
)
from converter.source import SourceModel
from converter.spec import RopeLayout

FOLDER = ".rope-swap"


def swap_in_place(
    path: str | Path,
    *,
    to: RopeLayout,
    claimed: RopeLayout | None = None,
    text: Path | None = None,
    say: Say = lambda line: None,
) -> SwapReport:
    """Move the rows of the checkpoint in `path` into layout `to`, or finish such a swap that was killed.

    Raises a ConverterError, with the files as they were, where the layout cannot be settled or is `to` already.
    """
    folder = Path(path)
    journal = Journal(folder)
    with disk_errors(folder), _locked(folder):
        plan = journal.load()
        if plan is not None:
            return _resume(folder, journal, plan, to, say)
        opened = open_source(folder)
        voices = declared_voices(opened, to, claimed)
        moves = plan_moves(opened, to)
        _check_writable(moves)
        say(announcement(opened, moves))
        settlement = settle(opened, to, voices, claimed, look(opened, text))
        stamp = stamped(folder, opened, settlement, to, len(moves))
        journal.write(moves, settlement, to, stamp)
        return _finish(opened, journal, moves, settlement, to, stamp)


def roll_back(path: str | Path) -> bool:
    """Restore every byte of a swap that was killed; False where there is none."""
    folder = Path(path)
    journal = Journal(folder)
    with disk_errors(folder), _locked(folder):
        plan = journal.load()
        if plan is None:
            return False
        _restore(folder, journal, plan)
        return True


def _restore(folder: Path, journal: Journal, plan: dict[str, Any]) -> None:
    journal.put_back(_planned_moves(folder, plan))
    if plan["old_stamp"] is None:
        (folder / STAMP).unlink(missing_ok=True)
    else:
        journal.replace(folder / STAMP, plan["old_stamp"])
    journal.remove()


def _resume(folder: Path, journal: Journal, plan: dict[str, Any], to: RopeLayout, say: Say) -> SwapReport:
    if plan["to"] != to.value:
        raise ConverterError(
            f"an unfinished swap to {plan['to']} is there",
            where=str(folder / FOLDER),
            fix=f"Finish it with --to {plan['to']}, or undo it with --roll-back",
        )
    say("Going on with a swap that was interrupted.")
    opened = open_source(folder)
    settlement = Settlement(RopeLayout(plan["from"]), plan["voices"])
    return _finish(opened, journal, _planned_moves(folder, plan), settlement, to, plan["stamp"])


def _finish(
    source: SourceModel, journal: Journal, moves: list[Move], settlement: Settlement, to: RopeLayout, stamp: str
) -> SwapReport:
    journal.apply(moves)
    places = {move.name: (journal.old, place) for own in _by_file(moves).values() for place, move in own}
    try:
        error = verify_scores(source, places, here(moves), settlement.layout, to)
    except BaseException as failure:
        if isinstance(failure, Exception):
            plan = journal.load()
            assert plan is not None
            _restore(journal.folder.parent, journal, plan)
        raise
    journal.replace(journal.folder.parent / STAMP, stamp)
    journal.remove()
    return make_report(source, moves, settlement, to, error, other_weights(source))


class Journal:
    """`.rope-swap` in the checkpoint's folder."""

    def __init__(self, checkpoint: Path) -> None:
        self.folder = checkpoint / FOLDER
        self.old, self.plan = self.folder / "old", self.folder / "plan"

    def load(self) -> dict[str, Any] | None:
        """The plan of a swap that has begun to touch the files; one that has not is thrown away."""
        if not self.folder.exists():
            return None
        if not self.plan.exists():
            shutil.rmtree(self.folder)
            return None
        try:
            plan: dict[str, Any] = json.loads(self.plan.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError("the journal of a swap is damaged", where=str(self.plan), why=str(error)) from error
        if self.old.stat().st_size != plan["old_bytes"]:
            raise CheckpointError("the journal of a swap is damaged", where=str(self.old), why="It is too short")
        return plan

    def write(self, moves: list[Move], settlement: Settlement, to: RopeLayout, stamp: str) -> None:
        """Copy what will be overwritten, and then the plan."""
        root = self.folder.parent
        self.folder.mkdir()
        with self.old.open("wb") as old:
            position = 0
            for move in moves:
                with move.file.open("rb") as file:
                    kernel_copy(file.fileno(), old.fileno(), move.start, move.nbytes, position)
                position += move.nbytes
            os.fsync(old.fileno())
        stamp_file = root / STAMP
        plan = {
            "from": settlement.layout.value,
            "to": to.value,
            "voices": settlement.voices,
            "stamp": stamp,
            "old_stamp": stamp_file.read_text(encoding="utf-8") if stamp_file.exists() else None,
            "old_bytes": total_bytes(moves),
            "moves": [_move_facts(move, root) for move in moves],
        }
        self.replace(self.plan, json.dumps(plan))

    def apply(self, moves: list[Move]) -> None:
        """Write the new bytes, made from the old ones."""
        with self.old.open("rb") as old:
            for file, own in _by_file(moves).items():
                with file.open("r+b", buffering=0) as target:
                    for place, move in own:
                        write_move(move, old.fileno(), target.fileno(), source_start=place)
                    os.fsync(target.fileno())

    def put_back(self, moves: list[Move]) -> None:
        """Write the old bytes."""
        with self.old.open("rb") as old:
            for file, own in _by_file(moves).items():
                with file.open("r+b", buffering=0) as target:
                    for place, move in own:
                        kernel_copy(old.fileno(), target.fileno(), place, move.nbytes, move.start)
                    os.fsync(target.fileno())

    def replace(self, file: Path, text: str) -> None:
        """Write a file that is there whole or not at all; what is left of a killed attempt goes with the journal."""
        partial = self.folder / "partial"
        with partial.open("w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(file)
        _sync(file.parent)

    def remove(self) -> None:
        """The swap is done, or undone."""
        self.plan.unlink()
        _sync(self.folder)
        shutil.rmtree(self.folder)
        _sync(self.folder.parent)


def _by_file(moves: list[Move]) -> dict[Path, list[tuple[int, Move]]]:
    """File -> (place in the journal, move)."""
    files: dict[Path, list[tuple[int, Move]]] = {}
    position = 0
    for move in moves:
        files.setdefault(move.file, []).append((position, move))
        position += move.nbytes
    return files


def _move_facts(move: Move, root: Path) -> dict[str, Any]:
    file = move.file.relative_to(root).as_posix()
    return {**vars(move), "file": file, "order": move.order.tolist()}


def _planned_moves(folder: Path, plan: dict[str, Any]) -> list[Move]:
    return [
        Move(**{**facts, "file": folder / facts["file"], "order": np.array(facts["order"])}) for facts in plan["moves"]
    ]


def _check_writable(moves: list[Move]) -> None:
    """Refuse files that other folders hold too: those of the Hub's cache are links."""
    for file in {move.file for move in moves}:
        if file.is_symlink() or file.stat().st_nlink > 1:
            raise ConverterError(
                "the file is a link, and what it links to would change in other places too",
                where=str(file),
                fix="Swap into a new folder, without --in-place",
            )


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One swap at a time; the lock goes with the process."""
    if not folder.is_dir():
        raise CheckpointError("there is no such folder", where=str(folder))
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConverterError("another swap is at work here", where=str(folder)) from None
        yield
    finally:
        os.close(handle)
