"""Swap the layout of a checkpoint where it lies: journaled, so that a kill at any moment loses nothing.

    .rope-swap/old     the bytes of every tensor that moves, as they were
    .rope-swap/plan    what is to be done; it appears, by a rename, when `old` is on the disk

Without a plan nothing has been touched, and the journal is thrown away. With one, a run that goes on makes the new
bytes from `old`, not from the files, so from any state in between it gives the same; so does undoing. Only the
run that wrote the plan takes them from the files, for it knows that it has touched nothing yet.

A power cut may keep any part of what was written after the last sync, in any order. So `old` and its folder are synced
before the plan is there, the plan before a row moves, and the rows before the plan goes: whatever page of the
checkpoint is old, new or torn, the plan and all of `old` are still there. Swapping back restores every byte.
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
from converter.output import disk_errors, fsync
from converter.rope.disk import PAGE, PIECE, NewFile, aligned_buffer, beside, mapped, write_at
from converter.rope.moves import Move, plan_moves
from converter.rope.scores import Rows, compare_scores, read_rows
from converter.rope.settle import Settlement, declared_voices, settle, stamped
from converter.rope.swap import (
    Say,
    SwapReport,
    announcement,
    look,
    make_report,
    open_source,
    other_weights,
)
from converter.source import SourceModel
from converter.spec import RopeLayout
from converter.stamp import STAMP

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
        with journal.saving(moves):
            settlement = settle(opened, to, voices, claimed, look(opened, text))
            before = read_rows(opened)
        stamp = stamped(folder, opened, settlement, to, len(moves))
        journal.write_plan(moves, settlement, to, stamp)
        journal.apply(moves, untouched=True)
        return _finish(opened, journal, moves, before, settlement, to, stamp)


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
    moves = _planned_moves(folder, plan)
    settlement = Settlement(RopeLayout(plan["from"]), plan["voices"])
    before = read_rows(opened, {move.name: (journal.old, place) for place, move in journal.places(moves)})
    journal.apply(moves, untouched=False)
    return _finish(opened, journal, moves, before, settlement, to, plan["stamp"])


def _finish(
    source: SourceModel,
    journal: Journal,
    moves: list[Move],
    before: Rows,
    settlement: Settlement,
    to: RopeLayout,
    stamp: str,
) -> SwapReport:
    """Check what was applied, and undo it if it is wrong; stamp it, and remove the journal."""
    try:
        with beside(lambda: sync(moves)):
            error = compare_scores(source.spec, before, settlement.layout, read_rows(source), to)
    except Exception:
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

    @contextmanager
    def saving(self, moves: list[Move]) -> Iterator[None]:
        """Copy what is to be overwritten, beside what the caller does; an error of either leaves no journal."""
        self.folder.mkdir()
        try:
            with beside(lambda: self._save(moves)):
                yield
        except Exception:
            shutil.rmtree(self.folder)
            raise

    def _save(self, moves: list[Move]) -> None:
        *_, (last, move) = self.places(moves)
        with NewFile(self.old, last + move.nbytes) as old:
            for place, move in self.places(moves):
                old.room(place - old.position)[:] = 0
                with move.file.open("rb") as file:
                    old.copy(file.fileno(), move.start, move.start + move.nbytes)
            old.finish()
        fsync(self.folder.parent)

    @staticmethod
    def places(moves: list[Move]) -> Iterator[tuple[int, Move]]:
        """Where in `old` each tensor begins: as far from a page's beginning as in its file, for whole pages to go."""
        position = 0
        for move in moves:
            position += (move.start - position) % PAGE
            yield position, move
            position += move.nbytes

    def write_plan(self, moves: list[Move], settlement: Settlement, to: RopeLayout, stamp: str) -> None:
        """What is to be done, when the old bytes are on the disk."""
        root = self.folder.parent
        stamp_file = root / STAMP
        plan = {
            "from": settlement.layout.value,
            "to": to.value,
            "voices": settlement.voices,
            "stamp": stamp,
            "old_stamp": stamp_file.read_text(encoding="utf-8") if stamp_file.exists() else None,
            "old_bytes": self.old.stat().st_size,
            "moves": [_move_facts(move, root) for move in moves],
        }
        self.replace(self.plan, json.dumps(plan))

    def apply(self, moves: list[Move], *, untouched: bool) -> None:
        """Write the new bytes, made from those of the files if these are `untouched`, else from the old ones."""
        buffer = aligned_buffer(PIECE)
        for old, target, place, move in self._opened(moves):
            source, start = (target, move.start) if untouched else (old, place)
            move.apply(target, source, start, buffer)

    def put_back(self, moves: list[Move]) -> None:
        """Write the old bytes."""
        for old, target, place, move in self._opened(moves):
            for offset in range(0, move.nbytes, PIECE):
                size = min(PIECE, move.nbytes - offset)
                write_at(target, mapped(old, place + offset, place + offset + size), move.start + offset)
        sync(moves)

    def _opened(self, moves: list[Move]) -> Iterator[tuple[int, int, int, Move]]:
        """(open journal, open file, place in the journal, move)."""
        with self.old.open("rb") as old:
            for place, move in self.places(moves):
                with move.file.open("r+b", buffering=0) as target:
                    yield old.fileno(), target.fileno(), place, move

    def replace(self, file: Path, text: str) -> None:
        """Write a file that is there whole or not at all; what is left of a killed attempt goes with the journal."""
        partial = self.folder / "partial"
        with partial.open("w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(file)
        fsync(file.parent)

    def remove(self) -> None:
        """The swap is done, or undone."""
        self.plan.unlink()
        fsync(self.folder)
        shutil.rmtree(self.folder)
        fsync(self.folder.parent)


def sync(moves: list[Move]) -> None:
    """Force the files of moves to the disk."""
    for file in dict.fromkeys(move.file for move in moves):
        fsync(file)


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
