"""What a healing run leaves beside its weights: `healing.json`, the conversion's record, figures and card."""

from __future__ import annotations

import shutil
from pathlib import Path

from converter.families.opened import SourceModel
from converter.families.rotating import described, source_digests
from converter.files.json_text import write_json
from converter.files.record import read_record, save_record
from converter.healing.report import HealReport
from converter.reference import flops_per_token
from converter.show.card import card_section
from converter.show.figures import draw_healing


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
