"""Plain MLP -> SwiGLU: every neuron becomes K gated units that together draw its activation curve.

    f(z) = sum_k silu(a_k z + s_k) (c_k + e_k z),   z = w.x + b

so unit k has the gate row a_k w (bias a_k b + s_k), the up row e_k w (bias c_k + e_k b) and the
neuron's own column of `down`. With K = 1 the up rows are zero and the up bias is a constant. The
constants are in `swiglu_fits`; SiLU and quick-GELU are exact, the GELUs and ReLU approximate. With K
units the MLP is K times as wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from converter.ops import Block, Calibration, Notes, Op, op, require
from converter.ops.swiglu_fits import EXACT, FITS
from converter.spec import Activation, BlockRef, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor


@op
@dataclass(frozen=True)
class GeluToSwiglu(Op):
    """Replace a plain MLP by a gated one with `units` gated units a neuron."""

    units: Literal[1, 2, 3] = 1

    name = "gelu_to_swiglu"
    summary = "draw every neuron's activation with gated SiLU units"

    def exact(self, spec: ModelSpec) -> bool:
        return spec.activation in EXACT

    def change(self, spec: ModelSpec) -> ModelSpec:
        require(not spec.gated_mlp, self.name, "the MLP is gated already")
        fits = sorted(units for activation, units in FITS if activation is spec.activation)
        require(
            self.units in fits,
            self.name,
            f"there is no fit of {spec.activation.value} with {self.units} units a neuron",
            f"Set units to {' or '.join(map(str, fits))}",
        )
        return spec.replace(
            gated_mlp=True,
            activation=Activation.SILU,
            intermediate_size=spec.intermediate_size * self.units,
            biases=spec.biases | {"gate", "up"},
        )

    def apply(
        self, block: Block, spec: ModelSpec, ref: BlockRef, notes: Notes, calibration: Calibration | None
    ) -> Block:
        import torch

        if ref.kind != "layer":
            return block
        fit = FITS[spec.activation, self.units]
        weight = block["up.weight"]
        bias = block.get("up.bias")
        bias = weight.new_zeros(weight.shape[0]) if bias is None else bias

        def rows(factor: str, offset: str) -> tuple[Tensor, Tensor]:
            parts = [(getattr(unit, factor), getattr(unit, offset)) for unit in fit]
            return (
                torch.cat([weight * scale for scale, _ in parts]),
                torch.cat([bias * scale + shift for scale, shift in parts]),
            )

        gate_weight, gate_bias = rows("a", "s")
        up_weight, up_bias = rows("e", "c")
        return block.but(
            gate_weight=gate_weight,
            gate_bias=gate_bias,
            up_weight=up_weight,
            up_bias=up_bias,
            down_weight=torch.cat([block["down.weight"]] * len(fit), dim=1),
        )
