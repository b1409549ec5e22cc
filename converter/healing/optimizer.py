"""AdamW with rates by role, and the schedule of the rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from converter.conversion.settings import HealSettings

#: Loss curves of fine-tuning are steep at first: a shorter memory of squared gradients than 0.999 follows them.
_BETAS = (0.9, 0.95)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer of every run; fused, which is one kernel on a GPU and the fastest on a CPU too."""
    return torch.optim.AdamW(groups, lr=0.0, betas=_BETAS, fused=True)


def parameter_groups(
    module: nn.Module, roles: Mapping[str, Iterable[str]], settings: HealSettings
) -> list[dict[str, Any]]:
    """The parameters of a module in groups, each with its `scale` of the rate and its weight decay.

    `roles` tells what a parameter is, by the end of its name: "layers.0.q.weight", several for a fused one. Norms
    and biases never decay. q and k, norms, and MLPs have rates of their own where all of a tensor is of that kind.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            scale = _scale(_roles_of(name, roles), settings)
            decay = settings.weight_decay if parameter.ndim > 1 else 0.0
            groups.setdefault((scale, decay), []).append(parameter)
    return [
        {"params": parameters, "scale": scale, "weight_decay": decay} for (scale, decay), parameters in groups.items()
    ]


def _roles_of(name: str, roles: Mapping[str, Iterable[str]]) -> set[str]:
    """The parts of a layer that a parameter holds: {"q", "k", "v"} of GPT-2's `c_attn`."""
    found = next((known for tensor, known in roles.items() if name == tensor or name.endswith(f".{tensor}")), ())
    return {role.split(".")[-2] for role in found}


def _scale(parts: set[str], settings: HealSettings) -> float:
    if not parts:
        return 1.0
    if all(part.endswith("norm") for part in parts):
        return settings.rate_norms
    if parts <= {"q", "k"}:
        return settings.rate_q_k
    return settings.rate_mlp if parts <= {"gate", "up", "down"} else 1.0


def rate_at(step: int, steps: int, settings: HealSettings) -> float:
    """The learning rate of a step: a linear rise, then a fall along a cosine, or as 1 - sqrt of what is done.

    1-sqrt is the cooldown of Hägele et al. 2024 ("Scaling Laws and Compute-Optimal Training Beyond Fixed Training
    Durations", section 4).
    """
    rise = round(settings.warmup * steps)
    if step < rise:
        return settings.rate * (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    left = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - math.sqrt(done)
    return settings.rate * (settings.final_rate + (1 - settings.final_rate) * left)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give each group its share of a rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]
