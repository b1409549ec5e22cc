"""Cast every tensor to the dtype of the file. Lossy, and reported like any other step.

Overflow is an error that names the tensor: an infinity in a weight is never what anybody wants.
Underflow is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from converter.blocks import Block
from converter.errors import UnsupportedError
from converter.ops import Calibration, Notes, Op, op
from converter.spec import ModelSpec


@op
@dataclass(frozen=True)
class Cast(Op):
    """Round to `dtype`."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    name = "cast"
    summary = "round every tensor to the dtype of the file"

    def exact(self, spec: ModelSpec) -> bool:
        return self.dtype == "float32"

    def change(self, spec: ModelSpec) -> ModelSpec:
        return spec

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        return Block({role: self._cast(role, tensor, notes) for role, tensor in block.items()})

    def _cast(self, role: str, tensor: Tensor, notes: Notes) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.dtype)
        rounded = tensor.to(dtype)
        if tensor.is_meta:
            return rounded
        low, high = torch.aminmax(rounded)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise self._not_finite(notes.name(role), tensor, rounded)
        if self.dtype == "float16":
            underflowed = int(((rounded == 0) & (tensor != 0)).sum())
            if underflowed:
                notes.facts["underflowed"] = notes.facts.get("underflowed", 0) + underflowed
        return rounded

    def _not_finite(self, name: str, tensor: Tensor, rounded: Tensor) -> UnsupportedError:
        """An overflow of this cast, or what the steps before it have made."""
        largest = float(tensor.abs().max())
        counted = f"{int((~torch.isfinite(rounded)).sum())} of {tensor.numel()} values of {name}"
        if math.isfinite(largest):
            return UnsupportedError(
                f"{counted} overflow in {self.dtype}",
                why=f"the largest is {largest:.4g}, and {self.dtype} ends at {torch.finfo(rounded.dtype).max:.4g}",
                fix="Use --dtype bfloat16 or float32",
            )
        return UnsupportedError(
            f"{counted} are not finite after the steps of the recipe",
            why="All of the source's are, so a step has multiplied or added some that are too large for it",
            fix="Take an undamaged source; if none of its weights is of extreme size, please report this as a defect",
        )
