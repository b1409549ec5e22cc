"""Kullback-Leibler divergence between the distributions of a teacher (p) and a student (q)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Direction = Literal["forward", "reverse"]


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
