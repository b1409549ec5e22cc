"""What a healing run did: `healing.json`, terminal tables, the model card's section, the curves."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from converter.conversion.report import comparison_table, markdown
from converter.files.json_text import write_json
from converter.healing.controls import Control
from converter.healing.loop import Evaluation
from converter.healing.settings import HealSettings
from converter.measure.verify import Comparison
from converter.show.healing_figures import draw_healing


@dataclass(frozen=True)
class HealReport:
    """The whole run; `healing.json` holds the same."""

    target: Path
    tool_version: str
    #: Names of the converted checkpoint and of its source.
    converted: str
    source: str | None
    settings: dict[str, Any]
    text: str
    steps: int
    tokens: int
    skipped: int
    #: On the machine that it ran on; `healing.json` lacks it.
    tokens_per_second: float
    evaluations: tuple[Evaluation, ...]
    #: The evaluation whose weights were written.
    best: Evaluation
    #: The converted model and the healed one against the source, by transformers' classes.
    before: Comparison | None = None
    after: Comparison | None = None
    controls: tuple[Control, ...] = ()

    @property
    def control(self) -> Control | None:
        """The source fine-tuned on the same tokens, at the best of its rates."""
        tuned = [each for each in self.controls if each.name == "source fine-tuned"]
        return min(tuned, key=lambda each: each.best.loss, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        facts = dataclasses.asdict(self)
        facts["target"] = self.target.name
        for name, comparison in (("before", self.before), ("after", self.after)):
            facts[name] = comparison.to_dict() if comparison else None
        return facts


def evaluations_table(report: HealReport) -> Table:
    """Held-out figures as the run went on."""
    table = Table(title="Healing, nats per token on held-out text", title_justify="left")
    for heading in ("step", "loss", f"KL to {_compared_with(report).removeprefix('the ')}"):
        table.add_column(heading, justify="right")
    for each in report.evaluations:
        table.add_row(f"{each.step}{' (kept)' if each == report.best else ''}", f"{each.loss:.4f}", _kl(each.kl))
    return table


def result_table(report: HealReport) -> Table:
    """All models side by side: the source, the converted and the healed one, and the controls."""
    tokens = f"{report.tokens / 1e6:.3g} M tokens"
    table = Table(title=f"After {tokens}, nats per token on held-out text", title_justify="left")
    for heading in ("model", "loss", "against source", "KL to source"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, loss, increase, kl in _rows(report):
        table.add_row(name, f"{loss:.4f}", "" if increase is None else f"{increase:+.4f}", _kl(kl))
    return table


def _rows(report: HealReport) -> Iterator[tuple[str, float, float | None, float | None]]:
    """Name, loss, loss above the source's, KL to the source."""
    base = None
    if report.before is not None and report.after is not None:
        base = report.after.total.source_loss
        yield "source", base, None, None
        for name, each in (("converted", report.before.total), ("healed", report.after.total)):
            yield name, each.loss, each.loss_increase, each.kl
    else:
        yield "converted", report.evaluations[0].loss, None, report.evaluations[0].kl
        yield "healed", report.best.loss, None, report.best.kl
    for control in report.controls:
        best = " (best)" if control == report.control else ""
        loss = control.best.loss
        yield (
            f"{control.name}, rate {control.rate:g}{best}",
            loss,
            None if base is None else loss - base,
            control.best.kl,
        )


def _compared_with(report: HealReport) -> str:
    return HealSettings(**report.settings).compared_with


def _kl(kl: float | None) -> str:
    return "" if kl is None else f"{kl:.4f}"


def heal_tables(report: HealReport) -> list[Any]:
    """What the terminal shows after a run."""
    shown: list[Any] = [evaluations_table(report), result_table(report)]
    if report.after is not None:
        shown.append(comparison_table(report.after, "The healed model by position"))
    if report.skipped:
        shown.append(f"{report.skipped} steps were skipped, since their gradients were not finite.")
    shown.append(f"Measured on: {report.text}.")
    return shown


def write_reports(report: HealReport, converted: Path, folder: Path, theta: float | None) -> None:
    """`healing.json`, the curves, and the conversion's own record, card and figures, brought up to date."""
    record = report.to_dict()
    del record["tokens_per_second"]
    write_json(folder / "healing.json", record)
    _carry_record(report, converted, folder, theta)
    figures = folder / "figures"
    if (converted / "figures").is_dir():
        shutil.copytree(converted / "figures", figures, dirs_exist_ok=True)
    figures.mkdir(exist_ok=True)
    draw_healing(report.evaluations, report.controls, report.after, _compared_with(report), figures / "healing.png")
    card = converted / "README.md"
    before = card.read_text(encoding="utf-8") if card.is_file() else f"# {folder.name}\n"
    (folder / "README.md").write_text(before + card_section(report), encoding="utf-8")


def _carry_record(report: HealReport, converted: Path, folder: Path, theta: float | None) -> None:
    """`conversion.json`, whose stamp of the RoPE layout and whose expected KL have to be this checkpoint's."""
    path = converted / "conversion.json"
    if not path.is_file():
        return
    content = json.loads(path.read_text(encoding="utf-8"))
    content["verification"] = report.after.to_dict() if report.after else None
    if content.get("rope") and theta is not None:
        content["rope"]["theta"] = theta
    write_json(folder / "conversion.json", content)


def card_section(report: HealReport) -> str:
    """The model card's section about healing."""
    settings = report.settings
    losses = {f"KL to {_compared_with(report)}": settings["kl"], "cross-entropy": settings["ce"]}
    mix = " + ".join(f"{weight:g} x {name}" for name, weight in losses.items() if weight)
    parts = [
        "\n## Healing\n",
        f"After the conversion the model was fine-tuned on {report.tokens:,} tokens by checkpoint-converter "
        f"{report.tool_version}: {mix}, rate {settings['rate']:g}. The figures above are those before it. "
        f"Measured on: {report.text}.\n",
        markdown(result_table(report)) + "\n",
        "![Healing](figures/healing.png)\n",
    ]
    if report.after is not None:
        parts += ["### The healed model by position\n", markdown(comparison_table(report.after, "")) + "\n"]
    parts.append("`healing.json` holds all settings and figures, `metrics.jsonl` every step.\n")
    return "\n".join(parts)
