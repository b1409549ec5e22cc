"""The walk: once through the depth, one block in memory, every op applied to it in turn.

With evaluation text the walk carries a stream of activations for every prefix of the ops, so that the
damage of each op is measured in the same pass as the conversion; a calibrated op sees the stream of
its own prefix. After each block the walk can be saved, and another one can go on from there.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from converter import reference
from converter.blocks import Block, BlockRef, Dropped, block_shapes, blocks
from converter.conversion.plan import Plan
from converter.conversion.streams import Reading, StreamCalibration, Streams, Trace, Variant, logits
from converter.errors import at
from converter.measure.metrics import Comparison, Tally, batches, difference, larger
from converter.ops import Calibration, Notes
from converter.spec import Norm
from converter.text.windows import Windows

#: Tokens of the calibration text for ops that take a few moments from it; those that follow the source see all.
GLANCE = 65536


#: What a walk is at, as plain values and as streams by name.
State = tuple[dict[str, Any], dict[str, Tensor]]


@dataclass
class Findings:
    """What a walk found out, one entry an op."""

    #: What the op dropped, block by block.
    dropped: list[list[Dropped]]
    #: Facts that the op noted, summed over the blocks.
    facts: list[dict[str, float]]
    #: Relative errors that the op noted, by their name and by block.
    errors: list[dict[str, dict[str, float]]]
    #: Drift of the states after each block from the source's, see `Streams.drift`.
    drifts: list[list[float]]
    #: The part of it that the block makes by itself, see `Streams.own_error`.
    own_errors: list[list[float]]
    #: The model after the op, against the source.
    comparisons: list[Comparison] = field(default_factory=list)
    #: Largest logit difference to the model before the op, over the largest logit.
    changes: list[float] = field(default_factory=list)

    @classmethod
    def empty(cls, steps: int) -> Findings:
        """Nothing found out yet."""
        return cls(*([make() for _ in range(steps)] for make in (list, dict, dict, list, list)))  # type: ignore[arg-type]

    def note(self, step: int, notes: Notes) -> None:
        """Add what an op noted of one block."""
        self.dropped[step] += notes.dropped
        for key, value in notes.facts.items():
            self.facts[step][key] = self.facts[step].get(key, 0.0) + value
        for key, value in notes.errors.items():
            self.errors[step].setdefault(key, {})[str(notes.ref)] = value

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Findings:
        """The inverse of `to_dict`."""
        dropped = [[Dropped(**each) for each in step] for step in saved["dropped"]]
        comparisons = [Comparison.from_dict(each) for each in saved["comparisons"]]
        return cls(**{**saved, "dropped": dropped, "comparisons": comparisons})


class Walk:
    """Converts block by block; `findings` fills up on the way."""

    def __init__(
        self,
        plan: Plan,
        calibration: Windows | None = None,
        evaluation: Windows | None = None,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.progress = progress
        self.plan, self.dtype, self.device = plan, dtype, torch.device(device)
        self.findings = Findings.empty(len(plan.steps))
        self._finished = 0
        prefixes = list(range(len(plan.steps) + 1))
        self._evaluation = Streams(evaluation, prefixes, dtype, self.device) if evaluation is not None else None
        self._calibration: dict[str, Streams] = {}
        if calibration is not None:
            texts = {"calibration": calibration, "glance": spread(calibration, GLANCE)}
            for kind, calibrated in calibrated_prefixes(plan).items():
                self._calibration[kind] = Streams(texts[kind], calibrated, dtype, self.device)

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[BlockRef, dict[str, Tensor]]]:
        """Converted blocks under the target's tensor names, in the order of depth, from the first unfinished one."""
        for ref in list(blocks(self.plan.source.spec))[self._finished :]:
            tensors = self.plan.named(ref, self._convert(ref))
            self._finished += 1
            yield ref, tensors
            del tensors  # one block in memory

    @property
    def has_text(self) -> bool:
        """Whether there are activations to compute."""
        return bool(self._streams())

    def finished_names(self) -> list[str]:
        """Target names of the tensors of all finished blocks."""
        spec, target = self.plan.target_spec, self.plan.target
        done = list(blocks(spec))[: self._finished]
        names = [name for ref in done for mapping in target.mappings(spec, ref) for name in mapping.names]
        return [full for full in dict.fromkeys(map(target.full_name, names)) if full in self.plan.tensors]

    def state(self) -> State:
        """What another walk needs in order to go on after the block that was handed out last."""
        streams = {name: tensor for kind, each in self._streams() for name, tensor in each.save(kind).items()}
        return {"finished": self._finished, "findings": self.findings.to_dict()}, streams

    def restore(self, state: dict[str, Any], streams: dict[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        self._finished = state["finished"]
        self.findings = Findings.from_dict(state["findings"])
        for kind, each in self._streams():
            each.load(kind, streams)

    def seconds(self) -> float:
        """About how long the activations will take, by the time of one layer of random weights on one batch."""
        pairs = [(streams, len(streams.prefixes)) for _, streams in self._streams()]
        if not pairs:
            return 0.0
        spec = self.plan.source.spec
        shapes = block_shapes(spec, BlockRef("layer"))
        block = Block({role: torch.randn(shape, device=self.device) * 0.01 for role, shape in shapes.items()})
        windows = pairs[0][0].windows
        batch = windows.ids[next(batches(windows))]
        states = torch.randn(*batch.shape, spec.hidden_size, device=self.device)
        with torch.no_grad():
            reference.run_layer(block, spec, 0, states)
            started = time.perf_counter()
            float(reference.run_layer(block, spec, 0, states).sum())
        per_token = (time.perf_counter() - started) / batch.size
        return sum(per_token * streams.windows.ids.size * count * spec.num_layers for streams, count in pairs)

    def _streams(self) -> list[tuple[str, Streams]]:
        measured = [("evaluation", self._evaluation)] if self._evaluation is not None else []
        return [*measured, *self._calibration.items()]

    def _convert(self, ref: BlockRef) -> Block:
        source_spec = self.plan.source.spec
        current = Variant(self.plan.source.read_block(ref, self.dtype, self.device), source_spec)
        mappings = self.plan.source.family.mappings(source_spec, ref)
        origins = {role: mapping.names[0] for mapping in mappings if mapping.names for role in mapping.roles}
        for _, streams in self._streams():
            streams.begin_block(keep_input=streams is self._evaluation)
        moved_norm = _norm_behind(current)
        self._advance(0, current, ref, moved_norm)
        source = current if self._evaluation is not None and ref.kind == "head" else None
        for prefix, step in enumerate(self.plan.steps, start=1):
            notes = Notes(ref, origins, dict(self.findings.facts[prefix - 1]))
            notes.progress = self.progress or notes.progress
            with at(f"step '{step.op.name}' on {ref}"):
                block = step.op.apply(current.block, step.before, notes, self._calibration_for(prefix, moved_norm))
            assert block.keys() == block_shapes(step.after, ref).keys(), f"{step.op.name} gives {ref} other roles"
            self.findings.note(prefix - 1, notes)
            previous, current = current, Variant(block, step.after)
            if source is not None:
                self._measure(prefix, source, previous, current)
            del previous  # one block in memory
            self._advance(prefix, current, ref, moved_norm)
        return current.block

    def _calibration_for(self, prefix: int, moved_norm: Reading | None) -> Calibration | None:
        source, step = self.plan.source.spec, self.plan.steps[prefix - 1]
        streams = self._calibration.get("calibration" if step.op.follows_source else "glance")
        if streams is None or prefix not in streams.prefixes:
            return None
        centred = (source.norm, step.before.norm) == (Norm.LAYERNORM, Norm.RMSNORM)

        def source_block(ref: BlockRef) -> Block:
            return self.plan.source.read_block(ref, self.dtype, self.device)

        as_read = moved_norm if step.before.pre_norm else None
        return StreamCalibration(streams, prefix, centred and as_read is None, as_read, source_block)

    def _advance(self, prefix: int, variant: Variant, ref: BlockRef, moved_norm: Reading | None) -> None:
        if ref.kind == "head":
            return
        for _, streams in self._streams():
            if prefix in streams.prefixes:
                streams.advance(prefix, variant, ref)
        if prefix > 0 and self._evaluation is not None:
            as_read = moved_norm if variant.spec.pre_norm else None
            drift = self._evaluation.drift(prefix, as_read)
            self.findings.drifts[prefix - 1].append(drift)
            own = drift  # with the norms moved the source's states do not fit in, and nothing is told apart
            if drift and as_read is None:
                own = self._evaluation.own_error(variant, ref)
            self.findings.own_errors[prefix - 1].append(own)

    def _measure(self, prefix: int, source: Variant, previous: Variant, current: Variant) -> None:
        """Compare the logits after an op with the source's, and with those before the op."""
        assert self._evaluation is not None
        streams, findings = self._evaluation, self.findings
        same_stream = streams.states[prefix] is streams.states[prefix - 1]
        if same_stream and Trace(previous).same_function(current) and prefix > 1:
            findings.comparisons.append(findings.comparisons[-1])
            findings.changes.append(0.0)
            return
        variants = ((0, source), (prefix - 1, previous), (prefix, current))
        heads = {p: (variant.to(self.dtype), streams.states[p]) for p, variant in variants}
        tally = Tally(streams.windows.ids.shape[1], streams.windows.end_of_text)
        largest_change = 0.0
        for found, targets, positions in logits(streams.windows, heads, self.device):
            tally.add(found[0], found[prefix], targets, positions)
            largest_change = larger(largest_change, difference(found[prefix], found[prefix - 1]))
        findings.comparisons.append(tally.comparison())
        findings.changes.append(largest_change / max(tally.max_logit, 1e-300))


def _norm_behind(source: Variant) -> Reading | None:
    """What a post-LN block does last. A model with its norms moved before the sublayers does it when it reads on."""
    norm = "embed_norm" if "embed_norm.weight" in source.block else "mlp_norm"
    if source.spec.pre_norm or f"{norm}.weight" not in source.block:
        return None
    roles = {role: tensor for role, tensor in source.block.items() if role.startswith(norm)}

    def read(states: Tensor) -> Tensor:
        return reference.run_norm({role: t.to(states.device) for role, t in roles.items()}, norm, source.spec, states)

    return read


def calibrated_prefixes(plan: Plan) -> dict[str, list[int]]:
    """Which prefixes need a stream of the whole calibration text, the source's among them, and which of a part."""
    kinds: dict[str, list[int]] = {}
    for prefix, step in enumerate(plan.steps, start=1):
        if step.op.calibrated and step.needed:
            kinds.setdefault("calibration" if step.op.follows_source else "glance", []).append(prefix)
    if "calibration" in kinds:
        kinds["calibration"].insert(0, 0)
    return kinds


def spread(windows: Windows, tokens: int) -> Windows:
    """At most this many tokens, in windows spread evenly over all."""
    count, length = windows.ids.shape
    chosen = np.arange(few := max(1, min(count, tokens // length))) * count // few
    return windows.rows(chosen)
