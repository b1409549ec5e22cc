"""Plain MLP -> SwiGLU: every neuron becomes K gated units that together draw its activation curve.

    f(z) = sum_k silu(a_k z + s_k) (c_k + e_k z),   z = w.x + b

so unit k has the gate row a_k w (bias a_k b + s_k), the up row e_k w (bias c_k + e_k b) and the
neuron's own column of `down`. With K = 1 the up rows are zero and the up bias is a constant. The
constants are in `swiglu_fits`; SiLU and quick-GELU are exact, the GELUs and ReLU approximate. With K
units the MLP is K times as wide.

With `refit` an approximate fit looks at the data. For K = 1 every neuron of a GELU takes from a ladder of slopes a the
one whose silu(a z) is nearest to a multiple of f(z) on the neuron's own pre-activations z; ReLU has one slope for all,
less steep than without `refit`, so that a layer can be fitted afterwards. For any K, `down` and its bias then follow by
least squares (ridge, fp64) against what the MLP gave before. What the neurons err by before that, for K = 1, is noted
for each layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from converter.blocks import Block
from converter.ops import Calibration, Notes, Op, op, require
from converter.ops.least_squares import chunks, refit_down, require_plain_layer
from converter.ops.swiglu_fits import EXACT, FITS
from converter.reference import activate, after_attention, run_layer, run_norm
from converter.spec import Activation, ModelSpec

#: Slopes a that a neuron may take for K = 1 with `refit`; one for all is 1.74 for the GELUs and 64 for ReLU. But `up`
#: is 1/a, and steps of a fit that are small beside 1/4 are large beside 1/64 (docs/conversion.md, "ReLU").
_LADDER = tuple(1.4 + 0.05 * step for step in range(17))
_LADDERS = {Activation.GELU_ERF: _LADDER, Activation.GELU_TANH: _LADDER, Activation.RELU: (4.0,)}
#: Tokens that they are chosen on: a choice among few.
_SLOPE_TOKENS = 8192


@op
@dataclass(frozen=True)
class GeluToSwiglu(Op):
    """Replace a plain MLP by a gated one with `units` gated units a neuron."""

    units: Literal[1, 2, 3] = 1
    refit: bool = False

    name = "gelu_to_swiglu"
    summary = "draw every neuron's activation with gated SiLU units"

    @property
    def calibrated(self) -> bool:  # type: ignore[override]  # it depends on a parameter here
        """Whether it needs activations."""
        return self.refit

    def exact(self, spec: ModelSpec) -> bool:
        return spec.activation in EXACT

    def change(self, spec: ModelSpec) -> ModelSpec:
        require(not spec.gated_mlp, self.name, "the MLP is gated already")
        if self.refit:
            require_plain_layer(spec, self.name)
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

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        if notes.ref.kind != "layer":
            return block
        fit = FITS[spec.activation, self.units]
        weight = block["up.weight"]
        bias = block.get("up.bias")
        bias = weight.new_zeros(weight.shape[0]) if bias is None else bias

        def rows(factor: str, offset: str) -> tuple[Tensor, Tensor]:
            parts = [(getattr(unit, factor), getattr(unit, offset)) for unit in fit]
            weights = [weight * scale if scale else weight.new_zeros(1, 1).expand_as(weight) for scale, _ in parts]
            return _joined(weights, dim=0), _joined([bias * scale + shift for scale, shift in parts], dim=0)

        gate_weight, gate_bias = rows("a", "s")
        up_weight, up_bias = rows("e", "c")
        gated = {"gate.weight": gate_weight, "gate.bias": gate_bias, "up.weight": up_weight, "up.bias": up_bias}
        result = Block({**block, **gated, "down.weight": _joined([block["down.weight"]] * len(fit), dim=1)})
        if calibration is None or self.exact(spec):
            return result
        if self.units == 1:
            ladder = _LADDERS[spec.activation]
            slopes, notes.errors["of the neurons"] = _slopes(ladder, block, spec, notes.ref.index, calibration)
            slopes = slopes / fit[0].a
            result["gate.weight"] = gate_weight * slopes[:, None]
            result["gate.bias"] = gate_bias * slopes
            result["up.bias"] = up_bias / slopes
        before = partial(run_layer, block, spec, notes.ref.index)
        return refit_down(result, self.change(spec), notes.ref.index, calibration, before)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenated; a single part as it is, with no copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _slopes(
    ladder: tuple[float, ...], block: Block, spec: ModelSpec, layer: int, calibration: Calibration
) -> tuple[Tensor, float]:
    """For each neuron the slope of a ladder that fits its pre-activations best, (H,), and the error over all neurons.

    The error is the root of E|f(z) - silu(a z)/a|^2 / E|f(z)|^2.
    """
    width = spec.intermediate_size
    along, square = (block["up.weight"].new_zeros(len(ladder), width) for _ in range(2))
    energy = block["up.weight"].new_zeros(width)
    for rows in chunks(calibration, _SLOPE_TOKENS):
        states = after_attention(block, spec, layer, calibration.inputs(rows))[calibration.mask(rows)]
        z = run_norm(block, "mlp_norm", spec, states) @ block["up.weight"].T
        z = z + block["up.bias"] if "up.bias" in block else z
        wanted = activate(spec.activation, z)
        energy += wanted.square().sum(dim=0)
        for place, slope in enumerate(ladder):
            drawn = activate(Activation.SILU, slope * z)
            along[place] += (drawn * wanted).sum(dim=0)
            square[place] += drawn.square().sum(dim=0)
    # |f - c s|^2 is least at c = (f.s)/(s.s), by (f.s)^2/(s.s) below |f|^2.
    best = (along.square() / square.clamp_min(1e-30)).argmax(dim=0)
    slopes = torch.tensor(ladder).to(along)[best]
    left = energy - 2 * along.gather(0, best[None])[0] / slopes + square.gather(0, best[None])[0] / slopes**2
    return slopes, math.sqrt(max(float(left.sum() / energy.sum().clamp_min(1e-30)), 0.0))
