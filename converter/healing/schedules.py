"""The base of the rotary frequencies, raised at once or over the first steps.

With a larger theta the slow pairs turn slower and far positions stay apart, which is what a longer context
needs. Between the two bases the ramp goes evenly in log(theta), and so in every log(frequency).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from converter.errors import UnsupportedError


def theta_of(model: PreTrainedModel) -> float:
    """The base that a model's config states."""
    return float(_parameters(model.config)["rope_theta"])


def set_theta(model: PreTrainedModel, theta: float) -> None:
    """Give a model another base: in its config, and in the frequencies of every rotary embedding.

    Raises UnsupportedError for a model without rotary positions.
    """
    modules = list(rotary_embeddings(model))
    if not modules:
        raise UnsupportedError(
            f"a {type(model).__name__} has no rotary positions, so there is no theta to raise",
            fix="Leave rope_theta out",
        )
    _parameters(model.config)["rope_theta"] = theta
    if hasattr(model.config, "rope_theta"):  # transformers 4
        model.config.rope_theta = theta
    for module in modules:
        fresh: Any = type(module)(config=model.config)
        for name, buffer in fresh.named_buffers():
            module.get_buffer(name).copy_(buffer)


def ramp(start: float, end: float, step: int, steps: int) -> float:
    """Theta at a step of a ramp over so many steps; the end from there on."""
    if step >= steps:
        return end
    share = (step + 1) / (steps + 1)
    return math.exp((1 - share) * math.log(start) + share * math.log(end))


def rotary_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that hold rotary frequencies."""
    return (module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), torch.Tensor))


def _parameters(config: Any) -> dict[str, Any]:
    found = getattr(config, "rope_parameters", None)
    if found is None:
        found = {"rope_theta": getattr(config, "rope_theta", 10000.0)}
    return found
