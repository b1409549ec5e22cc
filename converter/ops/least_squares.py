"""Least squares on activations, in fp64 with a ridge: what the calibrated ops share.

A stream of states has directions that hardly occur (after centring one never does), so every system here gets a
ridge, relative to the mean of the Gram matrix's diagonal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from converter.ops import Calibration

#: Tokens that a fit looks at; more change it less than the ridge does.
TOKENS = 32768
#: Tokens whose activations are held at once.
_CHUNK = 2048


def chunks(calibration: Calibration) -> Iterator[Tensor]:
    """Window numbers, a few at a time, spread evenly over the text."""
    import torch

    count = max(1, min(calibration.count, TOKENS // calibration.length))
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

    def ridged(self, ridge: float) -> Tensor:
        """E[x x^T], with the ridge on its diagonal."""
        assert self.gram is not None
        gram = self.gram / self.count
        gram.diagonal().add_(ridge * float(gram.diagonal().mean()) + 1e-300)
        return gram

    def solve(self, ridge: float) -> Tensor:
        """W (M, D) with W x nearest to y."""
        import torch

        assert self.cross is not None
        solution: Tensor = torch.linalg.solve(self.ridged(ridge), self.cross / self.count)
        return solution.T
