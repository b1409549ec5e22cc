"""Cross-entropy with the text, by Liger's fused kernel on CUDA, where the package `liger-kernel` is installed.

Liger's mean, which every version has, is made a sum here. Its kernels give either a KL or a cross-entropy, and a run
with a teacher watches both, so they serve runs without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, ClassVar

from torch import Tensor

from converter.losses import IGNORE, Loss, Rows, loss


@loss
@dataclass(frozen=True)
class CrossEntropy(Loss):
    """-log q of the target, whose gradient by the logits is q - 1[target]."""

    name: ClassVar[str] = "ce"
    label: ClassVar[str] = "cross-entropy"
    watched: ClassVar[bool] = True

    def value_and_gradient(self, rows: Rows) -> tuple[Tensor, Tensor]:
        log_q, chosen = rows.log_q(), rows.targets[:, None]
        gradient = log_q.exp()
        gradient.scatter_add_(1, chosen, gradient.new_full(chosen.shape, -1.0))
        return -log_q.gather(1, chosen)[:, 0], gradient

    def kernel(self) -> Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor] | None:
        fused = liger_kernel()
        return None if fused is None else partial(liger_sum, fused)


@cache
def liger_kernel() -> Any | None:
    """Liger's loss of states and head, or None where the package is not installed."""
    if find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE)


def liger_sum(fused: Any, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """The sum over the tokens that have a target, of which there must be one: Liger divides by their number."""
    mean: Tensor = fused(weight, states, targets, bias)
    return mean * (targets != IGNORE).sum()
