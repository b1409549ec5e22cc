"""What people see: names as they are, an error of any block in its row, nothing where nothing was measured."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from click.testing import CliRunner
from test_rope_containers import EVEN, meta_folder
from test_rope_families import make

import converter
from converter.blocks import Block
from converter.cli.main import main
from converter.conversion.recipe import load_recipe
from converter.errors import ConverterError
from converter.ops import Calibration, Notes
from converter.ops.untie_head import UntieHead
from converter.show.card import model_card
from converter.show.progress import Bars, plain_console, print_all
from converter.show.tables import conversion_tables, damage_table, errors_table, markdown
from converter.spec import ModelSpec

NAME = "[old] gpt2 [bold red]:smile: a|b[/]"


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, [*map(str, arguments)], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    return re.sub(r"[\s│]+", "", result.stdout)


@pytest.fixture(scope="module")
def bracketed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(models.gpt2(), tmp_path_factory.mktemp("show") / "[old] gpt2 :smile: [bold]x")


def test_names_with_brackets_are_printed_as_they_are(bracketed: Path, tmp_path: Path) -> None:
    shown = re.sub(r"\s+", "", str(bracketed))
    text = models.write_ids(tmp_path / "[text].npy")
    assert shown in run("inspect", bracketed, "--mapping")
    assert shown in run("eval", bracketed, "--text", text, "--context", 16)
    assert f"{shown}against{shown}" in run("verify", bracketed, bracketed, "--text", text)
    assert shown in run("check", bracketed)
    out = tmp_path / "[new] [dim]llama"
    said = run("convert", bracketed, out, "--recipe", "gpt2-to-llama-naive", "--text", text)
    assert "[text].npy" in said
    card = (out / "README.md").read_text()
    assert f"checkpoint `{bracketed.name}`" in card
    assert "a held-out tenth of [text].npy" in card


def test_progress_and_lines_are_printed_as_they_are() -> None:
    from rich.progress import Progress, TextColumn

    file = io.StringIO()
    console = plain_console(file=file, width=200, force_terminal=True)
    with Progress(TextColumn("{task.description}", markup=False), console=console) as shown:
        bars = Bars(shown, hidden=False)
        bars.say(f"Note: {NAME}")
        bars.stage(f"{NAME} at 64", 4, unit="tokens")
        bars.advance(4)
    assert f"Note: {NAME}" in file.getvalue()
    assert f"{NAME} at 64" in file.getvalue()


class NotesOfEveryBlock(UntieHead):
    """An op that notes an error of embeddings, of one layer and of the head."""

    name = "noting"

    def change(self, spec: ModelSpec) -> ModelSpec:
        return spec

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        if notes.ref.kind != "layer" or notes.ref.index == 2:
            notes.errors["of it"] = {"embeddings": 0.1, "layer": 0.2, "head": 0.3}[notes.ref.kind]
        return block


def test_an_error_of_any_block_has_a_row_of_its_own(tmp_path: Path) -> None:
    recipe = load_recipe("gpt2-to-llama-naive")
    places = ("here", *recipe.places)
    recipe = dataclasses.replace(recipe, steps=(NotesOfEveryBlock(), *recipe.steps), places=places)
    source = models.save(models.gpt2(), tmp_path / "source")
    text = models.write_ids(tmp_path / "ids.npy")
    report = converter.convert(source, tmp_path / "out", recipe=recipe, text=[text])
    lines = markdown(errors_table(report)).splitlines()
    assert lines[2:] == [
        "| embeddings | 10.00% |",
        "| 2 | 20.00% |",
        "| head | 30.00% |",
    ]
    assert "| head | 30.00% |" in (tmp_path / "out" / "README.md").read_text()
    assert report.steps[0].errors == {"of it": {"embeddings": 0.1, "layers.2": 0.2, "head": 0.3}}


def test_nothing_measured_shows_no_figures(bracketed: Path, tmp_path: Path) -> None:
    report = converter.convert(bracketed, tmp_path / "out", recipe="gpt2-to-llama-naive", verify=False)
    table = damage_table(report)
    assert [column.header for column in table.columns] == ["after op", "kind"]
    assert table.title == "Damage by op: nothing was measured"
    assert report.verification is None
    assert [(step.comparison, step.relative_change) for step in report.steps] == [(None, None)] * len(report.steps)
    card = model_card(report)
    assert "Nothing was measured on text." in card
    assert "nan" not in card.lower()
    assert not any("passed" in str(shown) for shown in conversion_tables(report))


def test_a_swap_by_conversion_reports_no_score_error(tmp_path: Path) -> None:
    folder = meta_folder(tmp_path / "meta", make("Llama", EVEN), 1)
    result = CliRunner().invoke(main, ["rope", "swap", str(folder), str(tmp_path / "hf"), "--to", "half_split"])
    assert result.exit_code == 0, result.output
    assert "Attention scores" not in result.output
    found: dict[str, Any] = {}
    from converter.rope.swap import swap
    from converter.spec import RopeLayout

    found = swap(folder, tmp_path / "again", to=RopeLayout.HALF_SPLIT).to_dict()
    assert found["score_error"] is None


def test_a_text_without_predictions_is_an_error_and_no_nan(bracketed: Path, tmp_path: Path) -> None:
    import numpy as np

    np.save(tmp_path / "ids.npy", torch.ones(4, 1, dtype=torch.int64).numpy())
    for measure in (
        lambda: converter.verify(bracketed, bracketed, text=tmp_path / "ids.npy"),
        lambda: converter.evaluate(bracketed, text=tmp_path / "ids.npy"),
    ):
        with pytest.raises(ConverterError, match=r"nothing to predict|no text to run"):
            measure()


def test_cells_of_a_markdown_table_hold_no_bars() -> None:
    from rich.table import Table

    table = Table("a|b")
    table.add_row(NAME)
    assert markdown(table).splitlines()[2] == "| " + NAME.replace("|", r"\|") + " |"
    print_all([table])
