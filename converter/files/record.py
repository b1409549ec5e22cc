"""The stamp: `conversion.json` beside the weights says which RoPE layout we wrote, for no config does."""

from __future__ import annotations

import json
from pathlib import Path

from converter.errors import CheckpointError
from converter.spec import RopeLayout

STAMP = "conversion.json"


def read_stamp(folder: Path) -> RopeLayout | None:
    """The layout that a folder's conversion.json says its rows are in."""
    file = folder / STAMP
    if not file.is_file():
        return None
    try:
        rope = json.loads(file.read_text(encoding="utf-8")).get("rope")
        return RopeLayout(rope["layout"]) if rope else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("the stamp cannot be read", where=str(file), why=str(error)) from error
