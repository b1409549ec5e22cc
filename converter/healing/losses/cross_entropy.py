"""Cross-entropy with the text."""

from __future__ import annotations

from torch import Tensor


def cross_entropy(log_q: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """-log q of each target, and its gradient by the logits: q - 1[target].

    `log_q` (n, V) are the log-probabilities of logits, `targets` (n,) ids.
    """
    chosen = targets[:, None]
    gradient = log_q.exp()
    gradient.scatter_add_(1, chosen, gradient.new_full(chosen.shape, -1.0))
    return -log_q.gather(1, chosen)[:, 0], gradient
