"""What the numbers in a tensor give away: NaN, infinities, rows of zeros. Looked at in pieces that stay small."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Elements of a piece: 16 MB of fp32.
_PIECE = 1 << 22


def count_non_finite(tensor: Tensor) -> tuple[int, int]:
    """How many NaN and how many infinities there are."""
    nans = infinities = 0
    for piece in _pieces(torch.view_as_real(tensor) if tensor.is_complex() else tensor):
        low, high = piece.aminmax()
        if not (low.isfinite() and high.isfinite()):
            nans += int(piece.isnan().sum())
            infinities += int(piece.isinf().sum())
    return nans, infinities


def count_dead_rows(matrix: Tensor) -> int:
    """How many rows of (N, D) are zero throughout."""
    return sum(int((~piece.any(dim=1)).sum()) for piece in _pieces(matrix))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """As many rows at a time as are a piece; 8-bit floats as fp32, for arithmetic."""
    rows = tensor if tensor.ndim > 1 else tensor.reshape(-1, 1)
    for piece in rows.split(max(1, _PIECE * len(rows) // max(1, rows.numel()))):
        yield piece.to(torch.float32) if piece.element_size() == 1 else piece
