"""JSON in which every name of an object stands once: of two, readers would take the last and not say so."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any


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
