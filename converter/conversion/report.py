"""What a conversion did and what it cost: the typed report that `conversion.json` holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.blocks import Dropped

if TYPE_CHECKING:  # `inspect` prints its tables without torch
    from converter.measure.metrics import Comparison
    from converter.measure.yardstick import Shifted


#: Largest relative logit difference that an exact op may make, in fp32.
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
    #: transformers' class of the source against transformers' class of the written files.
    verification: Comparison | None
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
