"""The stamp: `conversion.json` beside the weights says which RoPE layout we wrote, for no config does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from converter.errors import CheckpointError
from converter.files.json_text import parse_json
from converter.spec import RopeLayout

STAMP = "conversion.json"


def read_record(folder: Path) -> dict[str, Any] | None:
    """What a folder's conversion.json holds; None where there is none.

    `rope` and `verification`, where the file has them, are dicts, and `rope_swaps` is a list. Raises CheckpointError
    where it is damaged.
    """
    file = folder / STAMP
    if not file.exists():
        return None
    try:
        record = parse_json(file.read_bytes(), lambda name: None)
        if not isinstance(record, dict):
            raise ValueError("it is no JSON object")
        for name, kind in (("rope", dict), ("verification", dict), ("rope_swaps", list)):
            if not isinstance(record.get(name) or kind(), kind):
                raise ValueError(f"its '{name}' is {record[name]!r}")
    except (OSError, ValueError) as error:
        raise _damaged(file, str(error)) from error
    return record


def read_stamp(folder: Path) -> RopeLayout | None:
    """The layout that a folder's conversion.json says its rows are in."""
    rope = (read_record(folder) or {}).get("rope")
    try:
        return RopeLayout(rope["layout"]) if rope else None
    except (ValueError, KeyError) as error:
        raise _damaged(folder / STAMP, f"its rope has no known layout: {error}") from error


def _damaged(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        "the record of the conversion cannot be read",
        where=str(file),
        why=why,
        fix="Copy it from the original again; without it nothing says in which layout the rows of q and k are",
    )
