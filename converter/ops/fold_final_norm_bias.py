"""Fold the final norm's bias b into the head W, which has no bias of its own. Lossy, calibrated.

The head should compute W (h + b) from h = g x/rms(x). A constant is not linear in h, but over the
states that a model really has, some v makes v.h close to 1, so

    W' = W + (W b) v^T   gives   W' h = W h + (v.h) W b.

What is left over, s = v.h - 1, moves the logits along r = W b only, so its cost is a convex function of
one number a state: KL(s) with slope E_q[r] - E_p[r] and curvature Var_q[r], where p are the right
probabilities and q those after the shift. v is found by Newton's method on the summed KL, started at
the plain least squares; ridge and fp64, because a centred stream makes the Gram matrix of h singular.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converter.ops import Block, Calibration, Notes, Op, op, require
from converter.spec import BlockRef, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

#: States that the fit looks at; more change the result less than the ridge does.
_STATES = 32768
#: States whose logits are held at once.
_CHUNK = 256


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

    def exact(self, spec: ModelSpec) -> bool:
        return False

    def needed(self, spec: ModelSpec) -> bool:
        return spec.final_norm_bias

    def change(self, spec: ModelSpec) -> ModelSpec:
        require(
            not spec.tied_head or not spec.final_norm_bias,
            self.name,
            "the head is tied to the embeddings, and is to change",
            "Put untie_head before it",
        )
        return spec.replace(final_norm_bias=False)

    def apply(
        self, block: Block, spec: ModelSpec, ref: BlockRef, notes: Notes, calibration: Calibration | None
    ) -> Block:
        if ref.kind != "head" or not spec.final_norm_bias:
            return block
        bias, head = block["final_norm.bias"], block["head.weight"]
        notes.drop("final_norm.bias", "in head.weight, as far as a linear map can hold a constant", bias)
        result = block.without("final_norm.bias")
        if calibration is None:
            return result
        states = _normed_states(result, spec.replace(final_norm_bias=False), calibration)
        shift = (head.double() @ bias.double()).to(head.dtype)
        v, residual = self._fit(states, head, bias, shift)
        notes.facts["rms of v.h - 1"] = residual
        return result.but(head_weight=head + shift[:, None] * v.to(head.dtype))

    def _fit(self, states: Tensor, head: Tensor, bias: Tensor, shift: Tensor) -> tuple[Tensor, float]:
        """v (D,) in fp64, and the root mean square of v.h - 1."""
        import torch

        h = states.double()
        gram = h.T @ h / len(h)
        ridge = self.ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        v = torch.linalg.solve(gram + ridge, h.mean(dim=0))
        for _ in range(self.iterations):
            slope, curvature = self._moments(states, head, bias, shift, h @ v - 1)
            weighted = h.T @ (h * curvature[:, None]) / len(h)
            scale = self.ridge * weighted.diagonal().mean()
            step = torch.linalg.solve(
                weighted + scale * torch.eye(len(weighted), dtype=h.dtype, device=h.device),
                (h * slope[:, None]).mean(dim=0),
            )
            v = v - step
        return v, float((h @ v - 1).square().mean().sqrt())

    @staticmethod
    def _moments(states: Tensor, head: Tensor, bias: Tensor, shift: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """Slope E_q[r] - E_p[r] and curvature Var_q[r] of the KL of each state, both (N,)."""
        import torch

        slopes, curvatures = [], []
        for rows, offsets in zip(states.split(_CHUNK), s.split(_CHUNK), strict=True):
            logits = (rows + bias) @ head.T
            p = logits.softmax(dim=-1)
            q = (logits + offsets[:, None].to(logits.dtype) * shift).softmax(dim=-1)
            mean_q = q @ shift
            slopes.append(mean_q - p @ shift)
            curvatures.append((q @ shift.square() - mean_q.square()).clamp_min(1e-12))
        return torch.cat(slopes).double(), torch.cat(curvatures).double()


def _normed_states(head_block: Block, spec: ModelSpec, calibration: Calibration) -> Tensor:
    """What the head reads, (N, D), without the bias; spread evenly over the calibration text."""
    import torch

    from converter.model import run_final_norm

    def batches() -> Iterator[Tensor]:
        for states in calibration.batches():
            yield run_final_norm(head_block, spec, states)

    states = torch.cat(list(batches()))
    stride = max(1, len(states) // _STATES)
    return states[::stride]
