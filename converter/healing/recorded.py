"""A teacher's answers on disk: the k likeliest tokens of every token that a run will see, and no teacher beside it.

Answers are found by what was asked, a digest of a sequence's ids and documents. So a second epoch, a control on the
same batches, a resumed run and another number of processes all find what is there, and only what is missing is asked
for. The KL to them takes the tokens that are not among the k together (losses/): it is at most the KL to the
teacher itself, which the report of a run measures at its end.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from converter.files.output import disk_errors, fsync
from converter.healing.batches import Sequences
from converter.healing.head import Head
from converter.healing.student import Answer, Teacher
from converter.losses import Top

#: The files of all recorded teachers, from the folder that they are recorded in.
RECORDS = "teacher-*/*.safetensors"
#: Bytes of a file of answers. One that is being written when a run is killed is asked for again.
_FILE = 1 << 26
#: Logits that are looked through at once.
_LOGITS = 1 << 24


class RecordedTeacher:
    """What a teacher said, from the files in `folder`: the `k` likeliest tokens, as log p."""

    def __init__(self, folder: Path, k: int, context: int) -> None:
        self._folder, self.k, self._context = folder, k, context
        self._places: dict[bytes, tuple[Any, int]] = {}  # an open file, and the row in it
        self._sound: set[Path] = set()

    def __call__(self, sequences: Sequences, layers: bool = False) -> Answer:
        """Its answers for a batch, all of which it was asked before."""
        assert not layers, "states of layers are not recorded"
        places = [self._places[digest] for digest in _digests(sequences)]
        ids, log_p = (
            torch.cat([file.get_slice(name)[row] for file, row in places]).to(sequences.ids.device)
            for name in ("ids", "log_p")
        )
        return Answer(mask=sequences.positions.flatten() < self._context, top=Top(ids.long(), log_p))

    def record(self, load: Callable[[], Teacher], asked: Iterable[Sequences], say: Callable[[str], None]) -> None:
        """Ask the teacher what is not in the files yet; it is loaded only if there is such a thing.

        What other processes record meanwhile is for `look`.
        """
        self.look()
        teacher: Teacher | None = None
        with disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            waiting: list[tuple[bytes, Tensor, Tensor]] = []
            size = 0
            for digest, row in self._missing(asked):
                if teacher is None:
                    say(f"Recording the teacher's {self.k} likeliest tokens at every place of the text.")
                    teacher = load()
                ids, log_p = self._ask(teacher, row)
                waiting.append((digest, ids, log_p))
                size += ids.nbytes + log_p.nbytes
                if size >= _FILE:
                    self._write(waiting)
                    waiting, size = [], 0
            if waiting:
                self._write(waiting)

    def look(self) -> None:
        """Find out what is in the files. One that is damaged counts as absent: what it said is asked for again."""
        self._places = {}
        for file in sorted(self._folder.glob("*.safetensors")):
            if file not in self._sound:
                if not file.is_file() or _name_of(file.read_bytes()) != file.name:
                    continue
                self._sound.add(file)
            opened: Any = safe_open(file, "pt")
            for row, digest in enumerate(opened.get_tensor("digests")):
                self._places[bytes(digest.tolist())] = opened, row

    def _missing(self, asked: Iterable[Sequences]) -> Iterator[tuple[bytes, Sequences]]:
        """Each row that has no answer, once, and its digest."""
        known = set(self._places)
        for sequences in asked:
            for row, digest in zip(sequences.split(1), _digests(sequences), strict=True):
                if digest not in known:
                    known.add(digest)
                    yield digest, row

    @torch.no_grad()
    def _ask(self, teacher: Teacher, row: Sequences) -> tuple[Tensor, Tensor]:
        """Ids and log p (T, k) of a row."""
        answer = teacher(row.to(teacher.model.device))
        assert answer.states is not None
        assert answer.head is not None
        parts = [
            _likeliest(states, answer.head, self.k)
            for states in answer.states.split(max(1, _LOGITS // len(answer.head.weight)))
        ]
        ids, log_p = (torch.cat(each).cpu() for each in zip(*parts, strict=True))
        return ids.int(), log_p.float()

    def _write(self, rows: list[tuple[bytes, Tensor, Tensor]]) -> None:
        digests = torch.tensor([list(digest) for digest, _, _ in rows], dtype=torch.uint8)
        tensors = {"digests": digests, "ids": torch.stack([row[1] for row in rows])}
        tensors["log_p"] = torch.stack([row[2] for row in rows])
        content = save(tensors)
        partial = self._folder / f"{uuid.uuid4().hex}.partial"  # several processes write here
        partial.write_bytes(content)
        fsync(partial)
        partial.rename(self._folder / _name_of(content))


def _name_of(content: bytes) -> str:
    """A file of answers is named by its digest: of one name there is one content, and damage shows."""
    return f"{hashlib.sha256(content).hexdigest()}.safetensors"


def folder_for(work: Path, teacher: object, k: int) -> Path:
    """Where the answers of one teacher lie; `teacher` is what tells it from others, as plain values."""
    told = json.dumps([teacher, k], sort_keys=True)
    return work / f"teacher-{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def _likeliest(states: Tensor, head: Head, k: int) -> tuple[Tensor, Tensor]:
    """Ids and log p (n, k) of the likeliest tokens after states (n, D)."""
    logits = torch.nn.functional.linear(states.to(head.weight.dtype), head.weight, head.bias).float()
    top = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return top.indices, top.values - logits.logsumexp(dim=-1, keepdim=True)


def _digests(sequences: Sequences) -> list[bytes]:
    """What was asked in each row."""
    rows = torch.stack([sequences.ids, sequences.documents], dim=1).cpu().numpy()
    return [hashlib.sha256(row.tobytes()).digest()[:16] for row in rows]
