"""`conversion.json` beside the weights: what was done to them, and which RoPE layout their rows are in.

No config states the layout, so the record is the stamp of it. A record stays where it is when another program saves
other weights into the folder. So it holds digests of the weights that it speaks of, and is believed for these alone:
of the head rows of q and k for the layout, of all tensors for what was measured. A digest takes a few rows of each
tensor, so that opening a checkpoint stays cheap; training and moved rows change every one of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.errors import CheckpointError
from converter.files.checkpoint import Checkpoint
from converter.files.json_text import parse_json, to_json
from converter.files.safetensors import Layout, num_bytes
from converter.spec import RopeLayout

RECORD = "conversion.json"

#: Rows of a tensor that a digest takes, and bytes of each.
_ROWS, _BYTES = 8, 4096


@dataclass(frozen=True)
class Digests:
    """Which weights a record speaks of; None where the files are no plain containers of bytes, or have no such rows."""

    weights: str | None
    head_rows: str | None


@dataclass(frozen=True)
class Record:
    """A `conversion.json` that was read."""

    file: Path
    content: dict[str, Any]

    @property
    def layout(self) -> RopeLayout | None:
        """The layout of the head rows, if the record says it."""
        try:
            rope = self.content.get("rope")
            return RopeLayout(rope["layout"]) if rope else None
        except (ValueError, KeyError) as error:
            raise _damaged(self.file, f"its rope has no known layout: {error}") from error

    @property
    def expected_kl(self) -> float | None:
        """Nats per token from the source that verification measured; None where it did not."""
        try:
            verification = self.content.get("verification")
            if not verification:
                return None
            kl = float(verification["total"]["kl"])
            if not math.isfinite(kl):
                raise ValueError(f"it is {kl}")
            return kl
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise _damaged(self.file, f"it has no KL of its verification: {error!r}") from error

    def speaks_of(self, found: Digests) -> bool:
        """Whether every weight is the one that the record speaks of."""
        return found.weights is not None and found.weights == self._stated("weights")

    def speaks_of_rows(self, found: Digests) -> bool:
        """Whether the head rows of q and k are those that the record speaks of."""
        return found.head_rows is not None and found.head_rows == self._stated("head_rows")

    def _stated(self, name: str) -> Any:
        digests = self.content.get("digests")
        return digests.get(name) if isinstance(digests, dict) else None


def read_record(folder: Path) -> Record | None:
    """The record of a folder, or None where there is no such file.

    `rope` and `verification`, where it has them, are dicts, and `rope_swaps` is a list. Raises CheckpointError where
    it is damaged.
    """
    file = folder / RECORD
    if not file.exists():
        return None
    try:
        content = parse_json(file.read_bytes(), lambda name: None)
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        for name, kind in (("rope", dict), ("verification", dict), ("rope_swaps", list)):
            if not isinstance(content.get(name) or kind(), kind):
                raise ValueError(f"its '{name}' is {content[name]!r}")
    except (OSError, ValueError) as error:
        raise _damaged(file, str(error)) from error
    return Record(file, content)


def record_text(content: Mapping[str, Any], digests: Digests) -> str:
    """The text of a record that speaks of the weights with these digests."""
    return to_json({**content, "digests": vars(digests)}) + "\n"


def save_record(folder: Path, content: Mapping[str, Any], digests: Digests) -> None:
    """Write `conversion.json` beside the weights with these digests."""
    (folder / RECORD).write_text(record_text(content, digests), encoding="utf-8")


def digests(checkpoint: Checkpoint, head_rows: Iterable[str]) -> Digests:
    """Digests of a checkpoint's weights; `head_rows` names the tensors that hold rows of q and k."""
    infos = checkpoint.tensors
    places = {
        name: ((info.shape, info.dtype), info.file, start)
        for name, info in infos.items()
        if (start := checkpoint.start(name)) is not None
    }
    return digests_of(places, head_rows) if len(places) == len(infos) else Digests(None, None)


def digests_of(places: Mapping[str, tuple[Layout, Path, int]], head_rows: Iterable[str]) -> Digests:
    """The same by name of each tensor: what it is, its file, and where in it its data begins."""
    taken = {name: _sample(*place) for name, place in places.items()}

    def joined(names: Iterable[str]) -> str | None:
        text = "".join(f"{name} {taken[name]}\n" for name in sorted(names))
        return hashlib.sha256(text.encode()).hexdigest() if text else None

    return Digests(joined(taken), joined(name for name in head_rows if name in taken))


def _sample(layout: Layout, path: Path, start: int) -> str:
    """A digest of a tensor's shape, dtype and some rows; a vector is one row.

    Row n of so many parts of a matrix would be the first of a head, which no swap moves: so it is the one after it.
    """
    shape, dtype = layout
    digest = hashlib.sha256(f"{list(shape)} {dtype}".encode())
    rows = shape[0] if len(shape) > 1 else 1
    row_bytes = num_bytes(shape, dtype) // max(1, rows)
    chosen = sorted({min(part * rows // _ROWS + 1, rows - 1) for part in range(_ROWS)}) if rows else []
    with path.open("rb", buffering=0) as file:
        for row in chosen:
            file.seek(start + row * row_bytes)
            digest.update(file.read(min(row_bytes, _BYTES)))
    return digest.hexdigest()


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        "the record of the conversion cannot be read",
        where=str(file),
        why=why,
        fix="Copy it from the original again; without it nothing says in which layout the rows of q and k are",
    )
