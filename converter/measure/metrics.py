"""Figures in nats per token: KL, loss and top-1 agreement of one model's logits against another's, by position.

KL(A || B) is summed over the vocabulary and averaged over tokens, with softmaxes in fp64: near 1e-9 fp32
alone shows differences between equal logits. `F.kl_div(reduction="mean")` divides by the vocabulary
and is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from converter.errors import ConverterError
from converter.text.windows import Windows

#: First positions of the buckets that figures are split by.
_BUCKET_STARTS = (0, 1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192)


#: Logits of one model whose fp64 distributions are held at once: 4 MB, which stays in a processor's cache.
_CACHED = 1 << 19


@dataclass(frozen=True)
class Figures:
    """Nats per token over `tokens` predictions at the positions `first` to `last`."""

    first: int
    last: int
    tokens: int
    kl: float
    source_loss: float
    loss: float
    agreement: float

    @property
    def loss_increase(self) -> float:
        """Loss above the source's."""
        return self.loss - self.source_loss


@dataclass(frozen=True)
class EndOfText:
    """The end-of-text token: where it is the next one, `ends` times, and in the other `places`, where text goes on.

    Its mean probability and its loss in nats at the ends, and the share of the other places where it is the likeliest
    token; 0 where there are no such places.
    """

    ends: int
    source_probability: float
    probability: float
    source_loss: float
    loss: float
    places: int
    source_early: float
    early: float


@dataclass(frozen=True)
class Comparison:
    """How far model B is from model A (the source)."""

    total: Figures
    buckets: tuple[Figures, ...]
    #: Largest difference of two logits, and the largest logit of A.
    max_difference: float
    max_logit: float
    #: None for a model without such a token.
    end_of_text: EndOfText | None = None

    @property
    def relative_difference(self) -> float:
        """Largest logit difference over the largest logit."""
        return self.max_difference / max(self.max_logit, 1e-300)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"relative_difference": self.relative_difference}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Comparison:
        """The inverse of `to_dict`."""
        buckets = tuple(Figures(**each) for each in saved["buckets"])
        end = EndOfText(**saved["end_of_text"]) if saved.get("end_of_text") else None
        return cls(Figures(**saved["total"]), buckets, saved["max_difference"], saved["max_logit"], end)


class Tally:
    """Adds up a comparison, position by position; and what is said of the token `end_of_text`, if there is one."""

    def __init__(self, context: int, end_of_text: int | None = None) -> None:
        #: Rows: count, KL, source loss, loss, top-1 agreement.
        self.sums = torch.zeros(5, context, dtype=torch.float64)
        self._end_of_text = end_of_text
        #: Of source and other: probability and loss at the ends, how often likeliest elsewhere; ends, other places.
        self._ends = torch.zeros(8, dtype=torch.float64)
        self.max_difference = 0.0
        self.max_logit = 0.0

    def add(self, source: Tensor, other: Tensor, targets: Tensor, positions: Tensor) -> None:
        """Logits (N, V) of both models for the tokens `targets` (N,) that follow `positions` (N,).

        Where one has more rows than the other, of padding, the KL is that of the distributions over the common ids.
        Each loss is the model's own, over all of its rows.
        """
        rows = max(1, _CACHED // source.shape[1])
        for part in zip(*(each.split(rows) for each in (source, other, targets, positions)), strict=True):
            self._add(*part)

    def _add(self, source: Tensor, other: Tensor, targets: Tensor, positions: Tensor) -> None:
        log_p, log_q = source.double().log_softmax(-1), other.double().log_softmax(-1)
        common_p, common_q = common_rows(log_p, log_q)
        if common_p.shape != log_p.shape or common_q.shape != log_q.shape:
            common_p, common_q = common_p.log_softmax(-1), common_q.log_softmax(-1)
        rows = torch.stack(
            [
                torch.ones(len(targets), dtype=torch.float64, device=source.device),
                (common_p.exp() * (common_p - common_q)).sum(-1),
                -log_p.gather(1, targets[:, None])[:, 0],
                -log_q.gather(1, targets[:, None])[:, 0],
                (log_p.argmax(-1) == log_q.argmax(-1)).double(),
            ]
        )
        self.sums.index_add_(1, positions.cpu(), rows.cpu())
        if self._end_of_text is not None:
            self._ends += _said_of(self._end_of_text, log_p, log_q, targets).cpu()
        self.max_difference = larger(self.max_difference, difference(source, other))
        self.max_logit = larger(self.max_logit, source.abs().max())

    def comparison(self) -> Comparison:
        """What was added up. Raises ConverterError where that is nothing."""
        if not self.sums[0].any():
            raise ConverterError("the text holds nothing to predict", fix="Give a longer one")
        context = self.sums.shape[1]
        starts = [start for start in _BUCKET_STARTS if start < context]
        edges = zip(starts, [*starts[1:], context], strict=True)
        buckets = [self._figures(first, end) for first, end in edges if self.sums[0, first:end].sum() > 0]
        total, end = self._figures(0, context), self._end() if self._end_of_text is not None else None
        return Comparison(total, tuple(buckets), self.max_difference, self.max_logit, end)

    def _end(self) -> EndOfText:
        *sums, ends, places = self._ends.tolist()
        p, q, source_loss, loss = (each / max(ends, 1) for each in sums[:4])
        early = (each / max(places, 1) for each in sums[4:])
        return EndOfText(int(ends), p, q, source_loss, loss, int(places), *early)

    def _figures(self, first: int, end: int) -> Figures:
        sums = self.sums[:, first:end].sum(dim=1)
        used = self.sums[0, first:end].nonzero()
        count = sums[0].item()
        kl, source_loss, loss, agreement = (sums[1:] / count).tolist()
        last = first + int(used.max()) if len(used) else end - 1
        return Figures(first, last, int(count), kl, source_loss, loss, agreement)


def _said_of(token: int, log_p: Tensor, log_q: Tensor, targets: Tensor) -> Tensor:
    """Sums as `Tally` keeps them, (8,), from log probabilities (N, V) of two models for the next tokens (N,)."""
    at_end = targets == token
    ends = torch.stack([each[at_end, token] for each in (log_p, log_q)])  # (2, ends)
    early = [(each[~at_end].argmax(-1) == token).sum() for each in (log_p, log_q)]
    counts = [at_end.sum(), (~at_end).sum()]
    return torch.cat([ends.exp().sum(1), -ends.sum(1), torch.stack([*early, *counts]).double()])


def common_rows(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of logits (N, V) and (N, W) for the ids that both have."""
    common = min(a.shape[-1], b.shape[-1])
    return a[..., :common], b[..., :common]


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Largest difference of two logits, over the ids that both have."""
    one, two = common_rows(a, b)
    return (one - two).abs().max()


def larger(a: float, b: Tensor) -> float:
    """The larger of two numbers, and NaN where one of them is: `max` would lose it, and a gate would pass."""
    return float(torch.maximum(torch.tensor(a, dtype=torch.float64), b.double().cpu()))


def predictions(windows: Windows, batch: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Which (row, position) of a batch of windows predicts which token: three (N,) tensors."""
    ids = torch.from_numpy(windows.ids[batch])
    lengths = torch.from_numpy(windows.lengths[batch])
    ended = torch.from_numpy(windows.ended[batch])
    followed = lengths - 1 + ended.long()
    rows, positions = torch.nonzero(torch.arange(ids.shape[1])[None] < followed[:, None], as_tuple=True)
    targets = ids[rows, (positions + 1).clamp(max=ids.shape[1] - 1)]
    if windows.end_of_text is not None:
        targets[positions == lengths[rows] - 1] = windows.end_of_text
    return rows, positions, targets


def batches(windows: Windows, tokens: int = 4096) -> Iterator[slice]:
    """Slices of windows that hold about this many tokens each."""
    count, context = windows.ids.shape
    size = max(1, tokens // context)
    yield from (slice(start, min(start + size, count)) for start in range(0, count, size))
