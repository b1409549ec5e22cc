"""The walk: once through the depth, one block in memory, every op applied to it in turn.

With evaluation text the walk carries a stream of activations for every prefix of the ops, so that the
damage of each op is measured in the same pass as the conversion; a calibrated op sees the stream of
its own prefix. Streams that are still equal, because the ops between them have changed nothing so
far, are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from converter import model
from converter.ops import Block, Calibration, Notes
from converter.plan import Plan
from converter.spec import BlockRef, ModelSpec, block_shapes, blocks
from converter.text import Windows
from converter.verification import Comparison, Tally, batches, predictions

#: Predictions whose logits are computed at once; at a vocabulary of 50257 about 100 MB a model.
_ROWS = 512


@dataclass(frozen=True)
class Variant:
    """A block after some of the ops, with the spec that it has then."""

    block: Block
    spec: ModelSpec

    def same_function(self, other: Variant) -> bool:
        """Whether both are made of the very same tensors and facts; says nothing about equal values."""
        mine, theirs = (variant.spec.replace(tied_head=False) for variant in (self, other))
        return (
            mine == theirs
            and self.block.keys() == other.block.keys()
            and all(tensor is other.block[role] for role, tensor in self.block.items())
        )

    def to(self, dtype: torch.dtype) -> Variant:
        """For computing: a cast block is stored in fewer bits than it is run in."""
        return Variant(Block({role: tensor.to(dtype) for role, tensor in self.block.items()}), self.spec)


class Streams:
    """Activations of one text at the current depth, for some prefixes of the ops (0 is the source)."""

    def __init__(self, windows: Windows, prefixes: list[int], dtype: torch.dtype, device: torch.device) -> None:
        self.windows, self.prefixes, self.dtype, self.device = windows, prefixes, dtype, device
        self.states: dict[int, Tensor] = {}
        self._last: tuple[int, Variant] | None = None

    def advance(self, prefix: int, variant: Variant, ref: BlockRef) -> None:
        """Take a prefix's stream through its variant of a block; prefixes come in ascending order."""
        place = self.prefixes.index(prefix)
        before = self.states.get(prefix)
        if self._last is not None and place > 0:
            previous, previous_variant = self._last
            if self._shared.get(prefix) == previous and variant.same_function(previous_variant):
                self.states[prefix] = self.states[previous]
                self._last = (prefix, variant)
                return
        later = self.prefixes[place + 1] if place + 1 < len(self.prefixes) else None
        in_place = before is not None and (later is None or self.states.get(later) is not before)
        self.states[prefix] = self._run(before, variant.to(self.dtype), ref, in_place)
        self._last = (prefix, variant)

    def begin_block(self) -> None:
        """Note which streams are equal before a block."""
        self._last = None
        self._shared = {
            prefix: previous
            for previous, prefix in zip(self.prefixes, self.prefixes[1:], strict=False)
            if self.states.get(prefix) is self.states.get(previous)
        }

    def _run(self, states: Tensor | None, variant: Variant, ref: BlockRef, in_place: bool) -> Tensor:
        count, context = self.windows.ids.shape
        shape = (count, context, variant.spec.hidden_size)
        result = states if states is not None and in_place else torch.empty(shape, dtype=self.dtype)
        for batch in batches(self.windows):
            if states is None:
                ids = torch.from_numpy(self.windows.ids[batch]).to(self.device)
                result[batch] = model.run_embeddings(variant.block, variant.spec, ids).cpu()
            else:
                moved = states[batch].to(self.device)
                result[batch] = model.run_layer(variant.block, variant.spec, ref.index, moved).cpu()
        return result


class StreamCalibration(Calibration):
    """The calibration text's activations that enter a block, in the model converted so far."""

    def __init__(self, streams: Streams, prefix: int) -> None:
        self._streams, self._prefix = streams, prefix

    def batches(self) -> Iterator[Tensor]:
        lengths = torch.from_numpy(self._streams.windows.lengths)
        states = self._streams.states[self._prefix]
        for batch in batches(self._streams.windows):
            inside = torch.arange(states.shape[1])[None] < lengths[batch, None]
            yield states[batch][inside].to(self._streams.device)


class Walk:
    """Converts block by block; after the last one, `comparisons` holds the damage of each op prefix."""

    def __init__(
        self,
        plan: Plan,
        calibration: Windows | None = None,
        evaluation: Windows | None = None,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        progress: Callable[[BlockRef], None] = lambda ref: None,
    ) -> None:
        self.plan, self.dtype, self.device, self.progress = plan, dtype, torch.device(device), progress
        self.notes: list[list[Notes]] = [[] for _ in plan.steps]
        #: One for each op: the model after it against the source.
        self.comparisons: list[Comparison] = []
        #: One for each op: the largest logit difference to the model before it, over the largest logit.
        self.changes: list[float] = []
        prefixes = list(range(len(plan.steps) + 1))
        calibrated = [prefix for prefix in prefixes[1:] if plan.steps[prefix - 1].op.calibrated]
        self._evaluation = Streams(evaluation, prefixes, dtype, self.device) if evaluation is not None else None
        self._calibration = (
            Streams(calibration, calibrated, dtype, self.device) if calibration is not None and calibrated else None
        )

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[BlockRef, dict[str, Tensor]]]:
        """Converted blocks under the target's tensor names, in the order of depth."""
        for ref in blocks(self.plan.source.spec):
            self.progress(ref)
            yield ref, self.plan.named(ref, self._convert(ref))

    def _convert(self, ref: BlockRef) -> Block:
        plan = self.plan
        source = Variant(plan.source.read_block(ref, self.dtype, self.device), plan.source.spec)
        origins = {role: mapping.names[0] for mapping in self._source_mappings(ref) for role in mapping.roles}
        for streams in (self._evaluation, self._calibration):
            if streams is not None:
                streams.begin_block()
        self._advance(0, source, ref)
        current = source
        for prefix, step in enumerate(plan.steps, start=1):
            notes = Notes(ref, origins)
            block = step.op.apply(current.block, step.before, ref, notes, self._view(prefix))
            assert set(block) == set(block_shapes(step.after, ref)), f"{step.op.name} gives {ref} other roles"
            self.notes[prefix - 1].append(notes)
            previous, current = current, Variant(block, step.after)
            if ref.kind == "head" and self._evaluation is not None:
                self._measure(prefix, source, previous, current)
            else:
                self._advance(prefix, current, ref)
        return current.block

    def _source_mappings(self, ref: BlockRef) -> list:  # type: ignore[type-arg]
        return self.plan.source.family.mappings(self.plan.source.spec, ref)

    def _view(self, prefix: int) -> Calibration | None:
        if self._calibration is None or prefix not in self._calibration.prefixes:
            return None
        return StreamCalibration(self._calibration, prefix)

    def _advance(self, prefix: int, variant: Variant, ref: BlockRef) -> None:
        for streams in (self._evaluation, self._calibration):
            if streams is not None and prefix in streams.prefixes and ref.kind != "head":
                streams.advance(prefix, variant, ref)

    def _measure(self, prefix: int, source: Variant, previous: Variant, current: Variant) -> None:
        """Compare the logits after an op with the source's, and with those before the op."""
        assert self._evaluation is not None
        streams = self._evaluation
        same_stream = streams.states[prefix] is streams.states[prefix - 1]
        if same_stream and current.same_function(previous) and prefix > 1:
            self.comparisons.append(self.comparisons[-1])
            self.changes.append(0.0)
            return
        variants = {p: v.to(self.dtype) for p, v in ((0, source), (prefix - 1, previous), (prefix, current))}
        tally = Tally(streams.windows.ids.shape[1])
        largest_change = 0.0
        for batch in batches(streams.windows):
            rows, positions, targets = predictions(streams.windows, batch)
            for part in torch.arange(len(targets)).split(_ROWS):
                logits = {
                    p: model.run_head(
                        variant.block,
                        variant.spec,
                        streams.states[p][batch][rows[part], positions[part]].to(self.device),
                    )
                    for p, variant in variants.items()
                }
                tally.add(logits[0], logits[prefix], targets[part].to(self.device), positions[part])
                largest_change = max(largest_change, float((logits[prefix] - logits[prefix - 1]).abs().max()))
        self.comparisons.append(tally.comparison())
        self.changes.append(largest_change / max(tally.max_logit, 1e-300))
