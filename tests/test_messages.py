"""Every message says what, where, why or what to do: all places that make a ConverterError are walked."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import converter
from converter import errors
from converter.cli.main import main
from converter.errors import CheckpointError, ConverterError, at

ROOT = Path(converter.__file__).parent
KINDS = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, ConverterError)}

#: Rooms that read what a user gives. An error there says where, but for these, to which a place is added.
READERS = ("files", "families")
PLACED = {
    "families/__init__.py": "get_family takes a name; the command line names the command",
    "families/holding.py": "make_plan names the recipe",
    "families/mapping.py": "the walk names the step",
    "families/llama_meta.py": "make_plan names the recipe",
    "families/rotating.py": "the command line names the command",
    "files/tokenizer.py": "two tokenizers are compared, and the message names both",
    "files/writer.py": "a size of an option; the command line names the command",
}


def made() -> Iterator[tuple[str, ast.Call]]:
    """Every call in the package that makes an error of ours."""
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
                yield file.relative_to(ROOT).as_posix(), node


def test_every_error_says_why_or_what_to_do() -> None:
    calls = list(made())
    assert len(calls) > 200
    silent = [
        f"{file}:{call.lineno}"
        for file, call in calls
        if not {"why", "fix"} & {keyword.arg for keyword in call.keywords}
    ]
    assert silent == []


def test_every_error_about_what_was_read_says_where() -> None:
    lost = {
        file
        for file, call in made()
        if file.startswith(READERS) and "where" not in {keyword.arg for keyword in call.keywords}
    }
    assert lost == set(PLACED)


def test_the_command_line_says_where_if_nothing_nearer_does(tmp_path: Path) -> None:
    """What has no place of its own is told with the command."""
    for arguments in (
        ["convert", str(tmp_path / "none"), str(tmp_path / "out")],
        ["rope", "swap", str(tmp_path), "--to", "half_split"],
        ["recipes", "show", "nonesuch"],
        ["verify", str(tmp_path), str(tmp_path), "--text", str(tmp_path)],
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2, result.output
        head, _, rest = result.output.partition(": ")
        assert rest, result.output
        assert head == "converter" or head.startswith(f"converter {arguments[0]}"), result.output


def test_a_place_is_given_once_and_not_over_a_nearer_one() -> None:
    with pytest.raises(ConverterError, match=r"^inner: x"), at("outer"), at("inner"):
        raise ConverterError("x", fix="y")
    with pytest.raises(CheckpointError, match=r"^file: x"), at("outer"):
        raise CheckpointError("x", where="file", fix="y")
