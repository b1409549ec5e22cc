"""JSON as other programs expect it: no NaN, and every name of an object once, for of two readers take the last."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: Surrogates, which a text may have by themselves in JSON and nowhere else.
_HALVES = re.compile("[\ud800-\udfff]")


def parse_json(text: bytes, on_repeated: Callable[[str], None]) -> Any:
    """The value in a text, as `json.loads`; a name that an object has several times goes to `on_repeated`.

    Raises ValueError where the text is not JSON.
    """

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            for name in (name for name, count in counts.items() if count > 1):
                on_repeated(name)
        return found

    try:
        return json.loads(text, object_pairs_hook=build)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def to_json(value: Any, indent: int | None = 2) -> str:
    """Plain values, and paths, as JSON; NaN and Inf, which JSON does not have, are null, half characters escapes."""
    text = json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False, default=str)
    return _HALVES.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A file of `to_json` and a line's end."""
    path.write_text(to_json(content) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value
