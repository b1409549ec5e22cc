"""Cast every tensor to the dtype of the file. Lossy, and reported like any other step.

Overflow is an error that names the tensor: an infinity in a weight is never what anybody wants.
Underflow is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from converter.blocks import Block, BlockRef
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

    def apply(
        self, block: Block, spec: ModelSpec, ref: BlockRef, notes: Notes, calibration: Calibration | None
    ) -> Block:
        return Block({role: self._cast(role, tensor, notes) for role, tensor in block.items()})

    def _cast(self, role: str, tensor: Tensor, notes: Notes) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.dtype)
        rounded = tensor.to(dtype)
        if tensor.is_meta:
            return rounded
        low, high = torch.aminmax(rounded)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            overflowed = int((~torch.isfinite(rounded)).sum())
            raise UnsupportedError(
                f"{overflowed} of {tensor.numel()} values of {notes.name(role)} overflow in {self.dtype}",
                why=f"the largest is {float(tensor.abs().max()):.4g}, and {self.dtype} ends at "
                f"{torch.finfo(dtype).max:.4g}",
                fix="Use --dtype bfloat16 or float32"
                if self.dtype == "float16"
                else "A weight of the source is of a size that no trained one has; take an undamaged checkpoint",
            )
        if self.dtype == "float16":
            underflowed = int(((rounded == 0) & (tensor != 0)).sum())
            if underflowed:
                notes.facts["underflowed"] = notes.facts.get("underflowed", 0) + underflowed
        return rounded
