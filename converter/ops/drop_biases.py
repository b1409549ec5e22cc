"""Biases away, for targets that have none (classic LLaMA, Mistral) or few (Qwen2). Lossy, calibrated.

A constant is not linear in n, what a norm lets through, but over the states that a model really has some v makes
v.n close to 1 (`fold_final_norm_bias` does the same for the head). So

    reader:  W n + b              ->  (W + b v^T) n            for q, k, v, gate and up
    o:       W_o a + b_o          ->  W_o (a + u),  W_o u = b_o

where u joins v's bias: the weights of an attention row sum to 1, so every head passes a constant on as it is.
`down` is refitted by least squares to the layer's own output before the change. That finds the neurons, constant
or not, that can stand in for its bias, and takes back of the other errors what a linear map can.

v is found by least squares in fp64 with a ridge, at each norm, in the model as it is by then: the MLP's v already
sees what the attention's left over. Of every bias the report has the norm of what remains unexplained.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from converter.blocks import LINEARS, Block
from converter.ops import Calibration, Notes, Op, op
from converter.ops.least_squares import RIDGE, Moments, chunks, refit_down, require_plain_layer
from converter.reference import after_attention, run_layer, run_norm
from converter.spec import ModelSpec

_READERS = {"attn_norm": ("q", "k", "v"), "mlp_norm": ("gate", "up")}


@op
@dataclass(frozen=True)
class DropBiases(Op):
    """Fold the layers' biases into the weights; with `keep: qkv` those of q, k and v stay."""

    keep: Literal["none", "qkv"] = "none"

    name = "drop_biases"
    summary = "fold the layers' biases into the weights"
    calibrated = True

    def _dropped(self, spec: ModelSpec) -> list[str]:
        return [part for part in LINEARS if part in spec.biases and not (self.keep == "qkv" and part in self.keep)]

    def needed(self, spec: ModelSpec) -> bool:
        return bool(self._dropped(spec))

    def change(self, spec: ModelSpec) -> ModelSpec:
        require_plain_layer(spec, self.name)
        dropped = set(self._dropped(spec))
        moved = {"v"} if self.keep == "qkv" and "o" in dropped else set()
        return spec.replace(biases=(spec.biases - dropped) | moved)

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        if notes.ref.kind != "layer" or not self.needed(spec):
            return block
        dropped = self._dropped(spec)
        result = Block(block)
        if "o" in dropped:
            result = _move_to_v(result, spec, notes)
        if "k" in dropped and spec.rope is None and spec.qk_norm is None and calibration is not None:
            notes.drop("k.bias", "does nothing without RoPE", block["k.bias"])
            result = result.without("k.bias")
        staying = self.change(spec).biases
        after = result.without(*(f"{part}.bias" for part in LINEARS if part not in staying))
        if calibration is None:
            for part in dropped:
                notes.drop(f"{part}.bias", "folded into the weights", block[f"{part}.bias"])
            return after
        for norm, parts in _READERS.items():
            biased = [part for part in parts if f"{part}.bias" in result and part not in staying]
            if biased:
                v, residual = _constant(norm, after, spec, notes.ref.index, calibration)
                for part in biased:
                    weight, bias = after[f"{part}.weight"], result[f"{part}.bias"]
                    folded = weight.double() + bias.double()[:, None] * v
                    after[f"{part}.weight"] = folded.to(weight.dtype)
                    notes.drop(f"{part}.bias", "in the weights, but for this much", bias * residual)
        if "down" in dropped:
            notes.drop("down.bias", "in down.weight, as far as the neurons can stand in for it", block["down.bias"])
        before = partial(run_layer, block, spec, notes.ref.index)
        return refit_down(after, self.change(spec), notes.ref.index, calibration, before)


def _move_to_v(block: Block, spec: ModelSpec, notes: Notes) -> Block:
    """o's bias as a bias of v; of heads that share a v, the columns of o are summed."""
    weight, bias = block["o.weight"], block["o.bias"]
    had = block.get("v.bias")
    had = weight.new_zeros(spec.key_value_size) if had is None else had
    if weight.is_meta:
        return Block({**block, "v.bias": had})
    shared = spec.num_heads // spec.num_kv_heads
    columns = weight.double().view(-1, spec.num_kv_heads, shared, spec.head_dim).sum(dim=2).flatten(1)
    gram = columns @ columns.T
    gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()) + 1e-300)
    shift = columns.T @ torch.linalg.solve(gram, bias.double())
    notes.drop("o.bias", "in v, but for this much", bias.double() - columns @ shift)
    return Block({**block, "v.bias": (had.double() + shift).to(had.dtype)})


def _constant(norm: str, block: Block, spec: ModelSpec, layer: int, calibration: Calibration) -> tuple[Tensor, float]:
    """v (D,) in fp64 with v.n near 1 for the normed states n of a layer, and the root mean square of v.n - 1."""
    moments = Moments()
    for rows in chunks(calibration):
        states = calibration.inputs(rows)
        if norm == "mlp_norm":
            states = after_attention(block, spec, layer, states)
        normed = run_norm(block, norm, spec, states)[calibration.mask(rows)]
        moments.add(normed, normed.new_ones(len(normed), 1))
    gram, mean = moments.mean_square(), moments.mean()
    v = moments.solve()[0]
    square = float(v @ gram @ v - 2 * v @ mean) + 1
    return v, max(square, 0.0) ** 0.5
