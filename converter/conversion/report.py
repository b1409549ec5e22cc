"""What a conversion did and what it cost: the typed report that `conversion.json` holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from converter import __version__
from converter.blocks import Dropped
from converter.conversion.plan import Plan
from converter.conversion.walk import Findings
from converter.measure.metrics import Comparison, Figures
from converter.measure.yardstick import Shifted
from converter.reference import flops_per_token
from converter.spec import ModelSpec
from converter.text.gather import Texts

#: Largest relative logit difference that an exact op may make.
EXACT_TOLERANCE = 1e-5


@dataclass(frozen=True)
class StepReport:
    """One op: what it is, what it dropped, and the model after it measured against the source."""

    name: str
    parameters: dict[str, Any]
    exact: bool
    needed: bool
    dropped: tuple[Dropped, ...]
    facts: dict[str, float]
    #: Relative errors that the op noted, by their name and by block: "layers.0", "head".
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    #: Mean relative error of the states after each block, against the source's; empty where nothing was measured.
    drift: tuple[float, ...] = ()
    #: The part of it that each block makes by itself, fed the source's states.
    own_error: tuple[float, ...] = ()
    #: The model after this op against the source; None where no text was measured.
    comparison: Comparison | None = None
    #: Largest logit difference to the model before this op, over the largest logit.
    relative_change: float | None = None
    #: The precision in which that was measured: fp64 where it was too much in fp32.
    measured_in: str = "fp32"

    @property
    def passed(self) -> bool:
        """Whether an exact op kept the function; a lossy one always passes."""
        return not self.exact or self.relative_change is None or self.relative_change <= EXACT_TOLERANCE


@dataclass(frozen=True)
class Cost:
    """What a model takes to hold and to run."""

    parameters: int
    bytes: int
    #: For the last token of a full context.
    flops_per_token: int


@dataclass(frozen=True)
class ConversionReport:
    """The whole conversion; `conversion.json` holds the same."""

    source: str
    source_family: str
    target_family: str
    target: Path
    tool_version: str
    recipe: str
    source_sha256: dict[str, str]
    source_dropped: tuple[Dropped, ...]
    ignored_config: dict[str, str]
    rope: dict[str, Any] | None
    dtype: str
    source_cost: Cost
    target_cost: Cost
    text: str
    steps: tuple[StepReport, ...]
    #: The source against the written files.
    verification: Comparison | None
    #: What ran the two.
    verified_by: str | None = None
    #: The source against itself with shifted positions: what a change of positions may be measured against.
    yardstick: tuple[Shifted, ...] = ()
    #: Tokens per second of source and result here. A machine's, not a checkpoint's: `conversion.json` lacks it.
    speed: tuple[float, float] | None = None

    @property
    def passed(self) -> bool:
        """Whether every exact op kept the function."""
        return all(step.passed for step in self.steps)

    @property
    def unexplained_drift(self) -> str | None:
        """The first block whose output drifts by more than its ops and its input explain, in a sentence."""
        return unexplained_drift(self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        facts = asdict(self)
        facts["target"] = self.target.name
        facts["steps"] = [_step_dict(step) for step in self.steps]
        facts["verification"] = self.verification.to_dict() if self.verification else None
        facts["first_unexplained_drift"] = self.unexplained_drift
        return facts

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], target: Path) -> ConversionReport:
        """The inverse of `to_dict`."""
        facts = {field.name: saved[field.name] for field in dataclasses.fields(cls)}
        for name in ("source_cost", "target_cost"):
            facts[name] = Cost(**facts[name])
        facts["source_dropped"] = tuple(Dropped(**each) for each in facts["source_dropped"])
        facts["steps"] = tuple(_step_from(each) for each in facts["steps"])
        return cls(**{**facts, **verification_from(facts), "target": target})


def verification_from(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the verification fills, from plain values."""
    verification, speed = saved.get("verification"), saved.get("speed")
    return {
        "verification": Comparison.from_dict(verification) if verification else None,
        "yardstick": tuple(
            Shifted(each["shift"], each["first_kept"], Figures(**each["figures"]))
            for each in saved.get("yardstick", ())
        ),
        "verified_by": saved.get("verified_by"),
        "speed": (speed[0], speed[1]) if speed else None,
    }


def _step_from(saved: Mapping[str, Any]) -> StepReport:
    return StepReport(
        **{
            **saved,
            "dropped": tuple(Dropped(**each) for each in saved["dropped"]),
            "drift": tuple(saved["drift"]),
            "own_error": tuple(saved["own_error"]),
            "comparison": Comparison.from_dict(saved["comparison"]) if saved["comparison"] else None,
        }
    )


def make_report(
    plan: Plan, findings: Findings, texts: Texts | None, hashes: dict[str, str], target: Path
) -> ConversionReport:
    """The report of a walk, without a verification yet."""
    source, rope = plan.source, plan.target_spec.rope
    return ConversionReport(
        source=source.checkpoint.name,
        source_family=source.family.name,
        target_family=plan.target.name,
        target=target,
        tool_version=__version__,
        recipe=plan.recipe.name,
        source_sha256=hashes,
        source_dropped=tuple(source.dropped),
        ignored_config={key: why for key, why in source.config_accounts.items() if why != "read"},
        rope=None if rope is None else {**asdict(rope), "layout": rope.layout.value},
        dtype=plan.dtype,
        source_cost=Cost(source.parameters, source.checkpoint.total_bytes, _flops(source.spec)),
        target_cost=Cost(plan.parameters, plan.output_bytes, _flops(plan.target_spec)),
        text=texts.description if texts else "nothing: --no-verify",
        steps=tuple(_step_report(plan, findings, index, texts) for index in range(len(plan.steps))),
        verification=None,
    )


def _flops(spec: ModelSpec) -> int:
    return flops_per_token(spec, spec.context)


def _step_report(plan: Plan, findings: Findings, index: int, texts: Texts | None) -> StepReport:
    step = plan.steps[index]
    measured = bool(findings.comparisons)
    return StepReport(
        name=step.op.name,
        parameters=dict(vars(step.op)),
        exact=step.exact,
        needed=step.needed,
        dropped=tuple(findings.dropped[index]),
        facts=findings.facts[index],
        errors=findings.errors[index],
        drift=tuple(findings.drifts[index]),
        own_error=tuple(findings.own_errors[index]),
        comparison=findings.comparisons[index] if measured and texts and texts.real else None,
        relative_change=findings.changes[index] if measured else None,
    )


def _step_dict(step: StepReport) -> dict[str, Any]:
    facts = asdict(step)
    facts["comparison"] = step.comparison.to_dict() if step.comparison else None
    return facts


#: Drift that rounding explains, in fp32, and how much more than its input's and its own a block's may be.
_ROUNDING, _AMPLIFIED = 1e-4, 3.0


def unexplained_drift(steps: Sequence[StepReport]) -> str | None:
    """The first block whose output drifts by more than its ops and its input explain, in a sentence."""
    so_far: tuple[float, ...] = ()
    for step in steps:
        entering = 0.0
        for depth, (drift, own) in enumerate(zip(step.drift, step.own_error, strict=True)):
            already = so_far[depth] if so_far else 0.0
            explained = already if step.exact else max(already, _AMPLIFIED * (entering + own))
            if drift > explained + _ROUNDING:
                block = "embeddings" if depth == 0 else f"layers.{depth - 1}"
                return (
                    f"after {step.name}, {block} is the first block to drift by more than its ops explain: its output "
                    f"by {drift:.1%}, its input by {entering:.1%}, its own ops by {own:.1%}"
                )
            entering = drift
        so_far = step.drift or so_far
    return None
