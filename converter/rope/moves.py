"""Which rows of which stored tensors change places in a swap, byte by byte.

Rows never leave their unit (a head, or a head's q, k and v), so a tensor is moved a few megabytes at a time,
whatever its size, and no tensor library is needed for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from converter.errors import UnsupportedError
from converter.families.opened import SourceModel
from converter.families.rotating import stored_orders
from converter.files.checkpoint import Checkpoint
from converter.layout import Rows
from converter.rope.direct_io import PIECE, Bytes, NewFile, mapped, write_at
from converter.spec import RopeLayout


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

    def chunks(self) -> Iterator[tuple[int, Rows]]:
        """(offset in the tensor, order within) of pieces that no row leaves, of PIECE bytes where units allow."""
        edges = unit_edges(self.order)
        first = 0
        while first < len(edges) - 1:
            most = edges[first] + PIECE // self.row_bytes
            last = max(first + 1, int(np.searchsorted(edges, most, side="right")) - 1)
            start, end = int(edges[first]), int(edges[last])
            yield start * self.row_bytes, self.order[start:end] - start
            first = last

    def copy(self, source: int, target: NewFile) -> None:
        """The rows in their new order, as the next bytes of a new file."""
        for offset, order in self.chunks():
            self._gather(source, self.start + offset, order, target.room(len(order) * self.row_bytes))

    def apply(self, target: int, source: int, source_start: int, buffer: Bytes) -> None:
        """Write the rows in place into open file `target`, from their old order in `source` at `source_start`.

        The two may be one, for no chunk is read after it was written. `buffer` is memory to work in.
        """
        for offset, order in self.chunks():
            size = len(order) * self.row_bytes
            moved = buffer[:size] if size <= len(buffer) else np.empty(size, np.uint8)
            self._gather(source, source_start + offset, order, moved)
            write_at(target, moved, self.start + offset)

    def _gather(self, source: int, start: int, order: Rows, out: Bytes) -> None:
        rows = mapped(source, start, start + len(out)).reshape(-1, self.row_bytes)
        np.take(rows, order, axis=0, out=out.reshape(rows.shape), mode="clip")  # "raise" would buffer the result


def unit_edges(order: Rows) -> Rows:
    """Row numbers 0, ..., n at which no row crosses: before each all smaller rows are complete."""
    reach = np.maximum.accumulate(order)
    return np.concatenate([[0], np.flatnonzero(reach == np.arange(len(order))) + 1])


def plan_moves(source: SourceModel, to: RopeLayout) -> list[Move]:
    """Every tensor that a swap to layout `to` touches; raises for files whose bytes cannot be addressed."""
    moves = []
    for bare, order in stored_orders(source, to):
        info = source.checkpoint.tensors[source.names[bare]]
        start = source.checkpoint.start(info.name)
        if start is None:
            raise UnsupportedError(
                "rows are moved in safetensors files only, not in pickles or GGUF files",
                where=str(info.file),
                fix="Write it as safetensors first, with `converter convert`, or with save_pretrained",
            )
        moves.append(Move(info.name, info.file, start, info.nbytes // info.shape[0], order))
    if not moves:
        raise UnsupportedError(
            "there is nothing to swap", where=source.where, why="no layer of the model rotates q and k"
        )
    return moves


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


def total_bytes(moves: Iterable[Move]) -> int:
    """Bytes of all tensors that move."""
    return sum(move.nbytes for move in moves)
