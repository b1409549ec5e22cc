"""The journal of a swap in place: what the rows were, and what is being done, in a folder beside the weights.

    .rope-swap/old     the bytes of every tensor that moves, as they were
    .rope-swap/plan    what is to be done, under its own sha256; it appears, by a rename, when `old` is on the disk

Without a plan nothing has been touched, and the journal is thrown away. With one, a run that goes on makes the new
bytes from `old`, not from the files, so from any state in between it gives the same; so does undoing. Only the
run that wrote the plan takes them from the files, for it knows that it has touched nothing yet.

A power cut may keep any part of what was written after the last sync, in any order. So `old` and its folder are synced
before the plan is there, the plan before a row moves, and the rows before the plan goes: whatever page of the
checkpoint is old, new or torn, the plan and all of `old` are still there. The plan has a CRC-32 of every tensor in
`old`, for what a bad disk or a bad copy changed there must not get into the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from converter.errors import CheckpointError
from converter.files.checkpoint import SWAP_PLAN
from converter.files.output import fsync
from converter.files.record import RECORD
from converter.rope.direct_io import PAGE, PIECE, NewFile, aligned_buffer, beside, mapped, write_at
from converter.rope.moves import Move
from converter.rope.settle import Settlement
from converter.spec import RopeLayout

FOLDER = SWAP_PLAN.parent


@dataclass(frozen=True)
class Plan:
    """What a swap in place does."""

    settlement: Settlement
    to: RopeLayout
    moves: list[Move]
    #: The content of the record afterwards, and its text before; None where there was none.
    record: dict[str, Any]
    old_record: str | None
    #: CRC-32 of each move's bytes before it.
    old_sums: list[int]

    def to_text(self, root: Path) -> str:
        """As JSON under its sha256; files are named from `root`, for the folder may be moved."""
        facts = {
            "from": self.settlement.layout.value,
            "to": self.to.value,
            "voices": self.settlement.voices,
            "note": self.settlement.note,
            "record": self.record,
            "old_record": self.old_record,
            "old_sums": self.old_sums,
            "moves": [
                {**vars(move), "file": move.file.relative_to(root).as_posix(), "order": move.order.tolist()}
                for move in self.moves
            ],
        }
        text = json.dumps(facts)
        return f"{_sha256(text)}\n{text}"

    @classmethod
    def from_text(cls, content: str, root: Path) -> Plan:
        """The inverse; raises ValueError where it is damaged."""
        digest, _, text = content.partition("\n")
        if digest != _sha256(text):
            raise ValueError("Its sha256 is another than the one in its first line")
        facts: dict[str, Any] = json.loads(text)
        moves = [
            Move(**{**move, "file": root / move["file"], "order": np.array(move["order"])}) for move in facts["moves"]
        ]
        settlement = Settlement(RopeLayout(facts["from"]), facts["voices"], facts["note"])
        return cls(settlement, RopeLayout(facts["to"]), moves, facts["record"], facts["old_record"], facts["old_sums"])


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Journal:
    """`.rope-swap` in the folder of a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self.root, self.folder = checkpoint, checkpoint / FOLDER
        self.old, self.plan = self.folder / "old", checkpoint / SWAP_PLAN
        self.old_sums: list[int] = []

    def load(self) -> Plan | None:
        """The plan of a swap that has begun to touch the files; one that has not is thrown away."""
        if not self.folder.exists():
            return None
        if not self.plan.exists():
            shutil.rmtree(self.folder)
            return None
        for file in (self.plan, self.old):
            if not file.is_file():
                raise _damaged(file, "It is no file")
        try:
            plan = Plan.from_text(self.plan.read_text(encoding="utf-8"), self.root)
        except ValueError as error:
            raise _damaged(self.plan, str(error)) from error
        self._check_old(plan)
        return plan

    def _check_old(self, plan: Plan) -> None:
        """The old bytes are those that were saved."""
        if self.old.stat().st_size != self._size(plan.moves):
            raise _damaged(self.old, "It has another size")
        with self.old.open("rb") as old:
            for (place, move), saved in zip(self.places(plan.moves), plan.old_sums, strict=True):
                if _crc32(old.fileno(), place, place + move.nbytes) != saved:
                    raise _damaged(self.old, f"The bytes of '{move.name}' are not those that were saved")

    @contextmanager
    def saving(self, moves: list[Move]) -> Iterator[None]:
        """Copy what is to be overwritten, beside what the caller does; an error of either leaves no journal.

        Afterwards `old_sums` has the CRC-32 of each tensor.
        """
        self.folder.mkdir()
        try:
            with beside(lambda: self._save(moves)):
                yield
        except Exception:
            shutil.rmtree(self.folder)
            raise

    def _save(self, moves: list[Move]) -> None:
        self.old_sums = []
        with NewFile(self.old, self._size(moves)) as old:
            for place, move in self.places(moves):
                old.room(place - old.position)[:] = 0
                with move.file.open("rb") as file:
                    span = file.fileno(), move.start, move.start + move.nbytes
                    old.copy(*span)
                    self.old_sums.append(_crc32(*span))
            old.finish()
        fsync(self.root)

    @staticmethod
    def places(moves: list[Move]) -> Iterator[tuple[int, Move]]:
        """Where in `old` each tensor begins: as far from a page's beginning as in its file, for whole pages to go."""
        position = 0
        for move in moves:
            position += (move.start - position) % PAGE
            yield position, move
            position += move.nbytes

    def _size(self, moves: list[Move]) -> int:
        return max(place + move.nbytes for place, move in self.places(moves))

    def begin(self, plan: Plan) -> None:
        """From here on the files may be touched: the old bytes are on the disk."""
        self.replace(self.plan, plan.to_text(self.root))

    def apply(self, moves: list[Move], *, untouched: bool) -> None:
        """Write the new bytes, made from those of the files if these are `untouched`, else from the old ones."""
        buffer = aligned_buffer(PIECE)
        with ThreadPoolExecutor(1) as pool:  # the disk writes what is there while the next rows are gathered
            syncing: Future[None] | None = None
            for old, target, place, move in self._opened(moves):
                source, start = (target, move.start) if untouched else (old, place)
                move.apply(target, source, start, buffer)
                if syncing is None or syncing.done():
                    if syncing is not None:
                        syncing.result()  # the system tells of an error once: to this sync, and to no later one
                    syncing = pool.submit(fsync, move.file)
            if syncing is not None:
                syncing.result()

    def put_back(self, plan: Plan) -> None:
        """Restore every byte that the plan changes, and the record; then there is no journal."""
        for old, target, place, move in self._opened(plan.moves):
            for offset in range(0, move.nbytes, PIECE):
                size = min(PIECE, move.nbytes - offset)
                write_at(target, mapped(old, place + offset, place + offset + size), move.start + offset)
        sync(plan.moves)
        self.finish(plan.old_record)

    def _opened(self, moves: list[Move]) -> Iterator[tuple[int, int, int, Move]]:
        """(open journal, open file, place in the journal, move)."""
        with self.old.open("rb") as old:
            for place, move in self.places(moves):
                with move.file.open("r+b", buffering=0) as target:
                    yield old.fileno(), target.fileno(), place, move

    def finish(self, record: str | None) -> None:
        """Set the record, and remove the journal: the swap is done, or undone, and on the disk."""
        if record is None:
            (self.root / RECORD).unlink(missing_ok=True)
        else:
            self.replace(self.root / RECORD, record)
        self.plan.unlink()
        fsync(self.folder)
        shutil.rmtree(self.folder)
        fsync(self.root)

    def replace(self, file: Path, text: str) -> None:
        """Write a file that is there whole or not at all; what is left of a killed attempt goes with the journal."""
        partial = self.folder / "partial"
        with partial.open("w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(file)
        fsync(file.parent)


def _crc32(handle: int, start: int, end: int) -> int:
    """Of a part of an open file."""
    found = 0
    for place in range(start, end, PIECE):
        found = zlib.crc32(mapped(handle, place, min(place + PIECE, end)).data, found)
    return found


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        "the journal of a swap is damaged, and this command changes nothing",
        where=str(file),
        why=why,
        fix="Restore it from a copy, or replace the whole checkpoint by one and delete this folder",
    )


def sync(moves: list[Move]) -> None:
    """Force the files of moves to the disk."""
    for file in dict.fromkeys(move.file for move in moves):
        fsync(file)
