"""Figures of a model card: loss by position, damage by op, drift by depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from converter.conversion.report import StepReport
    from converter.healing.report import Control, HeldOutFigures
    from converter.measure.metrics import Comparison

_SOURCE, _RESULT, _LOSSY, _EXACT = "#4c72b0", "#c44e52", "#c44e52", "#55a868"


def draw_figures(steps: Sequence[StepReport], verification: Comparison, folder: Path) -> list[Path]:
    """Write the figures as PNG files into a folder; the same data gives the same bytes."""
    from matplotlib.figure import Figure

    folder.mkdir(exist_ok=True)  # a resumed run may find it
    written = []
    drawings: dict[str, Callable[[Axes], None]] = {
        "loss_by_position": lambda axes: _loss_by_position(axes, verification),
        "damage_by_op": lambda axes: _damage_by_op(axes, steps),
        "drift_by_depth": lambda axes: _drift_by_depth(axes, steps),
    }
    for name, draw in drawings.items():
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        draw(figure.add_subplot())
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=120, metadata={"Software": None})
    return written


def _loss_by_position(axes: Axes, verification: Comparison) -> None:
    labels = [str(b.first) if b.first == b.last else f"{b.first}-{b.last}" for b in verification.buckets]
    axes.plot(labels, [b.source_loss for b in verification.buckets], "o-", color=_SOURCE, label="source")
    axes.plot(labels, [b.loss for b in verification.buckets], "s-", color=_RESULT, label="result")
    axes.set(title="Loss by position", xlabel="position", ylabel="nats per token")
    axes.legend()


def _damage_by_op(axes: Axes, steps: Sequence[StepReport]) -> None:
    """A waterfall: each bar starts at the loss where the op before it ended."""
    measured = [step for step in steps if step.comparison is not None and step.needed]
    base = 0.0
    for place, step in enumerate(measured):
        assert step.comparison is not None
        loss = step.comparison.total.loss_increase
        axes.barh(place, loss - base, left=base, color=_EXACT if step.exact else _LOSSY)
        axes.annotate(f" KL {max(step.comparison.total.kl, 0.0):.1e}", (max(loss, base), place), va="center")
        base = loss
    axes.set_yticks(range(len(measured)), [step.name for step in measured])
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set(title="Damage by op", xlabel="loss above the source's, nats per token")


def _drift_by_depth(axes: Axes, steps: Sequence[StepReport]) -> None:
    for step in steps:
        if step.needed and any(step.drift):
            axes.plot(range(len(step.drift)), [max(drift, 1e-9) for drift in step.drift], "o-", label=step.name)
    axes.set_yscale("log")
    axes.set(title="Drift by depth", xlabel="block (0: embeddings)", ylabel="relative error of the states")
    if axes.lines:
        axes.legend(fontsize="small")


_HEALED, _SOURCE = "#c44e52", "#4c72b0"


def draw_healing(
    evaluations: Sequence[HeldOutFigures],
    controls: Sequence[Control],
    after: Comparison | None,
    labels: Mapping[str, str],
    path: Path,
) -> None:
    """The held-out losses that `labels` name, over the steps, as a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = {**labels, "ce": "held-out loss"}
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, title) in zip(all_axes, panels.items(), strict=True):
        for control in controls:
            _draw(axes, control.evaluations, name, ".:", label=f"{control.name}, {control.rate:g}", linewidth=0.9)
        _draw(axes, evaluations, name, "o-", label="healed", color=_HEALED)
        if name == "ce" and after is not None:
            axes.axhline(after.total.source_loss, color=_SOURCE, label="source")
        axes.set(title=title, xlabel="step", ylabel="nats per token")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _draw(axes: object, evaluations: Sequence[HeldOutFigures], name: str, style: str, **options: object) -> None:
    points = [(each.step, each.losses[name]) for each in evaluations if name in each.losses]
    if points:
        axes.plot(*zip(*points, strict=True), style, **options)  # type: ignore[attr-defined]
