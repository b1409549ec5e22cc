"""Distance of a layer's states to the teacher's, for the first stage of healing."""

from __future__ import annotations

from torch import Tensor


def hidden_state_loss(student: Tensor, teacher: Tensor, mask: Tensor | None = None, *, centred: bool = False) -> Tensor:
    """The sum over tokens of |x - y|^2 / |y|^2, in fp32: a layer counts the same however large its states are.

    `student` and `teacher` are (..., D); `mask` (...) says which tokens count. With `centred` y is taken
    without its mean, which no LayerNorm reads, and which a conversion to RMSNorm has removed.
    """
    student, teacher = student.float(), teacher.float()
    if centred:
        teacher = teacher - teacher.mean(-1, keepdim=True)
    error = (student - teacher).square().sum(-1) / teacher.square().sum(-1).clamp(min=1e-12)
    # Not a product: what is masked may be anything, and 0 times infinity is NaN.
    return error.sum() if mask is None else error.masked_fill(~mask, 0.0).sum()
