"""What a healing run did: the typed report that `healing.json` holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.conversion.settings import HealSettings
from converter.measure.metrics import Comparison


@dataclass(frozen=True)
class HeldOutFigures:
    """Held-out losses by name, in nats per token, after so many steps. Each is plain: unweighted, at its defaults."""

    step: int
    losses: Mapping[str, float]

    @property
    def loss(self) -> float:
        """The cross-entropy with the text."""
        return self.losses["ce"]

    @property
    def kl(self) -> float | None:
        """The KL to the teacher, where there is one."""
        return self.losses.get("kl")


@dataclass(frozen=True)
class Control:
    """A model that was trained on the same batches: what it was, its rate, and its best evaluation."""

    name: str
    rate: float
    best: HeldOutFigures
    evaluations: tuple[HeldOutFigures, ...]
    tokens: int


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
