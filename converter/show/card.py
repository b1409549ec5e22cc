"""The model card: `README.md` of a result."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from converter.show.tables import (
    collapse,
    comparison_table,
    cost_table,
    damage_by_position_table,
    damage_table,
    ends_tables,
    errors_table,
    markdown,
    result_table,
    yardstick_table,
)

if TYPE_CHECKING:
    from converter.conversion.report import ConversionReport
    from converter.healing.report import HealReport


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
        f"{_measured(report)} Exact ops keep the function up to rounding, lossy ones change it. "
        "KLs are cumulative and do not add.\n",
        markdown(damage_table(report)) + "\n",
    ]
    if report.verification is not None:
        parts += [
            "![Damage by op](figures/damage_by_op.png)\n",
            markdown(damage_by_position_table(report)) + "\n",
            "## Source against result, by position\n",
            f"{report.verified_by}, in nats per token.\n",
            markdown(comparison_table(report.verification, "")) + "\n",
            *(markdown(each) + "\n" for each in ends_tables(("result", report.verification))),
            "![Loss by position](figures/loss_by_position.png)\n",
            "![Drift by depth](figures/drift_by_depth.png)\n",
        ]
        if (drift := report.unexplained_drift) is not None:
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


def _measured(report: ConversionReport) -> str:
    """What the figures were measured on, in a sentence."""
    return f"Measured on: {report.text}." if report.verification is not None else "Nothing was measured on text."


def card_section(report: HealReport) -> str:
    """The model card's section about healing."""
    settings = report.settings
    parts = [
        "\n## Healing\n",
        f"After the conversion the model was fine-tuned on {report.tokens:,} tokens by checkpoint-converter "
        f"{report.tool_version}: {report.objective}, rate {settings['rate']:g}. The figures above are those before it. "
        f"Measured on: {report.text}.\n",
        markdown(result_table(report)) + "\n",
        "![Healing](figures/healing.png)\n",
    ]
    if report.after is not None:
        parts += ["### The healed model by position\n", markdown(comparison_table(report.after, "")) + "\n"]
        ends = ends_tables(("converted", report.before), ("healed", report.after))
        parts += [markdown(each) + "\n" for each in ends]
    parts.append("`healing.json` holds all settings and figures, `metrics.jsonl` every step.\n")
    return "\n".join(parts)
