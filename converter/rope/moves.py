"""Which rows of which stored tensors change places in a swap, byte by byte.

A stored tensor may hold q, k and more (fused qkv), so its order is found by sending the numbers of its
rows through the family's mapping. Rows never leave their unit (a head, or a head's q, k and v), so a tensor is
moved a few megabytes at a time, whatever its size, and no tensor library is needed for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.checkpoint import Checkpoint
from converter.errors import CheckpointError, UnsupportedError
from converter.mapping import Direct, TensorMapping
from converter.rope.layout import check_rows, head_counts, row_order
from converter.safetensors_file import SafetensorsFile
from converter.source import SourceModel
from converter.spec import BlockRef, ModelSpec, RopeLayout

Rows = npt.NDArray[np.int64]

#: Bytes that are moved at once.
_CHUNK = 8 << 20


@dataclass(frozen=True)
class Move:
    """The rows of one stored tensor: row n becomes what row `order[n]` was."""

    name: str
    file: Path
    start: int
    row_bytes: int
    order: Rows

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return self.row_bytes * len(self.order)

    def chunks(self) -> Iterator[tuple[int, int, Rows]]:
        """(offset in the tensor, bytes, order within) of pieces that no row leaves."""
        edges = unit_edges(self.order)
        first = 0
        for last in range(1, len(edges)):
            full = (edges[last] - edges[first]) * self.row_bytes >= _CHUNK or last == len(edges) - 1
            if full:
                start, end = int(edges[first]), int(edges[last])
                yield start * self.row_bytes, (end - start) * self.row_bytes, self.order[start:end] - start
                first = last

    def moved(self, data: bytes | bytearray, order: Rows) -> npt.NDArray[np.uint8]:
        """The bytes of one chunk in the new order."""
        moved: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8).reshape(len(order), self.row_bytes)[order]
        return moved


def unit_edges(order: Rows) -> Rows:
    """Row numbers 0, ..., n at which no row crosses: before each all smaller rows are complete."""
    reach = np.maximum.accumulate(order)
    return np.concatenate([[0], np.flatnonzero(reach == np.arange(len(order))) + 1])


def stored_order(mapping: TensorMapping, spec: ModelSpec, to: RopeLayout, rows: int, name: str) -> Rows | None:
    """The order of the rows of a stored tensor in layout `to`; None where it holds nothing that rotates."""
    assert spec.rope is not None
    heads = head_counts(spec)
    if not any(role in heads for role in mapping.roles):
        return None
    held = stored_rows(mapping, rows)
    order = np.arange(rows)
    for role, places in held.items():
        if role in heads:
            count = heads[role]
            check_rows((len(places),), count, spec.head_dim, name=name)
            order[places] = places[np.array(row_order(count, spec.head_dim, spec.rope.rotary_dim, to))]
    return order


def stored_rows(mapping: TensorMapping, rows: int) -> dict[str, Rows]:
    """Role -> the rows of the stored tensor that it is."""
    if type(mapping) is Direct:
        return {mapping.role: np.arange(rows)}
    if getattr(mapping, "transposed", False) or len(mapping.names) != 1:
        raise UnsupportedError(f"'{mapping.names[0]}' does not have head rows as it is stored")
    import torch

    numbers = torch.arange(rows)
    parts = mapping.to_roles(numbers)
    return {role: part.reshape(-1).numpy() for role, part in zip(mapping.roles, parts, strict=True)}


def rotating_mappings(source: SourceModel) -> Iterator[tuple[int, TensorMapping]]:
    """Layer and mapping of every tensor that a swap touches."""
    rope = source.spec.rope
    assert rope is not None
    heads = head_counts(source.spec)
    for index in range(source.spec.num_layers):
        if rope.rotates(index):
            for mapping in source.family.mappings(source.spec, BlockRef("layer", index)):
                if any(role in heads for role in mapping.roles):
                    yield index, mapping


def plan_moves(source: SourceModel, to: RopeLayout) -> list[Move]:
    """Every tensor that a swap to layout `to` touches; raises for files whose bytes cannot be addressed."""
    files = {file: _addressable(file) for file in source.checkpoint.files}
    moves = []
    for _, mapping in rotating_mappings(source):
        for bare in mapping.names:
            info = source.checkpoint.tensors[source.names[bare]]
            order = stored_order(mapping, source.spec, to, info.shape[0], info.name)
            if order is not None:
                start, nbytes = files[info.file].span(info.raw_name)
                moves.append(Move(info.name, info.file, start, nbytes // info.shape[0], order))
    return moves


def _addressable(file: Path) -> SafetensorsFile:
    if file.suffix != ".safetensors":
        raise UnsupportedError(
            "rows are moved in safetensors files only, and this is a pickle",
            where=str(file),
            fix="Write it as safetensors first, with `converter convert`, or with save_pretrained",
        )
    return SafetensorsFile(file)


#: What quantisers put in the place of a weight or beside it.
_QUANTISED = (
    "qweight", "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_packed",
    "weight_shape", "weight_g_idx", "input_scale", "SCB", "weight_format", "absmax", "quant_map", "nested_absmax",
)  # fmt: skip
_ATTENTION = (
    "q_proj", "k_proj", "qkv_proj", "query_key_value", "c_attn", "wq", "wk", "Wqkv", "in_proj", "attn_q", "attn_k",
)  # fmt: skip
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


def refuse_quantised(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose q or k is quantised: the rows of several tensors would have to move as one."""
    for name, info in checkpoint.tensors.items():
        parts = name.split(".")
        ours = any(part in _ATTENTION for part in parts)
        beside = parts[-1] in _QUANTISED or any(part in ("quant_state", "absmax") for part in parts[-2:])
        if ours and (beside or (parts[-1] == "weight" and info.dtype not in _FLOATS)):
            raise UnsupportedError(
                f"'{name}' {list(info.shape)} of {info.dtype} is part of a quantised q or k",
                where=str(info.file),
                why="rows, scales and zeros would have to move together, and packed rows cannot be moved one by one",
                fix="Swap the unquantised checkpoint, and quantise the result",
            )


def write_move(move: Move, source: int, target: int, *, source_start: int | None = None) -> None:
    """Move one tensor from open file `source` (at `source_start`) to its place in open file `target`."""
    start = move.start if source_start is None else source_start
    for offset, size, order in move.chunks():
        data = _pread(source, size, start + offset)
        _pwrite(target, move.moved(data, order), move.start + offset)


def _pread(handle: int, size: int, offset: int) -> bytes:
    data = os.pread(handle, size, offset)
    while len(data) < size:  # one call reads 2 GiB at most, and a file may have become shorter
        more = os.pread(handle, size - len(data), offset + len(data))
        if not more:
            raise CheckpointError("a file became shorter while it was read")
        data += more
    return data


def _pwrite(handle: int, data: Any, offset: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written


def total_bytes(moves: Iterable[Move]) -> int:
    """Bytes of all tensors that move."""
    return sum(move.nbytes for move in moves)
