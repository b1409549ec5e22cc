"""Leave the final norm's bias out. Lossy, and the baseline that `fold_final_norm_bias` is measured against."""

from __future__ import annotations

from dataclasses import dataclass

from converter.blocks import Block
from converter.ops import Calibration, Notes, Op, op
from converter.spec import ModelSpec


@op
@dataclass(frozen=True)
class DropFinalNormBias(Op):
    """Drop the final norm's bias, without looking at data."""

    name = "drop_final_norm_bias"
    summary = "leave the final norm's bias out"

    def needed(self, spec: ModelSpec) -> bool:
        return spec.final_norm_bias

    def change(self, spec: ModelSpec) -> ModelSpec:
        return spec.replace(final_norm_bias=False)

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        if notes.ref.kind == "head" and "final_norm.bias" in block:
            notes.drop("final_norm.bias", "left out", block["final_norm.bias"])
            return block.without("final_norm.bias")
        return block
