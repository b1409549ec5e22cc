"""A small GPT-2 walked through some ops on random text, for the tests of calibrated ops.

Its states share a large constant direction, as those of trained models do: a constant is added to the positions. A
purely random model has no such direction, and nothing could stand in for a bias there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from torch import Tensor

from converter.conversion.plan import Plan, make_plan
from converter.conversion.recipe import Recipe
from converter.conversion.walk import Findings, Walk
from converter.families.opened import SourceModel
from converter.ops import Op
from converter.ops.fold_attention_scale import FoldAttentionScale
from converter.ops.layernorm_to_rmsnorm import LayerNormToRMSNorm
from converter.ops.untie_head import UntieHead
from converter.text.windows import Windows

EXACT: tuple[Op, ...] = (FoldAttentionScale(), UntieHead(), LayerNormToRMSNorm())


@dataclass(frozen=True)
class Walked:
    """What a walk gave."""

    plan: Plan
    findings: Findings
    tensors: dict[str, Tensor]

    def kl(self, name: str) -> float:
        """KL to the source after the op of this name."""
        names = [step.op.name for step in self.plan.steps]
        return self.findings.comparisons[names.index(name)].total.kl

    def errors(self, name: str) -> dict[str, list[float]]:
        """Errors that the op of this name noted, layer by layer."""
        noted = self.findings.errors[[step.op.name for step in self.plan.steps].index(name)]
        return {each: list(values.values()) for each, values in noted.items()}


def source(folder: Path, **facts: Any) -> SourceModel:
    """A jittered GPT-2 of two layers whose states share a constant."""
    model = models.gpt2(n_layer=2, **facts)
    with torch.no_grad():
        model.transformer.wpe.weight *= 0.5
        model.transformer.wpe.weight += torch.linspace(-1.5, 1.5, model.config.n_embd)
    return SourceModel.open(models.save(model, folder))


def text(rows: int, seed: int) -> Windows:
    """Random windows, one of them short."""
    ids = models.random_ids(rows, seed=seed).numpy()
    lengths = np.full(rows, ids.shape[1], dtype=np.int64)
    lengths[-1] = ids.shape[1] // 2
    return Windows(ids * (np.arange(ids.shape[1]) < lengths[:, None]), lengths)


def walk(opened: SourceModel, *steps: Op, target: str = "llama", rows: int = 48) -> Walked:
    """Convert by these steps, calibrated and measured on random text."""
    places = tuple("test" for _ in steps)
    plan = make_plan(opened, Recipe("test", target, steps, places=places))
    walking = Walk(plan, text(rows, seed=1), text(16, seed=2))
    tensors = {name: tensor.clone() for _, named in walking for name, tensor in named.items()}
    return Walked(plan, walking.findings, tensors)
