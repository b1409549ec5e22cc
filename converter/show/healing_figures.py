"""The curves of a healing run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from converter.healing.controls import Control
from converter.healing.loop import Evaluation
from converter.measure.verify import Comparison

_HEALED, _SOURCE = "#c44e52", "#4c72b0"


def draw_healing(
    evaluations: Sequence[Evaluation],
    controls: Sequence[Control],
    after: Comparison | None,
    compared_with: str,
    path: Path,
) -> None:
    """Held-out loss, and KL to what it is `compared_with` where that was measured, over the steps, as a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = {"loss": "held-out loss", "kl": f"KL to {compared_with}"}
    if all(each.kl is None for each in evaluations):
        del panels["kl"]
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, title) in zip(all_axes, panels.items(), strict=True):
        for control in controls:
            _draw(axes, control.evaluations, name, ".:", label=f"{control.name}, {control.rate:g}", linewidth=0.9)
        _draw(axes, evaluations, name, "o-", label="healed", color=_HEALED)
        if name == "loss" and after is not None:
            axes.axhline(after.total.source_loss, color=_SOURCE, label="source")
        axes.set(title=title, xlabel="step", ylabel="nats per token")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _draw(axes: object, evaluations: Sequence[Evaluation], name: str, style: str, **options: object) -> None:
    points = [(each.step, getattr(each, name)) for each in evaluations if getattr(each, name) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), style, **options)  # type: ignore[attr-defined]
