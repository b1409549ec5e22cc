"""Tables for the terminal, which `card` writes as Markdown, too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import rich.table
from rich.text import Text

from converter.blocks import LINEARS, Dropped
from converter.show.progress import printable

if TYPE_CHECKING:  # `inspect` prints its tables without torch
    from converter.conversion.memory import Memory
    from converter.conversion.plan import Plan
    from converter.conversion.report import ConversionReport
    from converter.healing.report import HealReport
    from converter.measure.evaluate import Evaluation
    from converter.measure.inspect import Inspection
    from converter.measure.metrics import Comparison, EndOfText, Figures
    from converter.measure.yardstick import Shifted


class Table(rich.table.Table):
    """A table that shows the texts of users' files as they are."""

    def __init__(self, title: str, show_header: bool = True) -> None:
        super().__init__(title=printable(title), title_justify="left", show_header=show_header)

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(printable(cell) if isinstance(cell, str) else cell for cell in cells), **options)


#: Reasons against a conversion that are shown at most.
_STOPS = 3


def damage_table(report: ConversionReport) -> Table:
    """Cumulative damage by op."""
    first = next((step.comparison.total for step in report.steps if step.comparison), None)
    measured = ", cumulative, nats per token on held-out text" if first is not None else ": nothing was measured"
    table = Table(title=f"Damage by op{measured}")
    for heading in ("after op", "kind"):
        table.add_column(heading)
    for heading in ("KL to source", "loss", "against source", "top-1 agreement") if first is not None else ():
        table.add_column(heading, justify="right")
    if first is not None:
        table.add_row("source", "", "", f"{first.source_loss:.4f}", "", "")
    for step in report.steps:
        kind = ("exact" if step.exact else "lossy") if step.needed else "not needed"
        figures = _figure_cells(step.comparison.total) if step.comparison else []
        table.add_row(step_title(step.name, step.parameters), kind, *figures)
    return table


def step_title(name: str, parameters: Mapping[str, Any]) -> str:
    """The op with its parameters."""
    inner = ", ".join(f"{key}={value}" for key, value in parameters.items())
    return f"{name}({inner})" if inner else name


def _figure_cells(figures: Figures) -> list[str]:
    return [
        f"{max(figures.kl, 0.0):.2e}" if figures.kl < 1e-3 else f"{figures.kl:.4f}",
        f"{figures.loss:.4f}",
        f"{figures.loss_increase:+.4f}",
        f"{figures.agreement:.2%}",
    ]


def comparison_table(comparison: Comparison, title: str) -> Table:
    """A comparison by position bucket."""
    table = Table(title=title)
    for heading in ("positions", "tokens", "KL to source", "loss", "against source", "top-1 agreement"):
        table.add_column(heading, justify="right")
    for figures in (*comparison.buckets, comparison.total):
        span = str(figures.first) if figures.first == figures.last else f"{figures.first}-{figures.last}"
        if figures is comparison.total:
            table.add_section()
            span = "all"
        table.add_row(span, f"{figures.tokens:,}", *_figure_cells(figures))
    return table


def end_of_text_table(rows: Sequence[tuple[str, float, float]], ends: EndOfText) -> Table:
    """What models say of the end-of-text token: name, mean probability at the ends, how often likeliest elsewhere."""
    table = Table(title=f"End of text, at {_times(ends.ends, 'end')} and {ends.places:,} places where text goes on")
    for heading in ("model", "P(end) where text ends", "likeliest where it goes on"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, probability, early in rows:
        table.add_row(name, f"{probability:.4f}" if ends.ends else "", f"{early:.3%}")
    return table


def ends_tables(*named: tuple[str, Comparison | None], source: str = "source") -> list[Table]:
    """The end of text for the source and what was compared with it, in one table; none for models without its token."""
    found = [(name, each.end_of_text) for name, each in named if each is not None and each.end_of_text is not None]
    if not found:
        return []
    first = found[0][1]
    rows = [(source, first.source_probability, first.source_early)]
    return [end_of_text_table([*rows, *((name, each.probability, each.early) for name, each in found)], first)]


def _times(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def cost_table(report: ConversionReport) -> Table:
    """Source beside result: size and speed."""
    table = Table(title="Cost")
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
    """Relative errors that the ops noted, a row a layer, and one for embeddings and head where there is something."""
    columns = [(f"{step.name}, {name}", values) for step in report.steps for name, values in step.errors.items()]
    table = Table(title="Relative errors of single layers, on calibration text")
    table.add_column("layer", justify="right")
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    noted = {block for _, values in columns for block in values}
    layers = sorted(noted - {"embeddings", "head"}, key=lambda block: int(block.removeprefix("layers.")))
    for block in (*(noted & {"embeddings"}), *layers, *(noted & {"head"})):
        cells = (_cell(values.get(block), ".2%") for _, values in columns)
        table.add_row(block.removeprefix("layers."), *cells)
    return table


def yardstick_table(rows: Sequence[Shifted]) -> Table:
    """The source with shifted positions against itself."""
    table = Table(title="Yardstick: the source with shifted positions against itself")
    for heading in ("shift", "position 0", "KL", "loss"):
        table.add_column(heading, justify="right" if heading != "position 0" else "left")
    for row in rows:
        kept = "kept" if row.first_kept else "moved"
        table.add_row(str(row.shift), kept, f"{row.figures.kl:.4f}", f"{row.figures.loss_increase:+.4f}")
    return table


def damage_by_position_table(report: ConversionReport) -> Table:
    """KL to the source after each op that changes something, by position bucket."""
    steps = [step for step in report.steps if step.comparison is not None and step.needed and not step.exact]
    table = Table(title="KL to the source by position, cumulative")
    table.add_column("positions", justify="right")
    for step in steps:
        table.add_column(step.name, justify="right")
    comparisons = [step.comparison for step in steps if step.comparison is not None]
    for place, first in enumerate(comparisons[0].buckets if comparisons else ()):
        span = str(first.first) if first.first == first.last else f"{first.first}-{first.last}"
        table.add_row(span, *(_figure_cells(each.buckets[place])[0] for each in comparisons))
    return table


def inspection_table(found: Inspection) -> Table:
    """The facts of a checkpoint and what stops its conversion, two columns."""
    table = Table(title=str(found.path), show_header=False)
    rows = {"family": found.family or "not one that we know"}
    rows |= {key: str(value) for key, value in found.config_facts.items()} if found.spec is None else _spec_rows(found)
    rows |= {
        "stored as": ", ".join(f"{dtype} ({count} tensors)" for dtype, count in found.dtypes.items()) or "no tensors",
        "parameters": f"{found.parameters:,}",
        "bytes": f"{found.bytes:,}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for each in found.warnings:
        table.add_row(Text("note", style="yellow"), each)
    for number, each in enumerate(found.stops[:_STOPS]):
        more = len(found.stops) - _STOPS if number == _STOPS - 1 else 0
        also = f" {more} more faults: `converter check` lists them." if more > 0 else ""
        table.add_row(Text("does not convert", style="red"), each + also)
    return table


def _spec_rows(found: Inspection) -> dict[str, str]:
    spec = found.spec
    assert spec is not None
    heads = f"{spec.num_heads} heads of {spec.head_dim}"
    if spec.num_kv_heads != spec.num_heads:
        heads += f", {spec.num_kv_heads} key-value heads"
    positions = spec.positions.value
    if spec.rope is not None:
        positions = f"RoPE, theta {spec.rope.theta:g}, {spec.rope.layout.value}"
        positions += f", scaling {dict(spec.rope.scaling)}" if spec.rope.scaling else ""
    mlp = f"{'gated' if spec.gated_mlp else 'plain'}, {spec.activation.value}, width {spec.intermediate_size}"
    return {
        "layers": str(spec.num_layers),
        "hidden size": str(spec.hidden_size),
        "attention": heads,
        "MLP": f"{mlp} ({found.mlp_ratio:.2f} x hidden)",
        "norm": f"{spec.norm.value}, {'pre' if spec.pre_norm else 'post'}, eps {spec.norm_eps:g}",
        "positions": positions,
        "context": str(spec.context),
        "vocabulary": f"{spec.vocab_size}, head {'tied to the embeddings' if spec.tied_head else 'of its own'}",
        "biases": ", ".join(part for part in LINEARS if part in spec.biases) or "none",
    }


def mapping_table(found: Inspection) -> Table:
    """Which tensor becomes which role."""
    table = Table(title="Tensors and their roles")
    for heading in ("tensor", "shape", "becomes", "how"):
        table.add_column(heading, overflow="fold")
    for row in found.mapping:
        table.add_row(row.tensor, "x".join(map(str, row.shape)), row.roles, row.how)
    for each in found.dropped:
        table.add_row(each.name, "", Text("dropped", style="dim"), each.reason)
    return table


def plan_tables(plan: Plan, memory: Memory) -> list[Table]:
    """A dry run: the steps, the three accounts, and what it takes."""
    steps = Table(title="Plan")
    for heading in ("op", "kind"):
        steps.add_column(heading)
    for step in plan.steps:
        kind = ("exact" if step.exact else "lossy") if step.needed else "not needed"
        parameters = dict(vars(step.op))
        steps.add_row(
            step_title(step.op.name, parameters), kind + (", calibrated" if step.op.calibrated and step.needed else "")
        )
    accounts = Table(title="Accounts")
    for heading in ("account", "what", "why"):
        accounts.add_column(heading, overflow="fold")
    accounts.add_row("used", f"{len(plan.source.used)} tensors", "")
    for dropped in collapse(plan.source.dropped + list(plan.dropped)):
        accounts.add_row("dropped", dropped.name, dropped.reason)
    ignored = {key: why for key, why in plan.source.config_accounts.items() if why != "read"}
    for key, why in ignored.items():
        accounts.add_row("ignored", f"config.{key}", why)
    result = Table(title="Result", show_header=False)
    result.add_row("family", plan.target.name)
    result.add_row("tensors", f"{len(plan.tensors)}")
    result.add_row("parameters", f"{plan.parameters:,}")
    result.add_row("dtype", plan.dtype)
    result.add_row("bytes", f"{plan.output_bytes:,}")
    result.add_row("peak memory at most", f"{memory.peak:,} bytes")
    result.add_row("  weights of a block", f"{memory.weights:,} bytes")
    result.add_row("  activations of the text", f"{memory.streams:,} bytes")
    result.add_row("  activations in temporary files", f"{memory.stream_files:,} bytes of disk")
    result.add_row("  verification", f"{memory.verification:,} bytes; block by block where less is free")
    shapes = Table(title="Tensors of the result")
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


def conversion_tables(report: ConversionReport) -> list[Any]:
    """What the terminal shows after a conversion."""
    shown: list[Any] = [damage_table(report)]
    if report.verification is not None:
        title = f"Source against the written files, by {report.verified_by}, nats per token"
        shown += [comparison_table(report.verification, title), *ends_tables(("result", report.verification))]
        if report.yardstick:
            shown.append(yardstick_table(report.yardstick))
        shown.append(cost_table(report))
        if (drift := report.unexplained_drift) is not None:
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
    columns = [[str(cell).replace("|", r"\|") for cell in column.cells] for column in table.columns]
    headings = [str(column.header) for column in table.columns]
    rules = ["---:" if column.justify == "right" else "---" for column in table.columns]
    rows = [headings, rules, *map(list, zip(*columns, strict=True))]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def evaluations_table(report: HealReport) -> Table:
    """Held-out figures as the run went on."""
    table = Table(title="Healing, nats per token on held-out text")
    for heading in ("step", *report.labels.values()):
        table.add_column(heading.replace(" the ", " "), justify="right")
    for each in report.evaluations:
        figures = (_kl(each.losses.get(name)) for name in report.labels)
        table.add_row(f"{each.step}{' (kept)' if each == report.best else ''}", *figures)
    return table


def result_table(report: HealReport) -> Table:
    """All models side by side: the source, the converted and the healed one, and the controls."""
    tokens = f"{report.tokens / 1e6:.3g} M tokens"
    table = Table(title=f"After {tokens}, nats per token on held-out text")
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


def _kl(kl: float | None) -> str:
    return "" if kl is None else f"{kl:.4f}"


def heal_tables(report: HealReport) -> list[Any]:
    """What the terminal shows after a run."""
    shown: list[Any] = [evaluations_table(report), result_table(report)]
    if report.after is not None:
        shown.append(comparison_table(report.after, "The healed model by position"))
        shown += ends_tables(("converted", report.before), ("healed", report.after))
    if report.skipped:
        shown.append(f"{report.skipped} steps were skipped, since their gradients were not finite.")
    shown.append(f"Measured on: {report.text}.")
    return shown


def evaluation_tables(evaluations: Sequence[Evaluation]) -> list[Table]:
    """A row for each model and context length; and loss by position, a table for each context length."""
    total = Table(title="Held-out loss, nats per token")
    for heading in ("model", "context", "tokens", "loss", "perplexity", "bits per byte", "KL to first", "agreement"):
        total.add_column(heading, justify="left" if heading == "model" else "right", overflow="fold")
    for evaluation in evaluations:
        for at in evaluation.results:
            figures = (_cell(at.bits_per_byte, ".4f"), _cell(at.kl, ".5f"), _cell(at.agreement, ".2%"))
            total.add_row(
                evaluation.path, str(at.context), f"{at.tokens:,}", f"{at.loss:.4f}", f"{at.perplexity:.3f}", *figures
            )
    contexts = sorted({at.context for evaluation in evaluations for at in evaluation.results})
    ends = [
        (f"{evaluation.path} at {at.context}", at.end_of_text)
        for evaluation in evaluations
        for at in evaluation.results
        if at.end_of_text is not None
    ]
    if ends:
        rows = [(name, each.probability, each.early) for name, each in ends]
        return [total, end_of_text_table(rows, ends[0][1]), *(_position_table(evaluations, each) for each in contexts)]
    return [total, *(_position_table(evaluations, context) for context in contexts)]


def _position_table(evaluations: Sequence[Evaluation], context: int) -> Table:
    table = Table(title=f"Loss by position in a window of {context}")
    table.add_column("positions", justify="right")
    columns = []
    for evaluation in evaluations:
        for at in evaluation.results:
            if at.context == context:
                table.add_column(printable(evaluation.path), justify="right", overflow="fold")
                columns.append({figures.first: figures for figures in at.buckets})
    spans = {first: figures.last for column in columns for first, figures in column.items()}
    for first in sorted(spans):
        losses = (_cell(column[first].loss if first in column else None, ".4f") for column in columns)
        table.add_row(str(first) if first == spans[first] else f"{first}-{spans[first]}", *losses)
    return table


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
