"""Least squares on activations, in fp64 with a ridge: what the calibrated ops share.

A stream of states has directions that hardly occur (after centring one never does), so every system here gets a
ridge, relative to the mean of the Gram matrix's diagonal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from converter.ops import Block, Calibration
    from converter.spec import ModelSpec

#: Tokens that a fit looks at; more change it less than the ridge does.
TOKENS = 32768
#: On the diagonal of a Gram matrix, relative to its mean.
RIDGE = 1e-6
#: Tokens whose activations are held at once.
_CHUNK = 2048


def chunks(calibration: Calibration, tokens: int = TOKENS) -> Iterator[Tensor]:
    """Window numbers, a few at a time, spread evenly over the text."""
    import torch

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

    def ridged(self) -> Tensor:
        """E[x x^T], with the ridge on its diagonal."""
        assert self.gram is not None
        gram = self.gram / self.count
        gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()) + 1e-300)
        return gram

    def solve(self) -> Tensor:
        """W (M, D) with W x nearest to y."""
        import torch

        assert self.cross is not None
        solution: Tensor = torch.linalg.solve(self.ridged(), self.cross / self.count)
        return solution.T


def after_attention(block: Block, spec: ModelSpec, layer: int, states: Tensor) -> Tensor:
    """States between the attention and the MLP of a layer whose norms come first and whose MLP comes second."""
    from converter.model import run_attention, run_norm

    return states + run_attention(block, spec, layer, run_norm(block, "attn_norm", spec, states))


def refit_down(
    block: Block, spec: ModelSpec, before: Block, before_spec: ModelSpec, layer: int, calibration: Calibration
) -> Block:
    """`block` with `down`, and its bias where it has one, fitted to what the layer gave `before`.

    Both are given the same states. What is fitted is the change of `down`, so that the ridge draws to it as it is.
    """
    from converter.model import run_layer, run_neurons, run_norm

    moments, down, bias = Moments(), block["down.weight"], block.get("down.bias")
    for rows in chunks(calibration):
        states, inside = calibration.inputs(rows), calibration.mask(rows)
        wanted = run_layer(before, before_spec, layer, states)
        states = after_attention(block, spec, layer, states)
        neurons = run_neurons(block, spec, run_norm(block, "mlp_norm", spec, states))[inside]
        missing = (wanted - states)[inside] - neurons @ down.T
        if bias is not None:
            missing, neurons = missing - bias, _with_ones(neurons)
        moments.add(neurons, missing)
    change = moments.solve()
    result = block.but(down_weight=(down.double() + change[:, : down.shape[1]]).to(down.dtype))
    return result if bias is None else result.but(down_bias=(bias.double() + change[:, -1]).to(bias.dtype))


def _with_ones(rows: Tensor) -> Tensor:
    import torch

    return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
