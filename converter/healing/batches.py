"""Batches as a pure function of (seed, step): nothing to save, nothing to restore.

The documents of a corpus lie end to end, and every `context` tokens of them are a sequence: a document
that goes on beyond its end is cut there, and each piece of a document is text of its own, with positions
from 0. Each epoch takes every sequence once, in a new order. Steps run on through the epochs, so that
none is short. How many ranks and micro-batches share a step changes nothing about what is in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from converter.errors import ConverterError
from converter.losses import IGNORE
from converter.text.corpus import Corpus
from converter.text.windows import Windows


@dataclass(frozen=True, eq=False)
class Unpacked:
    """Document pieces, each in a row of its own, padded on the right: `ids` (P, L).

    `index` (S, T) is where the token of a packed sequence went in the flattened `ids`, or -1.
    """

    ids: Tensor
    index: Tensor

    def pack(self, states: Tensor) -> Tensor:
        """States (P, L, D) of the pieces, where their tokens were: (S, T, D). Zeros where a token has no place."""
        packed = states.flatten(0, 1)[self.index.clamp(min=0)]
        return packed.masked_fill((self.index < 0)[..., None], 0.0)


@dataclass(frozen=True, eq=False)
class Sequences:
    """S rows of T tokens, four (S, T) int64 tensors.

    `documents` numbers the document pieces of a row from 0, and is -1 for padding. `positions` counts from
    0 in each piece, and goes on in padding, so that a row of one piece needs no mask. `targets` is the next
    token of the same piece, the end-of-text token where the document really ends, or IGNORE: where a piece is cut, and
    for padding. All of it follows from lengths, never from ids: an end-of-text token inside is a target like any other.
    """

    ids: Tensor
    documents: Tensor
    positions: Tensor
    targets: Tensor

    @property
    def valid(self) -> int:
        """How many targets there are."""
        return int((self.targets != IGNORE).sum())

    def rows(self, chosen: slice) -> Sequences:
        """Some of the rows."""
        return Sequences(self.ids[chosen], self.documents[chosen], self.positions[chosen], self.targets[chosen])

    def share(self, rank: int, ranks: int) -> Sequences:
        """A rank's own rows, as many on every rank."""
        size, rest = divmod(len(self.ids), ranks)
        assert rest == 0, "held-out sequences are padded to a multiple of the ranks"
        return self.rows(slice(rank * size, (rank + 1) * size))

    def to(self, device: torch.device | str) -> Sequences:
        """The same on a device."""
        tensors = (self.ids, self.documents, self.positions, self.targets)
        return Sequences(*(tensor.to(device, non_blocking=True) for tensor in tensors))

    def split(self, rows: int) -> Iterator[Sequences]:
        """Micro-batches of this many rows; the last may have fewer."""
        for start in range(0, len(self.ids), rows):
            yield self.rows(slice(start, start + rows))

    def unpacked(self, longest: int | None = None) -> Unpacked:
        """Each document piece in a row of its own, for models that know no packing; at most `longest` tokens of each.

        A causal model sees nothing to the right, so it needs no mask for the padding there.
        """
        row, column = torch.nonzero(self.documents >= 0, as_tuple=True)
        positions = self.positions[row, column]
        piece = (positions == 0).cumsum(0) - 1
        if longest is not None:
            kept = positions < longest
            row, column, positions, piece = (each[kept] for each in (row, column, positions, piece))
        if not len(row):
            return Unpacked(self.ids.new_zeros(1, 1), torch.full_like(self.ids, -1))
        length = int(positions.max()) + 1
        ids = self.ids.new_zeros(int(piece[-1]) + 1, length)
        ids[piece, positions] = self.ids[row, column]
        index = torch.full_like(self.ids, -1)
        index[row, column] = piece * length + positions
        return Unpacked(ids, index)


class Batches:
    """The sequences of every optimizer step of a run, each of `context` tokens.

    Raises ConverterError where the corpus holds no target at all.
    """

    def __init__(self, corpus: Corpus, context: int, sequences_per_step: int, seed: int) -> None:
        if context < 2:
            raise ConverterError(f"a context of {context} leaves nothing to predict", fix="Choose 2 or more")
        if int(np.diff(corpus.offsets).max(initial=0)) < 2:
            raise ConverterError(
                "the text holds nothing to predict",
                why=f"none of its {corpus.documents} documents has two tokens or more",
                fix="Give more text",
            )
        self.context, self.sequences_per_step, self.seed = context, sequences_per_step, seed
        self._corpus = corpus
        self.sequences_per_epoch = -(-corpus.tokens // context)
        self._order = lru_cache(maxsize=2)(self._shuffled)  # a step may reach into the next epoch

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, but for the padding of a corpus' last sequence."""
        return self.sequences_per_step * self.context

    def steps(self, tokens: int) -> int:
        """How many steps see so many tokens."""
        return math.ceil(tokens / self.tokens_per_step)

    def step(self, step: int) -> Sequences:
        """All sequences of optimizer step 0, 1, ..."""
        first = step * self.sequences_per_step
        return self._sequences(self._chosen(first, first + self.sequences_per_step))

    def share(self, step: int, rank: int, world_size: int) -> Sequences:
        """The rows of a step that are a rank's own: consecutive ones, as many on every rank.

        Where the rows do not divide, the last ranks get rows of padding without a target, so that all ranks
        make the same passes.
        """
        size = -(-self.sequences_per_step // world_size)
        first = step * self.sequences_per_step
        start, end = (first + min((rank + n) * size, self.sequences_per_step) for n in (0, 1))
        chosen = self._chosen(start, end)
        return self._sequences(np.pad(chosen, (0, size - len(chosen)), constant_values=self.sequences_per_epoch))

    def _chosen(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """Which sequences are taken as number `first` to `end` since the start of the run."""
        numbers = np.arange(first, end)
        epochs, places = np.divmod(numbers, self.sequences_per_epoch)
        chosen = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = self._order(int(epoch))[places[here]]
        return chosen

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self.seed, epoch]).permutation(self.sequences_per_epoch)

    def _sequences(self, chosen: npt.NDArray[np.int64]) -> Sequences:
        """Sequences by number; one past the last is all padding."""
        corpus, context = self._corpus, self.context
        places = chosen[:, None] * context + np.arange(context)  # in the corpus
        inside = places < corpus.tokens
        known = np.minimum(places, corpus.tokens - 1)
        ids = np.where(inside, corpus.ids[known], 0)
        # Each place belongs to the last document that begins there or before; in padding, the last one goes on.
        document = np.searchsorted(corpus.offsets, known, side="right") - 1
        starts = np.maximum(corpus.offsets[document], places[:, :1])
        positions = places - starts
        pieces = np.where(inside, np.cumsum(positions == 0, axis=1) - 1, -1)
        targets = np.full_like(places, IGNORE)
        goes_on = inside[:, 1:] & (positions[:, 1:] > 0)
        targets[:, :-1][goes_on] = ids[:, 1:][goes_on]
        if corpus.end_of_text is not None:
            real = corpus.ended & (np.diff(corpus.offsets) > 1)
            ends = inside & (places == corpus.offsets[document + 1] - 1) & real[document]
            targets[ends] = corpus.end_of_text
        return Sequences(*(torch.from_numpy(a.astype(np.int64)) for a in (ids, pieces, positions, targets)))


def sequences_of(held_out: Windows, ranks: int) -> Sequences:
    """Windows as sequences of one document each, with rows of padding up to a multiple of the ranks."""
    rows, context = held_out.ids.shape
    padded = -(-rows // ranks) * ranks
    ids = torch.zeros(padded, context, dtype=torch.int64)
    ids[:rows] = torch.from_numpy(held_out.ids)
    lengths = torch.zeros(padded, 1, dtype=torch.int64)
    lengths[:rows, 0] = torch.from_numpy(held_out.lengths)
    positions = torch.arange(context).expand(padded, context)
    inside, followed = positions < lengths, positions < lengths - 1
    targets = torch.full_like(ids, IGNORE)
    targets[:, :-1][followed[:, :-1]] = ids[:, 1:][followed[:, :-1]]
    ended = np.flatnonzero(held_out.ended)
    if held_out.end_of_text is not None:
        targets[ended, held_out.lengths[ended] - 1] = held_out.end_of_text
    return Sequences(ids, inside.long() - 1, positions * inside, targets)
