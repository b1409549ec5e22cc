"""Drop the rows of embeddings and head that have no token: padding up to a multiple of 64 or 128.

The logits of all tokens stay what they are. Lossy all the same: what the model gave the padding rows is shared out
among the tokens, p(t) / (1 - p(padding)). Of a trained model that is next to nothing, and it is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from converter.blocks import Block
from converter.ops import Calibration, Notes, Op, op, require
from converter.spec import ModelSpec

#: Roles with a row a token.
_ROWS = ("embed.weight", "head.weight", "head.bias")


@op
@dataclass(frozen=True)
class TrimVocabulary(Op):
    """Keep the first `tokens` rows; 0 keeps all."""

    tokens: int = 0

    name = "trim_vocabulary"
    summary = "drop the rows of embeddings and head beyond the tokens"

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError("must be at least 0")

    def exact(self, spec: ModelSpec) -> bool:
        return not self.needed(spec)

    def needed(self, spec: ModelSpec) -> bool:
        return self.tokens not in (0, spec.vocab_size)

    def change(self, spec: ModelSpec) -> ModelSpec:
        require(self.tokens <= spec.vocab_size, self.name, f"there are {spec.vocab_size} rows, not {self.tokens}")
        return spec.replace(vocab_size=self.tokens or spec.vocab_size)

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        if not self.needed(spec):
            return block
        for role in (role for role in _ROWS if role in block):
            rows = f"{role}, rows {self.tokens} to {spec.vocab_size - 1}"
            notes.drop(rows, "padding: rows without a token", block[role][self.tokens :])
        return Block({role: each[: self.tokens] if role in _ROWS else each for role, each in block.items()})
