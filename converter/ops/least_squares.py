"""Least squares on activations, in fp64 with a ridge: what the calibrated ops share.

A stream of states has directions that hardly occur (after centring one never does), so every system here gets a
ridge, relative to the mean of the Gram matrix's diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from converter.blocks import Block
from converter.ops import Calibration, require
from converter.reference import after_attention, run_linear, run_neurons, run_norm
from converter.spec import ModelSpec

#: Tokens that a fit looks at; more change it less than the ridge does.
TOKENS = 32768
#: On the diagonal of a Gram matrix, relative to its mean.
RIDGE = 1e-6
#: Tokens whose activations are held at once.
_CHUNK = 2048


def chunks(calibration: Calibration, tokens: int = TOKENS) -> Iterator[Tensor]:
    """Window numbers, a few at a time, spread evenly over the text."""
    count = max(1, min(calibration.count, tokens // calibration.length))
    rows = torch.arange(count) * calibration.count // count
    yield from rows.split(max(1, _CHUNK // calibration.length))


class Moments:
    """E[x x^T] and E[x y^T] of rows x (N, D) and y (N, M), added up in fp64."""

    def __init__(self) -> None:
        self.count = 0
        self.gram: Tensor | None = None
        self.cross: Tensor | None = None

    def add(self, x: Tensor, y: Tensor | None = None) -> None:
        """More rows."""
        x = x.double()
        self.count += len(x)
        self.gram = x.T @ x if self.gram is None else self.gram.addmm_(x.T, x)
        if y is not None:
            self.cross = x.T @ y.double() if self.cross is None else self.cross.addmm_(x.T, y.double())

    def mean_square(self) -> Tensor:
        """E[x x^T]."""
        assert self.gram is not None
        return self.gram / self.count

    def mean(self) -> Tensor:
        """E[x], of moments with y = 1."""
        assert self.cross is not None
        return self.cross[:, 0] / self.count

    def covariance(self) -> Tensor:
        """E[x x^T] - E[x] E[x]^T, of moments with y = 1."""
        mean = self.mean()
        return self.mean_square().addr_(mean, mean, alpha=-1)

    def solve(self) -> Tensor:
        """W (M, D) with W x nearest to y. It consumes the moments: a Gram matrix of neurons is as large as a layer."""
        assert self.gram is not None
        assert self.cross is not None
        gram, cross = self.gram.div_(self.count), self.cross.div_(self.count)
        self.gram = self.cross = None
        gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()) + 1e-300)
        columns = gram.mT  # the same matrix, in the order that LAPACK factors in place
        pivots = torch.empty(0, dtype=torch.int32, device=columns.device)
        factors, pivots = torch.linalg.lu_factor(columns, out=(columns, pivots))
        solution: Tensor = torch.linalg.lu_solve(factors, pivots, cross)
        return solution.T


def refit(block: Block, linear: str, pairs: Iterable[tuple[Tensor, Tensor]]) -> Block:
    """`block` with a linear, and its bias where it has one, fitted to pairs of inputs (N, I) and outputs (N, O).

    What is fitted is the change of the linear, so that the ridge draws to it as it is.
    """
    moments, weight, bias = Moments(), block[f"{linear}.weight"], block.get(f"{linear}.bias")
    for inputs, outputs in pairs:
        missing = outputs - run_linear(block, linear, inputs)
        moments.add(inputs if bias is None else _with_ones(inputs), missing)
    change = moments.solve()
    fitted = {f"{linear}.weight": (weight.double() + change[:, : weight.shape[1]]).to(weight.dtype)}
    if bias is not None:
        fitted[f"{linear}.bias"] = (bias.double() + change[:, -1]).to(bias.dtype)
    return Block({**block, **fitted})


def require_plain_layer(spec: ModelSpec, op_name: str) -> None:
    """Refuse layers that do not end with x + MLP(norm(x)), x being the states behind the attention."""
    post_ln = "the norms stand after the sublayers (post-LN)"
    require(spec.pre_norm, op_name, post_ln, "Put post_ln_to_pre_ln before it, as recipe postln-to-llama does")
    parallel = "attention and MLP read the same states (parallel residual), which no op changes"
    require(not spec.parallel_residual, op_name, parallel)
    scaled = spec.sandwich_norm or spec.residual_scale != 1
    require(not scaled, op_name, "the MLP's output is not just added to the residual stream")


def refit_down(
    block: Block, spec: ModelSpec, layer: int, calibration: Calibration, wanted: Callable[[Tensor], Tensor]
) -> Block:
    """`block` with `down` refitted, so that the layer makes of states what is `wanted`."""

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in chunks(calibration):
            states, inside = calibration.inputs(rows), calibration.mask(rows)
            right = wanted(states)
            states = after_attention(block, spec, layer, states)
            neurons = run_neurons(block, spec, run_norm(block, "mlp_norm", spec, states))
            yield neurons[inside], (right - states)[inside]

    return refit(block, "down", pairs())


def _with_ones(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
