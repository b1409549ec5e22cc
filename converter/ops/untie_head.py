"""Give the output head its own matrix, so that the embeddings can change without it. Exact."""

from __future__ import annotations

from dataclasses import dataclass

from converter.blocks import Block
from converter.ops import Calibration, Notes, Op, op
from converter.spec import ModelSpec


@op
@dataclass(frozen=True)
class UntieHead(Op):
    """Store the head apart from the embeddings."""

    name = "untie_head"
    summary = "store the output head apart from the embeddings"

    def exact(self, spec: ModelSpec) -> bool:
        return True

    def needed(self, spec: ModelSpec) -> bool:
        return spec.tied_head

    def change(self, spec: ModelSpec) -> ModelSpec:
        return spec.replace(tied_head=False)

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        return block  # the head block holds head.weight in any case; the tie is a fact of the spec
