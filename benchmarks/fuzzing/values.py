"""Values that no reader expects, as JSON or YAML writes them, and text that is damaged as text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

DEPTH = 10_000
#: Stands in a tree for text that is written as it is.
_RAW = "@raw@"

PLAIN = (
    *("null", "true", "false", "[]", "{}", '""', '"x"', "[0]", "[null]", '{"a": 1}', '["a", "b"]', "[[1, 2], [3]]"),
    *("0", "-1", "1", "2", "3", "7", "0.5", "-0.0", "1e-320", "16.0", '"16"', '"true"', '"float32"', "1e30"),
)
HUGE = (
    *("1e308", "1e999", "-1e999", "NaN", "Infinity", "-Infinity", "2147483648", "4294967296", "1000000000000"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775808", "1" + "0" * 400, "1" + "0" * 5000),
)
STRANGE = (
    *(r'"\ud800"', r'"a\u0000b"', r'"\u001b[31mred"', '"[bold]x[/bold]"', '"[/]"', '"{0}%s"', r'"line\nline"'),
    *('"../outside/secret"', '"../outside/model.safetensors"', '"/etc/passwd"', '"../../x"', '"."', '"/"', '"a/b"'),
)


def raw_value(rng: random.Random) -> str:
    """A value as text."""
    return rng.choice(
        (
            lambda: rng.choice(PLAIN),
            lambda: rng.choice(PLAIN),
            lambda: rng.choice(HUGE),
            lambda: rng.choice(HUGE),
            lambda: rng.choice(STRANGE),
            lambda: rng.choice(("[" * DEPTH + "]" * DEPTH, '{"a":' * DEPTH + "1" + "}" * DEPTH)),
            lambda: rng.choice(('"' + "x" * 300_000 + '"', "[" + "1," * 50_000 + "1]")),
        )
    )()


def short(text: str) -> str:
    """As a description shows it."""
    return text if len(text) <= 40 else f"{text[:20]}...({len(text)})"


def damage_json(text: str, rng: random.Random) -> tuple[str, str]:
    """A JSON text damaged as a tree, or else as text; and what was done."""
    try:
        tree = json.loads(text)
    except ValueError:
        return damage_lines(text, rng)
    places = list(_places(tree))
    if not places or rng.random() < 0.15:
        return _damage_root(text, rng)
    parent, key = rng.choice(places)
    where = f"{key!r:.40}"
    act = rng.choice(_TREE_ACTS)
    return act(tree, parent, key, where, rng)


def _places(tree: Any) -> Any:
    """(container, key) of every node but the root; only the first ones of a long container."""
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in items[:60]:
        yield tree, key
        yield from _places(value)


def _dump(tree: Any, raw: str = "null") -> str:
    return json.dumps(tree).replace(f'"{_RAW}"', raw)


def _replace(tree: Any, parent: Any, key: Any, where: str, rng: random.Random) -> tuple[str, str]:
    raw = raw_value(rng)
    parent[key] = _RAW
    return _dump(tree, raw), f"{where} = {short(raw)}"


def _nudge(tree: Any, parent: Any, key: Any, where: str, rng: random.Random) -> tuple[str, str]:
    """Another value of the same type."""
    value = parent[key]
    if isinstance(value, bool):
        parent[key] = not value
    elif isinstance(value, (int, float)):
        parent[key] = rng.choice((value * 2, value + 1, value - 1, value / 2, value // 2, -value, str(value)))
    elif isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        parent[key] = rng.choice((value[:at] + value[at + 1 :], value[:at] + "é" + value[at:], value.upper(), [value]))
    elif isinstance(value, list):
        parent[key] = rng.choice((value[1:], value[::-1], value * 2, [value]))
    elif isinstance(value, dict):
        parent[key] = rng.choice((list(value.items()), dict(list(value.items())[1:]), {"x": value}))
    else:
        return _replace(tree, parent, key, where, rng)
    return _dump(tree), f"{where}: {short(json.dumps(value))} -> {short(json.dumps(parent[key]))}"


def _delete(tree: Any, parent: Any, key: Any, where: str, rng: random.Random) -> tuple[str, str]:
    del parent[key]
    return _dump(tree), f"{where} deleted"


def _swap(tree: Any, parent: Any, key: Any, where: str, rng: random.Random) -> tuple[str, str]:
    other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    parent[key], parent[other] = parent[other], parent[key]
    return _dump(tree), f"{where} and {other!r} swapped"


def _rename(tree: Any, parent: Any, key: Any, where: str, rng: random.Random) -> tuple[str, str]:
    if not isinstance(parent, dict):
        return _delete(tree, parent, key, where, rng)
    name = rng.choice((key[:-1], key + "s", key.upper(), f"../{key}", f"module.{key}", "", json.loads(STRANGE[0]), key))
    if name == key:
        raw = raw_value(rng)
        parent[_RAW + key] = _RAW  # the same name again, behind the first
        return _dump(tree, raw).replace(_RAW, "", 1), f"{where} twice, then {short(raw)}"
    parent[name] = parent.pop(key)
    return _dump(tree), f"{where} renamed {name!r}"


def _add(tree: Any, parent: Any, key: Any, where: str, rng: random.Random) -> tuple[str, str]:
    raw = raw_value(rng)
    if isinstance(parent, dict):
        parent["extra"] = _RAW
    else:
        parent.insert(key, _RAW)
    return _dump(tree, raw), f"beside {where}: {short(raw)}"


_TreeAct = Callable[[Any, Any, Any, str, random.Random], tuple[str, str]]
_TREE_ACTS: tuple[_TreeAct, ...] = (_replace, _replace, _replace, _nudge, _nudge, _delete, _swap, _rename, _add)


def _damage_root(text: str, rng: random.Random) -> tuple[str, str]:
    raw = raw_value(rng)
    return rng.choice(
        (
            (raw, f"all of it = {short(raw)}"),
            (f"[{text}]", "in a list"),
            (text + text, "twice"),
            ("\ufeff" + text, "byte order mark"),
            (text.replace(",", ",,", 1), "a comma twice"),
            (text.replace('"', "'"), "single quotes"),
            (text.rstrip().removesuffix("}"), "no end"),
        )
    )


def damage_lines(text: str, rng: random.Random) -> tuple[str, str]:
    """A text damaged line by line, with values of JSON and YAML."""
    lines = text.splitlines() or [""]
    at = rng.randrange(len(lines))
    line = lines[at]
    act = rng.choice(("value", "value", "value", "delete", "twice", "indent", "swap", "all", "cut", "yaml"))
    told = f"line {at + 1}: {act}"
    if act == "value":
        raw = raw_value(rng)
        head, colon, _ = line.partition(":")
        lines[at] = f"{head}{colon} {raw}" if colon else f"{line} {raw}"
        told = f"line {at + 1}: {short(lines[at])}"
    elif act == "delete":
        del lines[at]
    elif act == "twice":
        lines.insert(at, line)
    elif act == "indent":
        lines[at] = rng.choice(("  ", "\t", "- ")) + line
    elif act == "swap":
        other = rng.randrange(len(lines))
        lines[at], lines[other] = lines[other], line
    elif act == "all":
        lines = [raw_value(rng)]
    elif act == "cut":
        lines[at] = line[: rng.randrange(len(line) + 1)]
        del lines[at + 1 :]
    else:
        lines[at] = rng.choice(_YAML)
        told = f"line {at + 1}: {short(lines[at])}"
    return "\n".join(lines) + "\n", told


_BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    + ["name: *a9"]
)
_YAML = (
    _BOMB,
    *(
        "name: !!python/object/apply:os.system ['true']",
        "- !!binary x",
        "name: &a [*a]",
        "<<: {name: x}",
        "<<: *missing",
    ),
    *(
        "%YAML 9.9",
        "--- \n---",
        "? [a, b]\n: c",
        "name: 2001-02-30",
        "name: 0o9",
        "steps: &s\n- *s",
        "name: !unknown x",
    ),
    *("name: \x07", "steps: {a: [" * 2000, "- " * 5000, "name: 12:30:45", "name: .nan", "1: 2", "? \n: "),
)
