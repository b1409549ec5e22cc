"""Attention scores before and after a swap: every layer, every head, 256 positions.

The scores are computed twice, from the rows as they were under the old rule of pairs, and from the rows as they are
now under the new one. That proves the permutation, never that the old rule was the right one: `settle` is for
that. The states are random and sparse, so that only a few columns of each weight are read.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from converter.errors import VerificationError
from converter.families.opened import SourceModel
from converter.rope.columns import Columns, Places, layer_columns
from converter.spec import ModelSpec, QKNorm, RopeLayout

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
#: Layer -> role -> the columns that are looked at.
Rows = dict[int, dict[str, Columns]]

POSITIONS = 256
#: Largest difference over the largest score; the sums are the same numbers in another order.
TOLERANCE = 1e-12
_COLUMNS = 16
_QUERIES = 8


def read_rows(source: SourceModel, places: Places | None = None) -> Rows:
    """What the scores are computed from, read from the checkpoint, or from `places`."""
    return dict(layer_columns(source, lambda layer: _columns(source.spec.hidden_size, layer), places))


def compare_scores(spec: ModelSpec, before: Rows, old: RopeLayout, after: Rows, new: RopeLayout) -> float:
    """The largest relative difference of scores, rows `before` under `old` against rows `after` under `new`.

    Raises VerificationError, naming the layer, above TOLERANCE.
    """
    largest = 0.0
    with threadpool_limits(1):  # the products are small: threads would only wait for each other
        for layer in before:
            first = _scores(before[layer], spec, old, layer)
            second = _scores(after[layer], spec, new, layer)
            error = float(np.abs(first - second).max() / max(float(np.abs(first).max()), 1e-300))
            if not error <= TOLERANCE:
                raise VerificationError(
                    f"after the swap the attention scores of layer {layer} differ by {error:.1e} of the largest",
                    why="the rows are not where the new layout has them",
                    fix="This is a defect; please report it with the output of inspect",
                )
            largest = max(largest, error)
    return largest


def _columns(hidden: int, layer: int) -> slice:
    """Neighbours, so that few pages are read; others in each layer."""
    count = min(_COLUMNS, hidden)
    first = int(np.random.default_rng(layer).integers(hidden - count + 1))
    return slice(first, first + count)


def _scores(roles: dict[str, Columns], spec: ModelSpec, layout: RopeLayout, layer: int) -> Array:
    """(K, H/K * queries, POSITIONS) scores of random states, the queries spread over the positions to the last."""
    states = np.random.default_rng(layer + 1).standard_normal((POSITIONS, roles["q.weight"].shape[1]))
    queries = np.linspace(0, POSITIONS - 1, _QUERIES).round().astype(np.int64)
    q = _heads("q", roles, states[queries], queries, spec, layout)
    k = _heads("k", roles, states, np.arange(POSITIONS), spec, layout)
    scores: Array = q.reshape(spec.num_kv_heads, -1, spec.head_dim) @ k.transpose(0, 2, 1)
    return scores


def _heads(
    part: str, roles: dict[str, Columns], states: Array, positions: Ints, spec: ModelSpec, layout: RopeLayout
) -> Array:
    """(heads, T, d) of q or k, with its bias and norm, rotated."""
    rows = states @ roles[f"{part}.weight"].T.astype(np.float64)
    if f"{part}.bias" in roles:
        rows = rows + roles[f"{part}.bias"]
    gain = roles.get(f"{part}_norm.weight")
    if gain is not None and spec.qk_norm is QKNorm.FULL:
        rows = _normed(rows) * gain
    split = rows.reshape(len(positions), -1, spec.head_dim).transpose(1, 0, 2)
    if gain is not None and spec.qk_norm is QKNorm.PER_HEAD:
        split = _normed(split) * gain
    return _rotated(split, positions, spec, layout)


def _normed(x: Array) -> Array:
    normed: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)
    return normed


def _rotated(x: Array, positions: Ints, spec: ModelSpec, layout: RopeLayout) -> Array:
    """(H, T, d), each pair as a complex number turned by its angle. The factors of scaled RoPE move no rows."""
    assert spec.rope is not None
    width = spec.rope.rotary_dim
    angles = np.outer(positions, spec.rope.theta ** (-np.arange(0, width, 2) / width))
    first, second = (
        (slice(0, width, 2), slice(1, width, 2))
        if layout is RopeLayout.INTERLEAVED
        else (slice(0, width // 2), slice(width // 2, width))
    )
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    result = x.copy()
    result[..., first], result[..., second] = turned.real, turned.imag
    return result
