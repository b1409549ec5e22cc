"""Attention scores before and after a swap: every layer, every head, 256 positions.

The scores are computed twice, from the rows as they were under the old rule of pairs, and from the rows as they are
now under the new one. That proves the permutation, never that the old rule was the right one: `settle` is for
that. The states are random and sparse, so that only a few columns of each weight are read.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from converter.checkpoint import TensorInfo
from converter.errors import UnsupportedError, VerificationError
from converter.rope.layout import head_counts
from converter.rope.moves import Move, rotating_mappings, stored_rows
from converter.source import SourceModel
from converter.spec import ModelSpec, QKNorm, RopeLayout

Array = npt.NDArray[np.float64]
#: Tensor -> the file that its bytes are in, and where they begin.
Places = dict[str, tuple[Path, int]]

POSITIONS = 256
#: Largest difference over the largest score; the sums are the same numbers in another order.
TOLERANCE = 1e-12
_COLUMNS = 16
_QUERIES = 8
_NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def verify_scores(source: SourceModel, before: Places, after: Places, old: RopeLayout, new: RopeLayout) -> float:
    """The largest relative difference of scores, rows `before` under `old` against rows `after` under `new`.

    Raises VerificationError, naming the layer, above TOLERANCE.
    """
    assert source.spec.rope is not None
    largest = 0.0
    for layer in range(source.spec.num_layers):
        if not source.spec.rope.rotates(layer):
            continue
        first, second = (
            _scores(_read_layer(source, layer, places), source.spec, layout, layer)
            for places, layout in ((before, old), (after, new))
        )
        error = float(np.abs(first - second).max() / max(float(np.abs(first).max()), 1e-300))
        if not error <= TOLERANCE:
            raise VerificationError(
                f"after the swap the attention scores of layer {layer} differ by {error:.1e} of the largest",
                why="the rows are not where the new layout has them",
                fix="This is a defect; please report it with the output of inspect",
            )
        largest = max(largest, error)
    return largest


def here(moves: list[Move]) -> Places:
    """The tensors of moves where they lie."""
    return {move.name: (move.file, move.start) for move in moves}


def _read_layer(source: SourceModel, layer: int, places: Places) -> dict[str, Array]:
    """The chosen columns of q and k, and their biases and norms."""
    heads = head_counts(source.spec)
    columns = _columns(source.spec.hidden_size, layer)
    found: dict[str, Array] = {}
    for index, mapping in rotating_mappings(source):
        if index != layer:
            continue
        info = source.checkpoint.tensors[source.names[mapping.names[0]]]
        wide = len(info.shape) == 2
        rows = read_columns(*places[info.name], info, columns if wide else slice(0, 1))
        for role, own in stored_rows(mapping, info.shape[0]).items():
            if role in heads:
                found[role] = rows[own] if wide else rows[own, 0]
    return found


def read_columns(file: Path, start: int, info: TensorInfo, columns: slice) -> Array:
    """Some columns of a tensor whose bytes begin at `start`, in fp64; only their pages are read."""
    shape, dtype = info.shape, info.dtype
    if dtype not in _NUMPY:
        raise UnsupportedError(f"'{info.name}' is of type {dtype}, which is no plain weight", where=str(file))
    mapped = np.memmap(file, np.uint8, "r", start, (info.nbytes,))  # of bytes: any place is aligned
    rows = mapped.reshape(shape[0], -1)
    width = rows.shape[1] // math.prod(shape[1:])
    chosen = np.ascontiguousarray(rows[:, columns.start * width : columns.stop * width]).view(_NUMPY[dtype])
    if dtype == "bfloat16":
        chosen = (chosen.astype(np.uint32) << 16).view(np.float32)
    return chosen.astype(np.float64)


def _columns(hidden: int, layer: int) -> slice:
    """Neighbours, so that few pages are read; others in each layer."""
    count = min(_COLUMNS, hidden)
    first = int(np.random.default_rng(layer).integers(hidden - count + 1))
    return slice(first, first + count)


def _scores(roles: dict[str, Array], spec: ModelSpec, layout: RopeLayout, layer: int) -> Array:
    """(H, queries, POSITIONS) scores of random states, the queries spread over the positions to the last."""
    states = np.random.default_rng(layer + 1).standard_normal((POSITIONS, roles["q.weight"].shape[1]))
    queries = np.linspace(0, POSITIONS - 1, _QUERIES).round().astype(np.int64)
    parts = {}
    for part, positions in (("q", queries), ("k", np.arange(POSITIONS))):
        rows = states[positions] @ roles[f"{part}.weight"].T
        if f"{part}.bias" in roles:
            rows = rows + roles[f"{part}.bias"]
        gain = roles.get(f"{part}_norm.weight")
        if gain is not None and spec.qk_norm is QKNorm.FULL:
            rows = _normed(rows) * gain
        split = rows.reshape(len(positions), -1, spec.head_dim).transpose(1, 0, 2)
        if gain is not None and spec.qk_norm is QKNorm.PER_HEAD:
            split = _normed(split) * gain
        parts[part] = _rotated(split, positions, spec, layout)
    k = np.repeat(parts["k"], spec.num_heads // spec.num_kv_heads, axis=0)
    scores: Array = parts["q"] @ k.transpose(0, 2, 1)
    return scores


def _normed(x: Array) -> Array:
    normed: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)
    return normed


def _rotated(x: Array, positions: npt.NDArray[np.int64], spec: ModelSpec, layout: RopeLayout) -> Array:
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
