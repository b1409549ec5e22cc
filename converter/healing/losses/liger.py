"""Cross-entropy by Liger's fused kernels, on CUDA, where the package `liger-kernel` is installed.

Its kernels give either a KL or a cross-entropy, and healing watches both, so they serve runs without a
teacher. Liger's mean, which every version has, is made a sum here.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from converter.healing.batches import IGNORE


@cache
def kernel() -> Any | None:
    """Liger's loss of states and head, or None where the package is not installed."""
    if find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE)


def cross_entropy_sum(fused: Any, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """The sum over the tokens that have a target, of which there must be one: Liger divides by their number."""
    mean: Tensor = fused(weight, states, targets, bias)
    return mean * (targets != IGNORE).sum()
