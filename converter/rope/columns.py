"""Some columns of q and k, layer by layer, as numpy arrays: what detection and the check of scores look at.

Plain safetensors are read by their bytes, in pieces, with no tensor library; other containers by their own reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.errors import CheckpointError, UnsupportedError
from converter.families.rotating import Opened, rotating_mappings, stored_rows
from converter.files.checkpoint import TensorInfo
from converter.layout import head_counts
from converter.rope.direct_io import PIECE, mapped

Columns = npt.NDArray[np.floating[Any]]
#: Tensor -> the file that its bytes are in, and where they begin.
Places = Mapping[str, tuple[Path, int]]

_NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def layer_columns(
    source: Opened, columns: Callable[[int], slice], places: Places | None = None
) -> Iterator[tuple[int, dict[str, Columns]]]:
    """Each rotating layer with its roles of q and k: `columns(layer)` of the weights, biases and norms whole.

    `places` says where the bytes are, if not in the checkpoint. Raises CheckpointError where a value is not finite.
    """
    heads = head_counts(source.spec)
    layers: dict[int, dict[str, Columns]] = {}
    for layer, mapping in rotating_mappings(source):
        if layer not in layers:
            yield from layers.items()
            layers = {layer: {}}
        info = source.checkpoint.tensors[source.names[mapping.names[0]]]
        wide = len(info.shape) == 2
        rows = _read(source, info, columns(layer) if wide else slice(0, 1), places)
        for role, own in stored_rows(mapping, info.shape[0]).items():
            if role in heads:
                layers[layer][role] = rows[own] if wide else rows[own, 0]
    yield from layers.items()


def _read(source: Opened, info: TensorInfo, columns: slice, places: Places | None) -> Columns:
    """(rows, columns) of one tensor, in fp32, or fp64 where it is stored so."""
    if info.dtype not in _NUMPY:
        raise UnsupportedError(
            f"'{info.name}' is quantised",
            where=str(info.file),
            why=f"it is stored as {info.dtype}, so its values are not the weights",
        )
    start = source.checkpoint.start(info.name)
    if places is not None:
        chosen = _by_bytes(*places[info.name], info, columns)
    elif start is not None:
        chosen = _by_bytes(info.file, start, info, columns)
    else:
        tensor = source.checkpoint.read(info.name)
        chosen = tensor.reshape(info.shape[0], -1)[:, columns].float().numpy()
    if not np.isfinite(chosen).all():
        raise CheckpointError(
            f"tensor '{info.name}' contains NaN or Inf",
            where=str(info.file),
            tensor=info.name,
            fix="Take a checkpoint from before training diverged",
        )
    return chosen


def _by_bytes(file: Path, start: int, info: TensorInfo, columns: slice) -> Columns:
    rows, kind = info.shape[0], np.dtype(_NUMPY[info.dtype])
    row_bytes = info.nbytes // rows
    first, last, _ = columns.indices(math.prod(info.shape[1:]))
    chosen = np.empty((rows, last - first), kind)
    step = max(1, PIECE // row_bytes)
    with file.open("rb") as handle:
        for row in range(0, rows, step):
            end = min(row + step, rows)
            piece = mapped(handle.fileno(), start + row * row_bytes, start + end * row_bytes).reshape(-1, row_bytes)
            chosen[row:end].view(np.uint8)[:] = piece[:, first * kind.itemsize : last * kind.itemsize]
    if info.dtype == "bfloat16":
        return (chosen.astype(np.uint32) << 16).view(np.float32)
    return chosen if info.dtype == "float64" else chosen.astype(np.float32)
