"""Fold the final norm's bias b into the head W, which has no bias of its own. Lossy, calibrated.

The head should compute W (h + b) from h = g x/rms(x). Two things together come close to it.

A constant c on the stream that the final norm reads, put into the bias of the last layer's `down`, which no other layer
sees: g (x + c)/rms(x) = h + g c/rms(x), so c = rho b/g gives b rho/rms(x). rho makes that closest to b over
real states: E[1/rms] / E[1/rms^2]. c is centred, as the stream is.

The rest is a multiple of W b that changes little from state to state. A constant is not linear in h, but over
the states that a model really has, v.h can be close to what is missing, so

    W' = W + (W b) v^T   gives   W' h = W h + (v.h) W b.

What is left over moves the logits along r = W b only, so its cost is a convex function of one number a state,
with slope E_q[r] - E_p[r] and curvature Var_q[r], where p are the right probabilities and q those of the result.
v is found by Newton's method on the summed KL; ridge and fp64, because a centred stream makes the Gram matrix of h
singular. Put the op last: a layer that is fitted to the source afterwards would take c away again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from converter.blocks import HEAD, Block
from converter.ops import Calibration, Notes, Op, op, require
from converter.ops.least_squares import require_plain_layer
from converter.ops.post_ln_to_pre_ln import last_norm
from converter.reference import run_final_norm, run_layer
from converter.spec import ModelSpec

#: States that the fit looks at; more change the result less than the ridge does.
_STATES = 32768
#: States whose logits are held at once, and rows that are taken to fp64 at once.
_CHUNK, _ROWS = 64, 1024
#: Windows that pass the last layer at once.
_WINDOWS = 8
#: Gains below this part of the largest would ask for a shift out of proportion.
_SMALL_GAIN = 1e-3
#: How much of c is tried, and on how many states: a large c would also change the rms that it is divided by.
_PARTS, _SAMPLE = (0.0, 0.5, 1.0), 2048
_SHIFT = "shift of the stream"


@op
@dataclass(frozen=True)
class FoldFinalNormBias(Op):
    """Fold the final norm's bias into the head by a vector that is nearly constant on real states."""

    ridge: float = 1e-6
    iterations: int = 4

    name = "fold_final_norm_bias"
    summary = "fold the final norm's bias into the head"
    calibrated = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ridge) and self.ridge > 0):
            raise ValueError("must be a number above 0")

    def needed(self, spec: ModelSpec) -> bool:
        return spec.final_norm_bias

    def change(self, spec: ModelSpec) -> ModelSpec:
        require(
            not spec.tied_head or not spec.final_norm_bias,
            self.name,
            "the head is tied to the embeddings, and is to change",
            "Put untie_head before it",
        )
        if spec.final_norm_bias:
            require_plain_layer(spec, self.name)
            require("head" not in spec.biases, self.name, "the head has a bias, which this op does not look at")
        return spec.replace(final_norm_bias=False)

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        last = notes.ref.kind == "layer" and notes.ref.index == spec.num_layers - 1
        if last and spec.final_norm_bias and "down.bias" in block and calibration is not None:
            return self._shift_stream(block, spec, notes, calibration)
        if notes.ref.kind != "head" or not spec.final_norm_bias:
            return block
        bias = block["final_norm.bias"]
        notes.drop("final_norm.bias", "in the last down.bias and in head.weight, as far as they can hold it", bias)
        result = block.without("final_norm.bias")
        if calibration is None:
            return result
        return self._fold(block, spec, notes, calibration)

    def _shift_stream(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration) -> Block:
        """The last layer with c in the bias of `down`; with as much of it as makes the KL smallest."""
        states = torch.cat(
            [
                run_layer(block, spec, notes.ref.index, calibration.inputs(rows))[calibration.mask(rows)]
                for rows in torch.arange(calibration.count).split(_WINDOWS)
            ]
        )
        inverse = (states.double().square().mean(dim=-1) + spec.norm_eps).rsqrt()
        rho = float(inverse.mean() / inverse.square().mean())
        head_block = calibration.source_block(HEAD)
        if "final_norm.weight" not in head_block:  # a post-LN source: its last norm has become the final one
            head_block = Block({**head_block, **last_norm(spec.num_layers, calibration)})
        sample = states[:: max(1, len(states) // _SAMPLE)]
        shifts = [part * rho for part in _PARTS]
        costs = [self._fit(head_block, spec, sample, shift)[1] for shift in shifts]
        best = shifts[costs.index(min(costs))]
        notes.facts[_SHIFT] = best
        bias = block["down.bias"]
        return Block({**block, "down.bias": bias + (best * _direction(head_block)).to(bias.dtype)})

    def _fold(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration) -> Block:
        """The head with what the shifted stream does not give it."""
        states = torch.cat(list(calibration.batches()))
        states = states[:: max(1, len(states) // _STATES)]
        shift = notes.earlier.get(_SHIFT, 0.0)
        original = states - (shift * _direction(block)).to(states.dtype)
        v, notes.facts["KL of the fold"] = self._fit(block, spec, original, shift)
        head = block["head.weight"]
        folded = torch.addr(head, _logits_of_bias(block), v.to(head.dtype))
        return Block({**block.without("final_norm.bias"), "head.weight": folded})

    def _fit(self, head_block: Block, spec: ModelSpec, original: Tensor, shift: float) -> tuple[Tensor, float]:
        """v (D,) in fp64 for states (N, D) that are to be shifted, and the mean KL, nats per token, that is left."""
        bias, head = head_block["final_norm.bias"], head_block["head.weight"]
        r = _logits_of_bias(head_block)
        plain, after = head_block.without("final_norm.bias"), spec.replace(final_norm_bias=False)
        wanted = run_final_norm(plain, after, original) + bias
        states = run_final_norm(plain, after, original + (shift * _direction(head_block)).to(original.dtype))
        v = states.new_zeros(states.shape[1], dtype=torch.float64)
        for _ in range(self.iterations):
            slopes, curvatures, _ = self._moments(states, wanted, head, r, v)
            hessian, gradient = v.new_zeros(len(v), len(v)), torch.zeros_like(v)
            for rows, slope, curvature in zip(
                *(each.split(_ROWS) for each in (states, slopes, curvatures)), strict=True
            ):
                h = rows.double()
                hessian += h.T @ (h * curvature[:, None]) / len(states)
                gradient += slope @ h / len(states)
            hessian.diagonal().add_(self.ridge * hessian.diagonal().mean())
            v = v - torch.linalg.solve(hessian, gradient)
        return v, float(self._moments(states, wanted, head, r, v)[2].mean())

    @staticmethod
    def _moments(states: Tensor, wanted: Tensor, head: Tensor, r: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Slope E_q[r] - E_p[r], curvature Var_q[r] and the KL itself of each state, all (N,)."""
        slopes, curvatures, kls = [], [], []
        for start in range(0, len(states), _CHUNK):
            part = slice(start, start + _CHUNK)
            log_p = (wanted[part] @ head.T).log_softmax(dim=-1)
            along = (states[part].double() @ v).to(head.dtype)
            log_q = (states[part] @ head.T + along[:, None] * r).log_softmax(dim=-1)
            p, q = log_p.exp(), log_q.exp()
            mean_q = q @ r
            slopes.append(mean_q - p @ r)
            curvatures.append((q @ r.square() - mean_q.square()).clamp_min(1e-12))
            kls.append((p * (log_p - log_q)).sum(dim=-1))
        return torch.cat(slopes).double(), torch.cat(curvatures).double(), torch.cat(kls).double()


def _logits_of_bias(head_block: Block) -> Tensor:
    """W b (V,), summed in fp64, a few rows at a time."""
    bias = head_block["final_norm.bias"].double()
    return torch.cat([(rows.double() @ bias).to(rows.dtype) for rows in head_block["head.weight"].split(_ROWS)])


def _direction(head_block: Block) -> Tensor:
    """C (b/g) in fp64, the direction of c; a gain of zero lets nothing through, so nothing is put there."""
    gain, bias = head_block["final_norm.weight"].double(), head_block["final_norm.bias"].double()
    quotient = torch.where(gain.abs() > _SMALL_GAIN * gain.abs().max(), bias / gain, torch.zeros_like(gain))
    return quotient - quotient.mean()
