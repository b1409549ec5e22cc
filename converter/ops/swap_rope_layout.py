"""RoPE in the other layout: the rows of q and k change places, and so does the rule that pairs them. Exact.

Everything that has head rows moves with them: weights, biases and norms of q and k, q's by the query
heads and k's by the key-value heads. `converter.layout` has the order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from converter.blocks import Block
from converter.layout import head_counts, swap_rows
from converter.ops import Calibration, Notes, Op, op, require
from converter.spec import ModelSpec, RopeLayout


@op
@dataclass(frozen=True)
class SwapRopeLayout(Op):
    """Move the rotary rows into the layout `to`."""

    to: Literal["half_split", "interleaved"] = "half_split"

    name = "swap_rope_layout"
    summary = "put the rows of q and k in the order of the other RoPE layout"

    def exact(self, spec: ModelSpec) -> bool:
        return True

    def needed(self, spec: ModelSpec) -> bool:
        return spec.rope is not None and spec.rope.layout is not RopeLayout(self.to)

    def change(self, spec: ModelSpec) -> ModelSpec:
        require(spec.rope is not None, self.name, "the model has no RoPE")
        assert spec.rope is not None
        return spec.replace(rope=dataclasses.replace(spec.rope, layout=RopeLayout(self.to)))

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        assert spec.rope is not None
        if notes.ref.kind != "layer" or not self.needed(spec) or not spec.rope.rotates(notes.ref.index):
            return block
        heads = head_counts(spec)
        moved = {
            role: swap_rows(
                tensor, heads[role], spec.head_dim, spec.rope.rotary_dim, RopeLayout(self.to), name=notes.name(role)
            )
            for role, tensor in block.items()
            if role in heads
        }
        return Block({**block, **moved})
