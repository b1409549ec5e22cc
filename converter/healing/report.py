"""What a healing run did: `healing.json`, and the records of the conversion brought up to date."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.conversion.settings import HealSettings
from converter.families.opened import SourceModel
from converter.families.rotating import described, source_digests
from converter.files.json_text import write_json
from converter.files.record import read_record, save_record
from converter.healing.controls import Control
from converter.healing.loop import HeldOutFigures
from converter.measure.metrics import Comparison
from converter.reference import flops_per_token
from converter.show.card import card_section
from converter.show.figures import draw_healing


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
    evaluations: tuple[HeldOutFigures, ...]
    #: The evaluation whose weights were written.
    best: HeldOutFigures
    #: The converted model and the healed one against the source, by transformers' classes.
    before: Comparison | None = None
    after: Comparison | None = None
    controls: tuple[Control, ...] = ()

    @property
    def control(self) -> Control | None:
        """The source fine-tuned on the same tokens, at the best of its rates."""
        tuned = [each for each in self.controls if each.name == "source fine-tuned"]
        return min(tuned, key=lambda each: each.best.loss, default=None)

    @property
    def compared_with(self) -> str:
        """What its KL is to."""
        return HealSettings().replace(**self.settings).compared_with

    @property
    def labels(self) -> dict[str, str]:
        """The losses that were measured as the run went on, in words: cross-entropy, KL, then others."""
        known = HealSettings().replace(**self.settings).losses
        names = sorted(self.best.losses, key=lambda name: (name != "ce", name != "kl"))
        return {name: known[name].label.format(source=self.compared_with) for name in names} | {"ce": "loss"}

    @property
    def objective(self) -> str:
        """What was minimised, in words."""
        return HealSettings().replace(**self.settings).objective

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        facts = dataclasses.asdict(self)
        facts["target"] = self.target.name
        for name, comparison in (("before", self.before), ("after", self.after)):
            facts[name] = comparison.to_dict() if comparison else None
        return facts

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], target: Path) -> HealReport:
        """The inverse of `to_dict`."""
        facts = {field.name: saved[field.name] for field in dataclasses.fields(cls)}
        facts["evaluations"] = _evaluations(facts["evaluations"])
        facts["best"] = HeldOutFigures(**facts["best"])
        facts["controls"] = tuple(
            Control(
                **{**each, "best": HeldOutFigures(**each["best"]), "evaluations": _evaluations(each["evaluations"])}
            )
            for each in facts["controls"]
        )
        return cls(**{**facts, **comparisons_from(facts), "target": target})


def _evaluations(saved: Iterable[Mapping[str, Any]]) -> tuple[HeldOutFigures, ...]:
    return tuple(HeldOutFigures(**each) for each in saved)


def comparisons_from(saved: Mapping[str, Any]) -> dict[str, Any]:
    """`before` and `after`, from plain values."""
    return {name: Comparison.from_dict(saved[name]) if saved.get(name) else None for name in ("before", "after")}


def write_record(report: HealReport, converted: Path, folder: Path) -> None:
    """`healing.json`, and the conversion's own record, brought up to date."""
    record = report.to_dict()
    del record["tokens_per_second"]
    write_json(folder / "healing.json", record)
    _carry_record(report, converted, folder)


def write_figures(report: HealReport, converted: Path, folder: Path) -> None:
    """The conversion's figures, and the curves."""
    figures = folder / "figures"
    if (converted / "figures").is_dir():
        shutil.copytree(converted / "figures", figures, dirs_exist_ok=True)
    figures.mkdir(exist_ok=True)
    draw_healing(report.evaluations, report.controls, report.after, report.labels, figures / "healing.png")


def write_card(report: HealReport, converted: Path, folder: Path) -> None:
    """The conversion's card, with a section about the healing."""
    card = converted / "README.md"
    before = card.read_text(encoding="utf-8") if card.is_file() else f"# {report.target.name}\n"
    (folder / "README.md").write_text(before + card_section(report), encoding="utf-8")


def _carry_record(report: HealReport, converted: Path, folder: Path) -> None:
    """The conversion's record, brought up to date with the files of the healed checkpoint and what was measured."""
    record = read_record(converted)
    if record is None:
        return
    healed = SourceModel.open(folder)
    after = report.after.to_dict() if report.after else None
    content = {**record.content, "target": report.target.name, "verification": after}
    if isinstance(cost := content.get("target_cost"), dict):
        flops = flops_per_token(healed.spec, healed.spec.context)
        content["target_cost"] = {**cost, "bytes": healed.checkpoint.total_bytes, "flops_per_token": flops}
    save_record(folder, described(healed, content, healed.declared_layout), source_digests(healed))
