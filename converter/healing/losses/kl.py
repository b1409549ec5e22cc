"""Kullback-Leibler divergence between the distributions of a teacher (p) and a student (q)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Direction = Literal["forward", "reverse"]


@dataclass(frozen=True, eq=False)
class Top:
    """The k likeliest tokens of a teacher at the temperature of the loss: ids and log p, (N, k) each.

    No NamedTuple: FSDP goes into those, and would round log p to the dtype of the parameters.
    """

    ids: Tensor
    log_p: Tensor

    def __getitem__(self, chosen: Tensor | slice) -> Top:
        """Those of some tokens."""
        return Top(self.ids[chosen], self.log_p[chosen])


def filled(top: Top, log_q: Tensor) -> Tensor:
    """log p (n, V) of all tokens from that of the k likeliest: the others share the rest as the student's do.

    KL and gradient are then those between two distributions of k + 1 outcomes, the last one being "another token".
    That is at most the KL over all tokens (the rest taken together tells less).
    """
    rest_q = log_q.scatter(-1, top.ids, -float("inf")).logsumexp(-1, keepdim=True)
    rest_p = (1 - top.log_p.exp().sum(-1, keepdim=True)).clamp_min(1e-9).log()
    return (log_q + (rest_p - rest_q)).scatter(-1, top.ids, top.log_p.to(log_q.dtype))


def kl_divergence(log_q: Tensor, log_p: Tensor, direction: Direction) -> tuple[Tensor, Tensor]:
    """KL of each row, and its gradient by the student's logits z, where log_q = log_softmax(z); (n, V) each.

    forward, KL(p || q) = sum p (log p - log q), has the gradient q - p: the student covers all that the
    teacher says. reverse, KL(q || p) = sum q (log q - log p), has q (log q - log p - KL): it keeps to what
    the teacher finds likely. With distributions at a temperature t, z is logits / t (Hinton et al. 2015).
    """
    q = log_q.exp()
    if direction == "forward":
        p = log_p.exp()
        return (p * (log_p - log_q)).sum(-1), q.sub_(p)
    ratio = log_q - log_p
    kl = (q * ratio).sum(-1)
    return kl, q.mul_(ratio.sub_(kl[:, None]))
