"""The losses that need logits, with no more logits in memory than a chunk of tokens has.

At a vocabulary of 50257 the logits of 64 x 1024 tokens are 13 GB in fp32, and autograd would keep several
such tensors. But these losses end here: their gradient by the logits is known in closed form, so the
gradients by states and head are computed in the forward, chunk by chunk, and nothing is kept or recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from converter.healing.batches import IGNORE
from converter.healing.losses import liger
from converter.healing.losses.cross_entropy import cross_entropy
from converter.healing.losses.kl import Direction, Top, filled, kl_divergence


class _Sizes(NamedTuple):
    """Logits of a chunk: enough rows for fast matrix products; and how many go from softmax to gradient at once."""

    chunk: int
    part: int


#: A chunk of 128 to 512 rows of 50257 takes the same time, one of 64 a fifth more. A part stays in the cache.
_ON_CPU = _Sizes(1 << 24, 1 << 19)
_ELSEWHERE = _Sizes(1 << 25, 1 << 22)


class Head(NamedTuple):
    """An output head: weight (V, D), and bias (V,) where it has one."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class LossWeights:
    """How the losses mix. What has weight 0 is not learnt from.

    The KL is between distributions at `temperature`, and multiplied by its square, so that its gradient
    keeps its size (Hinton et al. 2015). `forward` is KL(teacher || student).
    """

    kl: float = 1.0
    ce: float = 0.0
    temperature: float = 1.0
    direction: Direction = "forward"


class HeadLosses(NamedTuple):
    """Sums over tokens. `total` can be differentiated, once; `kl` and `ce` are unweighted, for the log."""

    total: Tensor
    kl: Tensor
    ce: Tensor


def head_losses(
    student: Tensor,
    student_head: Head,
    targets: Tensor,
    *,
    weights: LossWeights,
    teacher: Tensor | None = None,
    teacher_head: Head | None = None,
    teacher_top: Top | None = None,
    kl_mask: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> HeadLosses:
    """Sums of KL and cross-entropy over the tokens that have a target, and their weighted sum.

    `student` (N, D) and `teacher` (N, D') are the states that the heads read; both heads have the same
    vocabulary. `teacher_top` stands for the teacher's where its likeliest tokens are all that is known. `targets` (N,)
    is the next token of each, already shifted, or IGNORE. `kl_mask` (N,) says where the teacher has an answer; without
    a teacher the KL is 0. Matrix products are in autocast's dtype where autocast is on; softmax, sums and the gradient
    of the head are in fp32.
    """
    fused = liger.kernel() if student.is_cuda and teacher is None and teacher_top is None else None
    if fused is not None and (targets != IGNORE).any():
        ce = liger.cross_entropy_sum(fused, student, *student_head, targets)
        return HeadLosses(weights.ce * ce, torch.zeros_like(ce), ce.detach())
    given = (student, student_head.weight, student_head.bias)
    wanted = [torch.is_grad_enabled() and each is not None and each.requires_grad for each in given]
    known = teacher_top is not None or (teacher is not None and teacher_head is not None)
    answers = _Answers(teacher, teacher_head, teacher_top, kl_mask) if known else None
    chunk = chunk_tokens or max(1, _sizes(student).chunk // len(student_head.weight))
    return HeadLosses(*_ChunkedHead.apply(*given, targets, answers, weights, wanted, chunk))  # type: ignore[no-untyped-call]


class _Answers(NamedTuple):
    """The teacher's states and its head, or its likeliest tokens, and where it has an answer."""

    states: Tensor | None
    head: Head | None
    top: Top | None
    mask: Tensor | None


class _ChunkedHead(torch.autograd.Function):
    """Losses by chunks of tokens, and from the same pass the gradients of their weighted sum."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        answers: _Answers | None,
        weights: LossWeights,
        wanted: list[bool],
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(total, kl, ce)."""
        kind = student.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        with torch.autocast(kind, enabled=False):
            gradients = _Gradients(student, weight, bias, wanted)
            head = _Logits(Head(weight, bias), dtype)
            teacher_head = _Logits(answers.head, dtype) if answers and answers.head else None
            kl = ce = gradients.zero
            # Rows without a target cost nothing, and whatever is in them does no harm.
            for rows in torch.nonzero(targets != IGNORE)[:, 0].split(chunk):
                logits = head(student[rows])
                theirs = _told(answers, teacher_head, rows)
                for part in _parts(logits):
                    losses = _losses(
                        logits[part],
                        targets[rows[part]],
                        None if theirs is None else theirs[part],
                        None if answers is None or answers.mask is None else answers.mask[rows[part]],
                        weights,
                    )
                    kl, ce = kl + losses[0], ce + losses[1]
                    logits[part] = losses[2]
                if any(wanted):
                    gradients.add(rows, student[rows], head.weight, logits)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(kl, ce)
        return weights.kl * kl + weights.ce * ce, kl, ce

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients times that of total, in place."""
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the losses of a head can be differentiated once: their gradients are not kept")
        return (*gradients.times(by_total), None, None, None, None, None)


class _Logits:
    """A head in a working dtype, with a buffer that every chunk's logits are written to."""

    def __init__(self, head: Head, dtype: torch.dtype) -> None:
        self.weight = head.weight.to(dtype)
        self._bias = None if head.bias is None else head.bias.to(dtype)
        self._buffer: Tensor | None = None

    def __call__(self, states: Tensor) -> Tensor:
        """Logits (n, V) of states (n, D), in fp32 or more, good until the next call."""
        states = states.to(self.weight.dtype)
        if self._buffer is None:  # the first chunk is the longest
            self._buffer = states.new_empty(len(states), len(self.weight))
        logits = self._buffer[: len(states)]
        if self._bias is None:
            torch.mm(states, self.weight.t(), out=logits)
        else:
            torch.addmm(self._bias, states, self.weight.t(), out=logits)
        return logits.to(_exact(logits.dtype))


class _Gradients:
    """Sums of the gradients by states, head and its bias, of those that are wanted, in fp32 or more."""

    def __init__(self, student: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]) -> None:
        self._like = (student, weight, bias)
        dtype = _exact(weight.dtype)
        self._student, self._weight, self._bias = (
            torch.zeros_like(each, dtype=dtype) if each is not None and want else None
            for each, want in zip(self._like, wanted, strict=True)
        )
        self.zero = torch.zeros((), dtype=dtype, device=student.device)

    def add(self, rows: Tensor, states: Tensor, weight: Tensor, by_logits: Tensor) -> None:
        """What the gradient (n, V) by the logits of some rows adds."""
        if self._bias is not None:
            self._bias += by_logits.sum(0)
        by_logits, states = by_logits.to(weight.dtype), states.to(weight.dtype)
        if self._student is not None:
            self._student[rows] = (by_logits @ weight).to(self._student.dtype)
        if self._weight is not None and self._weight.dtype == weight.dtype:
            self._weight.addmm_(by_logits.t(), states)
        elif self._weight is not None:
            self._weight += by_logits.t() @ states

    def times(self, factor: Tensor) -> list[Tensor | None]:
        """Each gradient times a factor, in the dtype of what it belongs to."""
        pairs = zip((self._student, self._weight, self._bias), self._like, strict=True)
        return [None if sums is None or like is None else sums.mul_(factor).to(like.dtype) for sums, like in pairs]


def _told(answers: _Answers | None, head: _Logits | None, rows: Tensor) -> Tensor | Top | None:
    """What the teacher says about some rows: its likeliest tokens, or all logits."""
    if answers is None:
        return None
    if answers.top is not None:
        return answers.top[rows]
    assert answers.states is not None
    assert head is not None
    return head(answers.states[rows])


def _losses(
    logits: Tensor, targets: Tensor, teacher: Tensor | Top | None, answered: Tensor | None, weights: LossWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of KL and cross-entropy over some rows, and the gradient (n, V) of their weighted sum by the logits.

    `teacher` has its logits (n, V), or its likeliest tokens.
    """
    t = weights.temperature
    log_q = logits.log_softmax(-1)
    ce, gradient = cross_entropy(log_q, targets)
    gradient *= weights.ce
    if teacher is None:
        return torch.zeros_like(ce).sum(), ce.sum(), gradient
    if t != 1.0:
        log_q = (logits / t).log_softmax(-1)
        teacher = teacher if isinstance(teacher, Top) else teacher / t
    log_p = filled(teacher, log_q) if isinstance(teacher, Top) else teacher.log_softmax(-1)
    kl, kl_gradient = kl_divergence(log_q, log_p, weights.direction)
    if answered is not None:
        kl = kl.masked_fill(~answered, 0.0)
        kl_gradient.masked_fill_(~answered[:, None], 0.0)
    gradient.add_(kl_gradient, alpha=weights.kl * t)  # t^2 in front of the loss, 1/t in front of the logits
    return t * t * kl.sum(), ce.sum(), gradient


def _parts(logits: Tensor) -> Iterator[slice]:
    """Rows to take at once."""
    count, vocab = logits.shape
    size = max(1, _sizes(logits).part // vocab)
    for start in range(0, count, size):
        yield slice(start, start + size)


def _sizes(tensor: Tensor) -> _Sizes:
    return _ON_CPU if tensor.device.type == "cpu" else _ELSEWHERE


def _exact(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax and of sums: fp32, or fp64 where the head is in fp64."""
    return torch.promote_types(dtype, torch.float32)
