"""The losses that need logits, with no more logits in memory than a chunk of tokens has.

At a vocabulary of 50257 the logits of 64 x 1024 tokens are 13 GB in fp32, and autograd would keep several
such tensors. But these losses end here: their gradient by the logits is known in closed form, so the
gradients by states and head are computed in the forward, chunk by chunk, and nothing is kept or recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from converter.losses import IGNORE, Loss, Rows, Top


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
class Told:
    """What a teacher says about N tokens: the states (N, D') that its `head` reads, or its likeliest tokens.

    `answered` (N,) says where it has an answer; None: everywhere. Nothing but `answered` is no teacher.
    """

    states: Tensor | None = None
    head: Head | None = None
    top: Top | None = None
    answered: Tensor | None = None


class HeadLosses(NamedTuple):
    """Sums over tokens. `total` can be differentiated, once; `values` are unweighted, by name, for the log."""

    total: Tensor
    values: dict[str, Tensor]


def head_losses(
    student: Tensor,
    student_head: Head,
    targets: Tensor,
    *,
    losses: Sequence[Loss],
    told: Told | None = None,
    chunk_tokens: int | None = None,
) -> HeadLosses:
    """Sums of the losses over the tokens that have a target, and their weighted sum.

    `student` (N, D) are the states that the head reads; the teacher's head has the same vocabulary. `targets` (N,) is
    the next token of each, already shifted, or IGNORE. Matrix products are in autocast's dtype where autocast is on;
    softmax, sums and the gradient of the head are in fp32.
    """
    kernel = losses[0].kernel() if len(losses) == 1 and student.is_cuda else None
    if kernel is not None and (targets != IGNORE).any():
        value = kernel(student, *student_head, targets)
        return HeadLosses(losses[0].weight * value, {losses[0].name: value.detach()})
    given = (student, student_head.weight, student_head.bias)
    wanted = [torch.is_grad_enabled() and each is not None and each.requires_grad for each in given]
    chunk = chunk_tokens or max(1, _sizes(student).chunk // len(student_head.weight))
    found = _ChunkedHead.apply(*given, targets, told or Told(), losses, wanted, chunk)  # type: ignore[no-untyped-call]
    return HeadLosses(found[0], {loss.name: value for loss, value in zip(losses, found[1:], strict=True)})


class _ChunkedHead(torch.autograd.Function):
    """Losses by chunks of tokens, and from the same pass the gradients of their weighted sum."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        told: Told,
        losses: Sequence[Loss],
        wanted: list[bool],
        chunk: int,
    ) -> tuple[Tensor, ...]:
        """The weighted sum, then each loss."""
        kind = student.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        with torch.autocast(kind, enabled=False):
            gradients = _Gradients(student, weight, bias, wanted)
            head = _Logits(Head(weight, bias), dtype)
            teacher_head = _Logits(told.head, dtype) if told.head else None
            sums = [torch.zeros_like(gradients.zero) for _ in losses]
            # Rows without a target cost nothing, and whatever is in them does no harm.
            for rows in torch.nonzero(targets != IGNORE)[:, 0].split(chunk):
                logits = head(student[rows])
                teacher = _said(told, teacher_head, rows)
                for part in _parts(logits):
                    answered = None if told.answered is None else told.answered[rows[part]]
                    seen = Rows(logits[part], targets[rows[part]], None if teacher is None else teacher[part], answered)
                    values, gradient = _weighted(losses, seen)
                    sums = [total + value for total, value in zip(sums, values, strict=True)]
                    logits[part] = gradient
                if any(wanted):
                    gradients.add(rows, student[rows], head.weight, logits)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(*sums)
        total = sum((loss.weight * value for loss, value in zip(losses, sums, strict=True)), gradients.zero)
        return total, *sums

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


def _said(told: Told, head: _Logits | None, rows: Tensor) -> Tensor | Top | None:
    """What the teacher says about some rows: its likeliest tokens, or all logits."""
    if told.top is not None:
        return told.top[rows]
    if told.states is None:
        return None
    assert head is not None
    return head(told.states[rows])


def _weighted(losses: Sequence[Loss], rows: Rows) -> tuple[list[Tensor], Tensor]:
    """The sum of each loss over some rows, and the gradient (n, V) of their weighted sum by the logits."""
    values: list[Tensor] = []
    gradient: Tensor | None = None
    for loss in losses:
        value, by_logits = loss.value_and_gradient(rows)
        values.append(value.sum())
        if loss.weight:
            gradient = by_logits.mul_(loss.weight) if gradient is None else gradient.add_(by_logits, alpha=loss.weight)
    return values, torch.zeros_like(rows.logits) if gradient is None else gradient


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
