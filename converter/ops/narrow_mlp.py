"""Fewer neurons in a gated MLP, LLaMA's own number by default. Lossy, calibrated.

A LLaMA is h = multiple_of * ceil((8 d / 3) / multiple_of) wide, so that its three matrices have the parameters of
a plain MLP's two (Shazeer 2020, section 2; Touvron et al. 2023). Neurons are taken away that the others can stand
in for. With activations x, their second moments G = E[x x^T] and the columns w_j of `down`, refitted by least
squares to what is left, the error that taking neuron j away adds is

    |w_j|^2 / [G^-1]_jj

(Hassibi & Stork 1993, "Optimal Brain Surgeon", eq. 5, for a whole column). The cheapest ones go, a round at a time,
and `down` is refitted: W_S = W G_:S (G_SS)^-1. Where `down` has a bias, x is taken about its mean and the bias takes
what the lost neurons gave on average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from converter.blocks import Block
from converter.ops import Calibration, Notes, Op, op, require
from converter.ops.least_squares import RIDGE, Moments, chunks, require_plain_layer
from converter.reference import after_attention, run_neurons, run_norm
from converter.spec import ModelSpec

#: Rounds in which neurons are taken away; between them `down` is refitted and the rest judged anew.
_ROUNDS = 16


@op
@dataclass(frozen=True)
class NarrowMLP(Op):
    """Keep `width` neurons (0: LLaMA's number), a multiple of `multiple_of`."""

    width: int = 0
    multiple_of: int = 256

    name = "narrow_mlp"
    summary = "keep the neurons that matter most, at LLaMA's own width"
    calibrated = True

    def __post_init__(self) -> None:
        if self.multiple_of < 1:
            raise ValueError("must be 1 or more")

    def _width(self, spec: ModelSpec) -> int:
        return self.width or compact_width(spec.hidden_size, self.multiple_of)

    def needed(self, spec: ModelSpec) -> bool:
        return self._width(spec) < spec.intermediate_size

    def change(self, spec: ModelSpec) -> ModelSpec:
        require(spec.gated_mlp, self.name, "the MLP is not gated", "Put gelu_to_swiglu before it")
        require_plain_layer(spec, self.name)
        return spec.replace(intermediate_size=min(self._width(spec), spec.intermediate_size))

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        if notes.ref.kind != "layer" or not self.needed(spec):
            return block
        width = self._width(spec)
        if calibration is None:
            return _keep(block, torch.arange(width), block["down.weight"][:, :width])
        mean, gram = _moments(block, spec, notes.ref.index, calibration, about_mean="down.bias" in block)
        gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()))
        down = block["down.weight"].double()
        kept, narrow = choose(gram, down, width)
        result = _keep(block, kept, narrow.to(block["down.weight"].dtype))
        notes.errors["error of the MLP"] = _relative_error(gram, down, kept, narrow)
        if "down.bias" in block:
            lost = down @ mean - narrow @ mean[kept]
            result["down.bias"] = (block["down.bias"].double() + lost).to(block["down.bias"].dtype)
        return result


def compact_width(hidden_size: int, multiple_of: int) -> int:
    """LLaMA's: 11008 for 4096 and 256."""
    return multiple_of * math.ceil(8 * hidden_size / 3 / multiple_of)


def choose(gram: Tensor, down: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Which neurons (width,) of `down` (D, H) to keep, and their refitted columns (D, width).

    `gram` (H, H) holds the activations' second moments.
    """
    cross = down @ gram
    kept = torch.arange(len(gram), device=gram.device)
    per_round = math.ceil((len(gram) - width) / _ROUNDS)
    while True:
        part = gram[kept[:, None], kept].mT  # in the order that LAPACK factors in place: it is as large as a layer
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(part, out=part))
        narrow = cross[:, kept] @ inverse
        if len(kept) == width:
            return kept, narrow
        cost = narrow.square().sum(dim=0) / inverse.diagonal()
        staying = max(width, len(kept) - per_round)
        kept = kept[cost.topk(staying).indices.sort().values]


def _keep(block: Block, kept: Tensor, down: Tensor) -> Block:
    """The neurons `kept`, with other columns of `down`."""
    rows = {role: block[role][kept.to(block[role].device)] for role in block if role.split(".")[0] in ("gate", "up")}
    return Block({**block, **rows, "down.weight": down})


def _moments(
    block: Block, spec: ModelSpec, layer: int, calibration: Calibration, about_mean: bool
) -> tuple[Tensor, Tensor]:
    """Mean (H,) and second moments (H, H) of the neurons' activations; the mean is zero unless `about_mean`."""
    moments = Moments()
    for rows in chunks(calibration):
        states = after_attention(block, spec, layer, calibration.inputs(rows))
        neurons = run_neurons(block, spec, run_norm(block, "mlp_norm", spec, states))[calibration.mask(rows)]
        moments.add(neurons, neurons.new_ones(len(neurons), 1))
    assert moments.gram is not None
    mean = moments.mean() if about_mean else moments.mean() * 0
    return mean, moments.gram.div_(moments.count).addr_(mean, mean, alpha=-1)


def _relative_error(gram: Tensor, down: Tensor, kept: Tensor, narrow: Tensor) -> float:
    """Root of E|W x - W_S x_S|^2 / E|W x|^2."""
    change = down.clone()
    change[:, kept] -= narrow
    return math.sqrt(float(((change @ gram) * change).sum() / ((down @ gram) * down).sum()))
