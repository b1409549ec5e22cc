"""Fold any attention scale into q: (s q).k = (sqrt(d) s q).k / sqrt(d). Exact.

A LLaMA always divides by sqrt(head_dim). GPT-2 variants divide by the layer's number as well, or not
at all, so the quotient of the two scales goes into the rows and the bias of q, or into the gain of its norm.
"""

from __future__ import annotations

from dataclasses import dataclass

from converter.blocks import Block
from converter.ops import Calibration, Notes, Op, op
from converter.spec import ModelSpec


@op
@dataclass(frozen=True)
class FoldAttentionScale(Op):
    """Fold the attention scale into q weight and bias, or into the norm of q."""

    name = "fold_attention_scale"
    summary = "put any attention scale but 1/sqrt(head_dim) into q"

    def exact(self, spec: ModelSpec) -> bool:
        return True

    def needed(self, spec: ModelSpec) -> bool:
        return any(scale != spec.standard_attention_scale for scale in spec.attention_scales)

    def change(self, spec: ModelSpec) -> ModelSpec:
        return spec.replace(attention_scales=(spec.standard_attention_scale,) * spec.num_layers)

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        if notes.ref.kind != "layer" or not self.needed(spec):
            return block
        factor = spec.attention_scales[notes.ref.index] / spec.standard_attention_scale
        last = "q." if spec.qk_norm is None else "q_norm."
        return Block({role: tensor * factor if role.startswith(last) else tensor for role, tensor in block.items()})
