"""Write the files in as many parts as ranks of tensor parallelism will read them. Exact.

Only Meta's format has such files (`consolidated.NN.pth`); its family knows which tensor is cut along which axis.
"""

from __future__ import annotations

from dataclasses import dataclass

from converter.blocks import Block
from converter.errors import UnsupportedError
from converter.ops import Calibration, Notes, Op, op
from converter.spec import ModelSpec


@op
@dataclass(frozen=True)
class CutForRanks(Op):
    """Cut the files for `ranks`, each with its share of heads, of the MLP and of the vocabulary."""

    ranks: int = 1

    name = "cut_for_ranks"
    summary = "cut the files for several ranks of tensor parallelism"

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError("must be at least 1")

    def exact(self, spec: ModelSpec) -> bool:
        return True

    def needed(self, spec: ModelSpec) -> bool:
        return spec.ranks != self.ranks

    def change(self, spec: ModelSpec) -> ModelSpec:
        sizes = {
            "query heads": spec.num_heads,
            "key-value heads": spec.num_kv_heads,
            "neurons of the MLP": spec.intermediate_size,
            "tokens of the vocabulary": spec.vocab_size,
        }
        for what, size in sizes.items():
            if size % self.ranks:
                raise UnsupportedError(
                    f"{self.name}: {size} {what} cannot be shared evenly by {self.ranks} ranks",
                    fix="Choose a number of ranks that divides all of "
                    + ", ".join(f"{size} {what}" for what, size in sizes.items()),
                )
        return spec.replace(ranks=self.ranks)

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        return block  # the target cuts what has been written
