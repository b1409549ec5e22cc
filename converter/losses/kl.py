"""Kullback-Leibler divergence between the distributions of a teacher (p) and a student (q)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from converter.losses import Loss, Rows, loss


@loss
@dataclass(frozen=True)
class KL(Loss):
    """The KL of each token to the teacher.

    forward, KL(p || q) = sum p (log p - log q), has the gradient q - p by z, where log q = log_softmax(z): the student
    covers all that the teacher says. reverse, KL(q || p) = sum q (log q - log p), has q (log q - log p - KL): it keeps
    to what the teacher finds likely.
    """

    weight: float = 1.0
    #: Both distributions are softened by it: z is logits / temperature. The KL is multiplied by its square, so that its
    #: gradient keeps its size (Hinton et al. 2015).
    temperature: float = 1.0
    direction: Literal["forward", "reverse"] = "forward"

    name: ClassVar[str] = "kl"
    label: ClassVar[str] = "KL to {source}"
    asks_teacher: ClassVar[bool] = True
    watched: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError("temperature must be more than 0")

    def against_recorded(self) -> str | None:
        if self.temperature == 1.0:
            return None
        return "temperature must be 1 with a recorded teacher: what is left beside top_k is known at 1 only"

    def value_and_gradient(self, rows: Rows) -> tuple[Tensor, Tensor]:
        t = self.temperature
        log_q, log_p = rows.log_q(t), rows.log_p(t)
        q = log_q.exp()
        if self.direction == "forward":
            p = log_p.exp()
            kl, gradient = (p * (log_p - log_q)).sum(-1), q.sub_(p)
        else:
            ratio = log_q - log_p
            kl = (q * ratio).sum(-1)
            gradient = q.mul_(ratio.sub_(kl[:, None]))
        if rows.answered is not None:
            kl = kl.masked_fill(~rows.answered, 0.0)
            gradient.masked_fill_(~rows.answered[:, None], 0.0)
        return t * t * kl, gradient if t == 1.0 else gradient.mul_(t)  # t^2 in front of the KL, 1/t in z
