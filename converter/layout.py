"""The two orders of the rows of a rotary head, and the way from one to the other.

RoPE (Su et al. 2021, eq. 34) turns pairs of components of q and k. Which two components make a pair is
a convention that no config states: `interleaved` pairs rows (2i, 2i+1) of a head, `half_split` rows
(i, i + r/2), r being the rotary width. Interleaved -> half-split puts row 2i at i and row 2i+1 at
i + r/2, for the first r rows of every head; the other rows stay.

The order applies to whatever has the head rows of q or k along an axis: weights and biases, per-head
norms (one head of `head_dim`, whatever the number of heads), norms of full width, LoRA's B, DoRA's
magnitudes, per-row quantisation scales. v and o never move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from converter.errors import CheckpointError
from converter.spec import ModelSpec, QKNorm, RopeLayout

if TYPE_CHECKING:
    from torch import Tensor


#: Row numbers: row n becomes what row `order[n]` was.
Rows = npt.NDArray[np.int64]


def other_layout(layout: RopeLayout) -> RopeLayout:
    """The one that is not given."""
    return RopeLayout.HALF_SPLIT if layout is RopeLayout.INTERLEAVED else RopeLayout.INTERLEAVED


def head_order(head_dim: int, rotary_dim: int, to: RopeLayout) -> list[int]:
    """For each row of a head in layout `to`, the row that it is in the other layout."""
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"a rotary width of {rotary_dim} is not an even part of a head of {head_dim}")
    half = rotary_dim // 2
    if to is RopeLayout.HALF_SPLIT:
        turned = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2)]
    else:
        turned = [row for pair in range(half) for row in (pair, pair + half)]
    return turned + list(range(rotary_dim, head_dim))


def row_order(num_heads: int, head_dim: int, rotary_dim: int, to: RopeLayout) -> Rows:
    """`head_order` for all rows of a tensor: row n of the result is row `row_order[n]` of the source."""
    heads = np.arange(num_heads)[:, None] * head_dim
    order: Rows = (heads + np.array(head_order(head_dim, rotary_dim, to))).reshape(-1)
    return order


def swap_rows(
    tensor: Tensor,
    num_heads: int,
    head_dim: int,
    rotary_dim: int,
    to: RopeLayout,
    *,
    name: str = "tensor",
    axis: int = 0,
) -> Tensor:
    """A copy of `tensor` in layout `to`, its `num_heads * head_dim` head rows lying along `axis`.

    q has the query heads, k the key-value heads, and a norm that all heads share has one. Any dtype.
    Raises CheckpointError, naming the tensor, where the rows are others.
    """
    import torch

    check_rows(tuple(tensor.shape), num_heads, head_dim, name=name, axis=axis)
    order = torch.from_numpy(row_order(num_heads, head_dim, rotary_dim, to)).to(tensor.device)
    if tensor.element_size() == 1 and not tensor.is_meta:  # fp8 has no gather of its own
        moved: Tensor = tensor.view(torch.uint8).index_select(axis, order).view(tensor.dtype)
        return moved
    return tensor.index_select(axis, order)


def check_rows(shape: tuple[int, ...], num_heads: int, head_dim: int, *, name: str, axis: int = 0) -> None:
    """Raise CheckpointError where a tensor's axis is not `num_heads * head_dim` long."""
    expected = num_heads * head_dim
    found = shape[axis] if -len(shape) <= axis < len(shape) else 0
    if found != expected:
        raise CheckpointError(
            f"'{name}' of shape {list(shape)} has {found} head rows, and {num_heads} heads of {head_dim} "
            f"make {expected}",
            why="rows that are counted wrongly would be torn out of their heads",
            fix="Check the head counts in the config",
        )


def head_counts(spec: ModelSpec) -> dict[str, int]:
    """How many heads lie along the rows of each role that rotates; a norm that all heads share is one."""
    shared = spec.qk_norm is QKNorm.PER_HEAD
    return {
        "q.weight": spec.num_heads,
        "q.bias": spec.num_heads,
        "q_norm.weight": 1 if shared else spec.num_heads,
        "k.weight": spec.num_kv_heads,
        "k.bias": spec.num_kv_heads,
        "k_norm.weight": 1 if shared else spec.num_kv_heads,
    }
