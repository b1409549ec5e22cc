"""Activation streams: one text at the current depth of the walk, for several prefixes of the ops."""

from __future__ import annotations

import math
import tempfile
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from converter import reference
from converter.blocks import Block, BlockRef
from converter.measure.metrics import batches, predictions
from converter.ops import Calibration
from converter.spec import ModelSpec
from converter.text.windows import Windows

#: Bytes of one stream that are held in memory.
IN_MEMORY = 4 << 30
#: Predictions whose logits are computed at once; at a vocabulary of 50257 about 100 MB a model.
_ROWS = 512


@dataclass(frozen=True)
class Variant:
    """A block after some of the ops, with the spec that it has then."""

    block: Block
    spec: ModelSpec

    def to(self, dtype: torch.dtype) -> Variant:
        """For computing: a cast block is stored in fewer bits than it is run in."""
        return Variant(Block({role: tensor.to(dtype) for role, tensor in self.block.items()}), self.spec)


class Trace:
    """What a variant was made of, without keeping its tensors in memory."""

    def __init__(self, variant: Variant) -> None:
        self._spec = variant.spec.replace(tied_head=False)
        self._tensors = {role: weakref.ref(tensor) for role, tensor in variant.block.items()}

    def same_function(self, variant: Variant) -> bool:
        """Whether a variant is made of the very same tensors and facts; says nothing about equal values."""
        return (
            self._spec == variant.spec.replace(tied_head=False)
            and self._tensors.keys() == variant.block.keys()
            and all(self._tensors[role]() is tensor for role, tensor in variant.block.items())
        )


#: How states of another placement of the norms are read where the source's are normed already, see `Calibration`.
Reading = Callable[[Tensor], Tensor]


class Streams:
    """States (n, T, D) of a text for some prefixes of the ops; prefix 0 is the source.

    Streams that are still equal, because the ops between them have changed nothing so far, are one
    tensor and are computed once. Absolute positions are 0 to T-1 unless others (T,) are given.
    """

    def __init__(
        self,
        windows: Windows,
        prefixes: list[int],
        dtype: torch.dtype,
        device: torch.device,
        positions: Tensor | None = None,
    ) -> None:
        self.windows, self.prefixes, self.dtype, self.device = windows, prefixes, dtype, device
        self.positions = positions
        self.states: dict[int, Tensor] = {}
        self._equal_so_far: set[int] = set()
        self._last: Trace | None = None
        self._source_input: Tensor | None = None

    def begin_block(self, keep_input: bool = False) -> None:
        """Note which streams are equal to the one before them, before a block; `keep_input` is for `own_error`."""
        if keep_input and 0 in self.states:
            self._source_input = self.states[0][next(batches(self.windows))].clone()
        pairs = zip(self.prefixes, self.prefixes[1:], strict=False)
        self._equal_so_far = {b for a, b in pairs if self.states.get(a) is self.states.get(b)}
        self._last = None

    def advance(self, prefix: int, variant: Variant, ref: BlockRef) -> None:
        """Take a prefix's stream through its variant of a block; prefixes come in ascending order."""
        place = self.prefixes.index(prefix)
        before = self.states.get(prefix)
        if self._last is not None and prefix in self._equal_so_far and self._last.same_function(variant):
            self.states[prefix] = self.states[self.prefixes[place - 1]]
        else:
            later = self.prefixes[place + 1] if place + 1 < len(self.prefixes) else None
            still_needed = later is not None and self.states.get(later) is before
            self.states[prefix] = self._run(before, variant.to(self.dtype), ref, in_place=not still_needed)
        self._last = Trace(variant)

    def _run(self, states: Tensor | None, variant: Variant, ref: BlockRef, in_place: bool) -> Tensor:
        shape = (*self.windows.ids.shape, variant.spec.hidden_size)
        result = states if states is not None and in_place else _empty(shape, self.dtype)
        for batch in batches(self.windows):
            if states is None:
                ids = torch.from_numpy(self.windows.ids[batch]).to(self.device)
                result[batch] = reference.run_embeddings(variant.block, variant.spec, ids, self.positions).cpu()
            else:
                moved = states[batch].to(self.device)
                result[batch] = reference.run_layer(variant.block, variant.spec, ref.index, moved).cpu()
        return result

    def mask(self, rows: slice | Tensor) -> Tensor:
        """Which places (n, T) of some windows hold a token and no padding."""
        lengths = torch.from_numpy(self.windows.lengths)[rows]
        return torch.arange(self.windows.ids.shape[1])[None] < lengths[:, None]

    def drift(self, prefix: int, as_read: Reading | None = None) -> float:
        """Mean over tokens of |x - s| / |s|, x being a prefix's centred state, `as_read`, and s the source's."""
        if self.states[prefix] is self.states[0]:
            return 0.0
        errors = []
        for batch in batches(self.windows):
            ours, source = (self.states[p][batch][self.mask(batch)] for p in (prefix, 0))
            errors.append(_relative_error(as_read(ours) if as_read else ours, source))
        return float(torch.cat(errors).mean())

    def own_error(self, variant: Variant, ref: BlockRef) -> float:
        """The drift that a block's ops make by themselves: of its output, when it is fed the source's states.

        Looked at on the first batch of windows, after the source's stream has passed the block.
        """
        batch = next(batches(self.windows))
        running = variant.to(self.dtype)
        if self._source_input is None:
            ids = torch.from_numpy(self.windows.ids[batch]).to(self.device)
            output = reference.run_embeddings(running.block, running.spec, ids)
        else:
            output = reference.run_layer(
                running.block, running.spec, ref.index, _centred(self._source_input).to(self.device)
            )
        inside = self.mask(batch)
        return float(_relative_error(output.cpu()[inside], self.states[0][batch][inside]).mean())

    def save(self, name: str) -> dict[str, Tensor]:
        """The distinct streams, by names that `load` knows."""
        return {
            f"{name}.{prefix}": self.states[prefix]
            for place, prefix in enumerate(self.prefixes)
            if prefix in self.states
            and (place == 0 or self.states[prefix] is not self.states.get(self.prefixes[place - 1]))
        }

    def load(self, name: str, saved: Mapping[str, Tensor]) -> None:
        """Take up what `save` gave; equal streams are shared again."""
        current: Tensor | None = None
        for prefix in self.prefixes:
            current = saved.get(f"{name}.{prefix}", current)
            if current is not None:
                self.states[prefix] = current


class StreamCalibration(Calibration):
    """The calibration text's activations around a block, for the op that makes prefix `prefix`.

    Its own stream has not passed the block yet, and the source's has.
    """

    def __init__(
        self,
        streams: Streams,
        prefix: int,
        centred: bool,
        as_read: Reading | None,
        source_block: Callable[[BlockRef], Block],
    ) -> None:
        self._streams, self._prefix, self._centred = streams, prefix, centred
        self._as_read, self._source_block = as_read, source_block
        self.count, self.length = streams.windows.ids.shape
        self.moved_norms = as_read is not None
        if self.moved_norms:
            first = next(batches(streams.windows))
            states = streams.states[prefix][first][streams.mask(first)]
            self.stream_scale = float(_centred(states).square().mean().sqrt())

    def batches(self) -> Iterator[Tensor]:
        for batch in batches(self._streams.windows):
            rows = torch.arange(batch.start, batch.stop)
            yield self.inputs(rows)[self.mask(rows)]

    def inputs(self, rows: Tensor) -> Tensor:
        return self._streams.states[self._prefix][rows].to(self._streams.device)

    def targets(self, rows: Tensor) -> Tensor:
        states = self._streams.states[0][rows].to(self._streams.device)
        return _centred(states) if self._centred else states

    def as_read(self, states: Tensor) -> Tensor:
        return states if self._as_read is None else self._as_read(states)

    def mask(self, rows: Tensor) -> Tensor:
        return self._streams.mask(rows).to(self._streams.device)

    def source_block(self, ref: BlockRef) -> Block:
        return self._source_block(ref)


K = TypeVar("K", bound=Hashable)


def logits(
    windows: Windows, heads: Mapping[K, tuple[Variant, Tensor]], device: torch.device
) -> Iterator[tuple[dict[K, Tensor], Tensor, Tensor]]:
    """Logits (N, V) of some heads, each on its states (n, T, D), with next tokens (N,) and positions (N,).

    A few rows at a time, for `Tally.add`.
    """
    for batch in batches(windows):
        rows, positions, targets = predictions(windows, batch)
        for part in torch.arange(len(targets)).split(_ROWS):
            found = {
                key: reference.run_head(head.block, head.spec, states[batch][rows[part], positions[part]].to(device))
                for key, (head, states) in heads.items()
            }
            yield found, targets[part].to(device), positions[part]


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in memory, or above `IN_MEMORY` in a file of the temporary folder that is gone when it is."""
    size = math.prod(shape)
    if size * dtype.itemsize <= IN_MEMORY:
        return torch.empty(shape, dtype=dtype)
    with tempfile.NamedTemporaryFile(prefix="converter-stream-") as file:
        return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)


def _relative_error(ours: Tensor, source: Tensor) -> Tensor:
    """|x - s| / |s| of centred states (N, D), for each of N tokens."""
    ours, source = _centred(ours), _centred(source)
    error: Tensor = (ours - source).norm(dim=-1) / source.norm(dim=-1).clamp_min(1e-30)
    return error


def _centred(states: Tensor) -> Tensor:
    return states - states.mean(dim=-1, keepdim=True)
