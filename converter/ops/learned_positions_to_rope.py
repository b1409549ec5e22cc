"""Learned positions -> RoPE. Lossy: the step that costs the most, and the one that healing is for.

A learned position vector, or one of sines and cosines, is added once, to the embedding, and reaches
everything; RoPE (Su et al. 2021) turns q and k in every layer and reaches the attention logits only.
What can be kept of the vectors without data is their mean, which goes into the token embeddings. The
k bias does nothing in a model without RoPE (it adds the same amount to all logits of a row) unless k is
normed, so whatever it holds is noise; rotated it would not be nothing, and is set to zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from converter.blocks import Block
from converter.ops import Calibration, Notes, Op, op, require
from converter.reference import position_table
from converter.spec import ModelSpec, Positions, RopeLayout, RopeSpec


@op
@dataclass(frozen=True)
class LearnedPositionsToRope(Op):
    """Fold the mean position into the embeddings, clear the k bias, rotate q and k."""

    theta: float = 10000.0
    layout: Literal["half_split", "interleaved"] = "half_split"

    name = "learned_positions_to_rope"
    summary = "fold the mean position into the embeddings and rotate q and k"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise ValueError("must be a number above 1")

    def change(self, spec: ModelSpec) -> ModelSpec:
        require(spec.absolute_positions, self.name, "the model adds no positions to its embeddings")
        require(spec.head_dim % 2 == 0, self.name, f"rotary pairs need an even head_dim, and it is {spec.head_dim}")
        require(
            not spec.tied_head,
            self.name,
            "the head is tied to the embeddings, which are to take the mean position",
            "Put untie_head before it",
        )
        rope = RopeSpec(theta=self.theta, rotary_dim=spec.head_dim, layout=RopeLayout(self.layout))
        return spec.replace(positions=Positions.ROPE, rope=rope)

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        if notes.ref.kind == "embeddings":
            embed, positions = block["embed.weight"], position_table(block, spec).double()
            mean = positions.mean(dim=0)
            notes.drop("positions.weight", "positions beyond their mean, which is in embed.weight", positions - mean)
            return Block({**block.without("positions.weight"), "embed.weight": embed + mean.to(embed.dtype)})
        if notes.ref.kind == "layer" and "k.bias" in block and spec.qk_norm is None:
            notes.drop("k.bias", "does nothing before RoPE and would be noise after it; zeros", block["k.bias"])
            return Block({**block, "k.bias": torch.zeros_like(block["k.bias"])})
        return block
