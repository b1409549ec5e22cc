"""Swap the layout of a checkpoint where it lies: journaled, so that a kill at any moment loses nothing.

After a kill the same command finishes the swap, and `roll_back` undoes it. Swapping back restores every byte.
`converter.rope.journal` has the order of things that this rests on.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from converter.errors import CheckpointError, ConverterError, UnfinishedSwapError
from converter.families.opened import SourceModel
from converter.families.rotating import source_digests
from converter.files.checkpoint import Checkpoint
from converter.files.output import disk_errors
from converter.files.record import RECORD, record_text
from converter.rope.direct_io import beside
from converter.rope.journal import Journal, Plan, sync
from converter.rope.moves import Move, plan_moves
from converter.rope.scores import Rows, compare_scores, read_rows
from converter.rope.settle import declared_voices, settle, swapped_record
from converter.rope.swap import Say, SwapReport, announcement, look, make_report, open_source, other_weights
from converter.spec import RopeLayout
from converter.text.sources import Text


def swap_in_place(
    path: str | Path,
    *,
    to: RopeLayout,
    claimed: RopeLayout | None = None,
    text: Text | None = None,
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
            return _resume(journal, plan, to, say)
        opened = open_source(folder)
        voices = declared_voices(opened, to, claimed)
        moves = plan_moves(opened, to)
        _check_writable(moves)
        say(announcement(opened, moves))
        with journal.saving(moves):
            settlement = settle(opened, to, voices, claimed, look(opened, text))
            before = read_rows(opened)
        file = folder / RECORD
        old_record = file.read_text(encoding="utf-8") if file.exists() else None
        record = swapped_record(opened, settlement, to, len(moves))
        plan = Plan(settlement, to, moves, record, old_record, journal.old_sums)
        journal.begin(plan)
        journal.apply(moves, untouched=True)
        return _finish(opened, journal, plan, before)


def roll_back(path: str | Path) -> bool:
    """Restore every byte of a swap that was killed; False if no swap was killed."""
    folder = Path(path)
    journal = Journal(folder)
    with disk_errors(folder), _locked(folder):
        plan = journal.load()
        if plan is not None:
            journal.put_back(plan)
        return plan is not None


def _resume(journal: Journal, plan: Plan, to: RopeLayout, say: Say) -> SwapReport:
    if plan.to is not to:
        raise ConverterError(
            f"an unfinished swap to {plan.to.value} is there",
            where=str(journal.folder),
            fix=f"Finish it with --to {plan.to.value}, or undo it with --roll-back",
        )
    say("Going on with a swap that was interrupted.")
    opened = SourceModel(Checkpoint.open(journal.root, _but_for_the_swap))
    before = read_rows(opened, {move.name: (journal.old, place) for place, move in journal.places(plan.moves)})
    journal.apply(plan.moves, untouched=False)
    return _finish(opened, journal, plan, before)


def _but_for_the_swap(fault: ConverterError) -> None:
    if not isinstance(fault, UnfinishedSwapError):
        raise fault


def _finish(source: SourceModel, journal: Journal, plan: Plan, before: Rows) -> SwapReport:
    """Check what was applied while it goes to the disk, and undo it if it is wrong."""
    try:
        with beside(lambda: sync(plan.moves)):
            error = compare_scores(source.spec, before, plan.settlement.layout, read_rows(source), plan.to)
    except Exception:
        journal.put_back(plan)
        raise
    journal.finish(record_text(plan.record, source_digests(source)))
    return make_report(source, plan.moves, plan.settlement, plan.to, error, other_weights(source))


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
        raise CheckpointError("there is no such folder", where=str(folder), fix="Check the spelling")
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConverterError(
                "another swap is at work here", where=str(folder), fix="Try again when it has ended"
            ) from None
        yield
    finally:
        os.close(handle)
