"""Imports go one way: no circle between files, and none between rooms, the folders and single files of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import converter

ROOT = Path(converter.__file__).parent
#: From the bottom: what a room may import stands before it. `show` draws what it is given and knows types only.
ORDER = (
    *("errors", "registry", "spec", "blocks", "layout", "reference", "files", "show", "families", "text", "ops"),
    *("measure", "losses", "conversion", "rope", "healing", "cli"),
)


def modules() -> dict[str, Path]:
    """Every module's dotted name below the package, and its file."""
    found = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
    return {name.removesuffix("__init__").removesuffix("."): path for name, path in found.items()}


def imported(body: Iterable[ast.stmt], known: Mapping[str, Path]) -> Iterator[str]:
    """What statements import when a module is loaded: not inside functions, and not for type checkers."""
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "converter":
            base = node.module.removeprefix("converter").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                yield inner if inner in known else base
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.removeprefix("converter.") for alias in node.names if alias.name.startswith("converter.")
            )
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported(node.orelse, known)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in ("body", "orelse", "finalbody", "handlers"):
                yield from imported(getattr(node, part, ()), known)


def arrows() -> dict[str, set[str]]:
    known = modules()
    return {name: set(imported(ast.parse(path.read_text()).body, known)) - {name} for name, path in known.items()}


def room(module: str) -> str:
    return module.split(".")[0]


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def between_rooms() -> dict[str, set[str]]:
    """Rooms, without the package itself: `from converter import __version__` is of no room."""
    found: dict[str, set[str]] = {}
    for module, targets in arrows().items():
        found.setdefault(room(module), set()).update(room(target) for target in targets if room(target) != room(module))
    found.pop("", None)
    return {name: targets - {""} for name, targets in found.items()}


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    guarded = "try:\n  from converter.files import hub\nexcept ImportError:\n  import sys"
    assert list(imported(ast.parse(guarded).body, modules())) == ["files.hub"]


def test_files_import_in_no_circle() -> None:
    assert circle(arrows()) == []


def test_rooms_import_in_no_circle() -> None:
    assert circle(between_rooms()) == []


def test_rooms_import_what_lies_below_them() -> None:
    assert len(arrows()) > 100
    wrong = [
        (name, target)
        for name, targets in between_rooms().items()
        for target in targets
        if name in ORDER and target in ORDER and ORDER.index(target) >= ORDER.index(name)
    ]
    assert wrong == []
    assert set(between_rooms()) - set(ORDER) == {"__main__"}
