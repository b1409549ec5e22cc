"""What a conversion did and what it cost: a typed report, `conversion.json`, terminal tables, the model card."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from converter.blocks import LINEARS, Dropped

if TYPE_CHECKING:  # `inspect` prints its tables without torch
    from converter.conversion.plan import Plan
    from converter.measure.inspect import Inspection
    from converter.measure.verify import Comparison, Figures
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
    #: Relative errors that the op noted, block by block.
    errors: dict[str, list[float]] = field(default_factory=dict)
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        facts = asdict(self)
        facts["target"] = self.target.name
        facts["steps"] = [_step_dict(step) for step in self.steps]
        facts["verification"] = self.verification.to_dict() if self.verification else None
        facts["first_unexplained_drift"] = unexplained_drift(self.steps)
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


def damage_table(report: ConversionReport) -> Table:
    """Cumulative damage by op."""
    table = Table(title="Damage by op, cumulative, nats per token on held-out text", title_justify="left")
    for heading in ("after op", "kind", "KL to source", "loss", "against source", "top-1 agreement"):
        table.add_column(heading, justify="left" if heading in ("after op", "kind") else "right")
    first = next((step.comparison.total for step in report.steps if step.comparison), None)
    if first is not None:
        table.add_row("source", "", "", f"{first.source_loss:.4f}", "", "")
    for step in report.steps:
        kind = ("exact" if step.exact else "lossy") if step.needed else "not needed"
        total = step.comparison.total if step.comparison else None
        table.add_row(step_title(step), kind, *(_figure_cells(total) if total else [""] * 4))
    return table


def step_title(step: StepReport) -> str:
    """The op with its parameters."""
    inner = ", ".join(f"{key}={value}" for key, value in step.parameters.items())
    return f"{step.name}({inner})" if inner else step.name


def _figure_cells(figures: Figures) -> list[str]:
    return [
        f"{max(figures.kl, 0.0):.2e}" if figures.kl < 1e-3 else f"{figures.kl:.4f}",
        f"{figures.loss:.4f}",
        f"{figures.loss_increase:+.4f}",
        f"{figures.agreement:.2%}",
    ]


def comparison_table(comparison: Comparison, title: str) -> Table:
    """A comparison by position bucket."""
    table = Table(title=title, title_justify="left")
    for heading in ("positions", "tokens", "KL to source", "loss", "against source", "top-1 agreement"):
        table.add_column(heading, justify="right")
    for figures in (*comparison.buckets, comparison.total):
        span = str(figures.first) if figures.first == figures.last else f"{figures.first}-{figures.last}"
        if figures is comparison.total:
            table.add_section()
            span = "all"
        table.add_row(span, f"{figures.tokens:,}", *_figure_cells(figures))
    return table


def cost_table(report: ConversionReport) -> Table:
    """Source beside result: size and speed."""
    table = Table(title="Cost", title_justify="left")
    table.add_column("")
    for heading in ("source", "result", "ratio"):
        table.add_column(heading, justify="right")
    rows: list[tuple[str, float, float]] = [
        (name, getattr(report.source_cost, key), getattr(report.target_cost, key))
        for name, key in (("parameters", "parameters"), ("bytes", "bytes"), ("FLOPs per token", "flops_per_token"))
    ]
    if report.speed is not None:
        rows.append(("tokens per second, here", *report.speed))
    for name, before, after in rows:
        table.add_row(name, f"{before:,.0f}", f"{after:,.0f}", f"{after / before:.2f}")
    return table


def errors_table(report: ConversionReport) -> Table:
    """Relative errors that the ops noted, a row a layer."""
    columns = [(f"{step.name}, {name}", values) for step in report.steps for name, values in step.errors.items()]
    table = Table(title="Relative errors of single layers, on calibration text", title_justify="left")
    table.add_column("layer", justify="right")
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    for layer, row in enumerate(zip(*(values for _, values in columns), strict=True)):
        table.add_row(str(layer), *(f"{value:.2%}" for value in row))
    return table


def yardstick_table(rows: Sequence[Shifted]) -> Table:
    """The source with shifted positions against itself."""
    table = Table(title="Yardstick: the source with shifted positions against itself", title_justify="left")
    for heading in ("shift", "position 0", "KL", "loss"):
        table.add_column(heading, justify="right" if heading != "position 0" else "left")
    for row in rows:
        kept = "kept" if row.first_kept else "moved"
        table.add_row(str(row.shift), kept, f"{row.figures.kl:.4f}", f"{row.figures.loss_increase:+.4f}")
    return table


def damage_by_position_table(report: ConversionReport) -> Table:
    """KL to the source after each op that changes something, by position bucket."""
    steps = [step for step in report.steps if step.comparison is not None and step.needed and not step.exact]
    table = Table(title="KL to the source by position, cumulative", title_justify="left")
    table.add_column("positions", justify="right")
    for step in steps:
        table.add_column(step.name, justify="right")
    comparisons = [step.comparison for step in steps if step.comparison is not None]
    for place, first in enumerate(comparisons[0].buckets if comparisons else ()):
        span = str(first.first) if first.first == first.last else f"{first.first}-{first.last}"
        table.add_row(span, *(_figure_cells(each.buckets[place])[0] for each in comparisons))
    return table


def inspection_table(found: Inspection) -> Table:
    """The facts of a checkpoint, two columns."""
    spec = found.spec
    table = Table(title=str(found.path), title_justify="left", show_header=False)
    heads = f"{spec.num_heads} heads of {spec.head_dim}"
    if spec.num_kv_heads != spec.num_heads:
        heads += f", {spec.num_kv_heads} key-value heads"
    positions = spec.positions.value
    if spec.rope is not None:
        positions = f"RoPE, theta {spec.rope.theta:g}, {spec.rope.layout.value}"
        positions += f", scaling {dict(spec.rope.scaling)}" if spec.rope.scaling else ""
    mlp = f"{'gated' if spec.gated_mlp else 'plain'}, {spec.activation.value}, width {spec.intermediate_size}"
    rows = {
        "family": found.family,
        "layers": str(spec.num_layers),
        "hidden size": str(spec.hidden_size),
        "attention": heads,
        "MLP": f"{mlp} ({found.mlp_ratio:.2f} x hidden)",
        "norm": f"{spec.norm.value}, {'pre' if spec.pre_norm else 'post'}, eps {spec.norm_eps:g}",
        "positions": positions,
        "context": str(spec.context),
        "vocabulary": f"{spec.vocab_size}, head {'tied to the embeddings' if spec.tied_head else 'of its own'}",
        "biases": ", ".join(part for part in LINEARS if part in spec.biases) or "none",
        "stored as": ", ".join(f"{dtype} ({count} tensors)" for dtype, count in found.dtypes.items()),
        "parameters": f"{found.parameters:,}",
        "bytes": f"{found.bytes:,}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for each in found.warnings:
        table.add_row("[yellow]note", each)
    return table


def mapping_table(found: Inspection) -> Table:
    """Which tensor becomes which role."""
    table = Table(title="Tensors and their roles", title_justify="left")
    for heading in ("tensor", "shape", "becomes", "how"):
        table.add_column(heading, overflow="fold")
    for row in found.mapping:
        table.add_row(row.tensor, "x".join(map(str, row.shape)), row.roles, row.how)
    for each in found.dropped:
        table.add_row(each.name, "", "[dim]dropped", each.reason)
    return table


def plan_tables(plan: Plan) -> list[Table]:
    """A dry run: the steps, and the three accounts."""
    steps = Table(title="Plan", title_justify="left")
    for heading in ("op", "kind"):
        steps.add_column(heading)
    for step in plan.steps:
        kind = ("exact" if step.exact else "lossy") if step.needed else "not needed"
        parameters = dict(vars(step.op))
        shown = StepReport(step.op.name, parameters, step.exact, step.needed, (), {})
        steps.add_row(step_title(shown), kind + (", calibrated" if step.op.calibrated and step.needed else ""))
    accounts = Table(title="Accounts", title_justify="left")
    for heading in ("account", "what", "why"):
        accounts.add_column(heading, overflow="fold")
    accounts.add_row("used", f"{len(plan.source.used)} tensors", "")
    for dropped in collapse(plan.source.dropped + list(plan.dropped)):
        accounts.add_row("dropped", dropped.name, dropped.reason)
    ignored = {key: why for key, why in plan.source.config_accounts.items() if why != "read"}
    for key, why in ignored.items():
        accounts.add_row("ignored", f"config.{key}", why)
    result = Table(title="Result", title_justify="left", show_header=False)
    result.add_row("family", plan.target.name)
    result.add_row("tensors", f"{len(plan.tensors)}")
    result.add_row("parameters", f"{plan.parameters:,}")
    result.add_row("dtype", plan.dtype)
    result.add_row("bytes", f"{plan.output_bytes:,}")
    result.add_row("peak memory of the weights", f"{plan.peak_bytes:,} bytes")
    shapes = Table(title="Tensors of the result", title_justify="left")
    for heading in ("tensor", "shape"):
        shapes.add_column(heading)
    last = plan.target_spec.num_layers - 1
    for name, (shape, _) in plan.tensors.items():
        if ".0." in name:
            name = name.replace(".0.", f".{{0...{last}}}.", 1)
        elif any(f".{layer}." in name for layer in range(1, last + 1)):
            continue
        shapes.add_row(name, "x".join(map(str, shape)))
    return [steps, accounts, shapes, result]


def plan_dict(plan: Plan) -> dict[str, Any]:
    """A dry run, for JSON."""
    return {
        "recipe": plan.recipe.name,
        "steps": [
            {
                "name": step.op.name,
                "parameters": dict(vars(step.op)),
                "exact": step.exact,
                "needed": step.needed,
                "calibrated": step.op.calibrated,
            }
            for step in plan.steps
        ],
        "used": plan.source.used,
        "dropped": [asdict(each) for each in (*plan.source.dropped, *plan.dropped)],
        "ignored": {key: why for key, why in plan.source.config_accounts.items() if why != "read"},
        "target": plan.target.name,
        "tensors": {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in plan.tensors.items()},
        "parameters": plan.parameters,
        "bytes": plan.output_bytes,
        "peak_bytes": plan.peak_bytes,
    }


def conversion_tables(report: ConversionReport) -> list[Any]:
    """What the terminal shows after a conversion."""
    shown: list[Any] = [damage_table(report)]
    if report.verification is not None:
        title = "Source against the written files, each run by transformers, nats per token"
        shown.append(comparison_table(report.verification, title))
        if report.yardstick:
            shown.append(yardstick_table(report.yardstick))
        shown.append(cost_table(report))
        if (drift := unexplained_drift(report.steps)) is not None:
            shown.append(f"{drift[0].upper()}{drift[1:]}.")
        shown.append(f"Measured on: {report.text}.")
    elif any(step.relative_change is not None for step in report.steps):
        shown.append(f"Exact ops passed their gates. {report.text[0].upper()}{report.text[1:]}.")
    dropped = collapse([each for step in report.steps for each in step.dropped])
    for each in dropped:
        norm = f" (norm {each.norm:.4g})" if each.norm is not None else ""
        shown.append(f"Not in the result: {each.name}{norm}: {each.reason}.")
    return shown


def collapse(dropped: Sequence[Dropped]) -> list[Dropped]:
    """The same drop in every layer as one line, with the root of the summed squares of the norms."""
    import re

    groups: dict[tuple[str, str], list[Dropped]] = {}
    for each in dropped:
        groups.setdefault((re.sub(r"(^|\.)\d+\.", r"\1*.", each.name), each.reason), []).append(each)
    lines = []
    for (pattern, reason), members in groups.items():
        name = members[0].name if len(members) == 1 else f"{pattern} ({len(members)} times)"
        norms = [each.norm for each in members if each.norm is not None]
        lines.append(Dropped(name, reason, sum(norm**2 for norm in norms) ** 0.5 if norms else None))
    return lines


def markdown(table: Table) -> str:
    """A rich table's cells as a Markdown table."""
    console = Console(file=io.StringIO())
    columns = [[str(console.render_str(str(cell))) for cell in column.cells] for column in table.columns]
    headings = [str(column.header) for column in table.columns]
    rules = ["---:" if column.justify == "right" else "---" for column in table.columns]
    rows = [headings, rules, *map(list, zip(*columns, strict=True))]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def model_card(report: ConversionReport) -> str:
    """`README.md` of a converted checkpoint."""
    name = report.target.name
    parts = [
        f"---\nlibrary_name: transformers\ntags: [{report.target_family}, converted]\n---\n\n# {name}\n",
        f"Converted from the {report.source_family} checkpoint `{report.source}` to {report.target_family} by "
        f"checkpoint-converter {report.tool_version}, recipe `{report.recipe}` (saved beside this file as "
        f"`recipe.yaml`). Stored in {report.dtype}.\n",
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n',
        "## What each step cost\n",
        f"Measured on: {report.text}. Exact ops keep the function up to rounding, lossy ones change it. "
        "KLs are cumulative and do not add.\n",
        markdown(damage_table(report)) + "\n",
    ]
    if report.verification is not None:
        parts += [
            "![Damage by op](figures/damage_by_op.png)\n",
            markdown(damage_by_position_table(report)) + "\n",
            "## Source against result, by position\n",
            "transformers' own class of each, in nats per token.\n",
            markdown(comparison_table(report.verification, "")) + "\n",
            "![Loss by position](figures/loss_by_position.png)\n",
            "![Drift by depth](figures/drift_by_depth.png)\n",
        ]
        if (drift := unexplained_drift(report.steps)) is not None:
            parts.append(f"{drift[0].upper()}{drift[1:]}.\n")
    if any(step.errors for step in report.steps):
        parts += ["## Errors of single layers, on calibration text\n", markdown(errors_table(report)) + "\n"]
    if report.yardstick:
        parts += [
            "## Yardstick\n",
            "The source against itself with every position shifted: how much it cares where it stands.\n",
            markdown(yardstick_table(report.yardstick)) + "\n",
        ]
    parts += ["## Cost\n", markdown(cost_table(dataclasses.replace(report, speed=None))) + "\n"]
    dropped = collapse(list(report.source_dropped) + [each for step in report.steps for each in step.dropped])
    if dropped:
        parts.append("## What is not in the result\n")
        parts += [
            f"- `{each.name}`: {each.reason}" + (f" (norm {each.norm:.4g})" if each.norm is not None else "")
            for each in dropped
        ]
        parts.append("")
    if report.rope:
        parts.append(
            f"RoPE: theta {report.rope['theta']:g}, layout `{report.rope['layout']}`; `conversion.json` holds all "
            "figures and the sha256 of the source.\n"
        )
    return "\n".join(parts)
