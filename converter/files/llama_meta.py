"""Meta's own LLaMA folders: `params.json`, and `consolidated.NN.pth`, one for each rank of tensor parallelism.

Every rank holds a part of each linear and of the embedding, and all of each norm. A linear that writes heads or
neurons (wq, wk, wv, w1, w3, output) is cut along its rows, one that reads them (wo, w2) along its columns;
the embedding along its columns in LLaMA 1 and 2, and along its rows since LLaMA 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.errors import CheckpointError, OnFault
from converter.files.container import Container, Contents, read_json, refuse_placeholder
from converter.files.pickles import TorchFile
from converter.files.safetensors import Layout

if TYPE_CHECKING:
    import torch

PARAMS = "params.json"
_SHARD = re.compile(r"consolidated\.(\d\d)\.pth")
_ROWS = re.compile(r"layers\.\d+\.(attention\.w[qkv]|feed_forward\.w[13])\.(weight|bias)|output\.weight")
_COLUMNS = re.compile(r"layers\.\d+\.(attention\.wo|feed_forward\.w2)\.weight")
EMBEDDING = "tok_embeddings.weight"
_QUERIES = "layers.0.attention.wq.weight"
#: By how much copies of one tensor may differ, relative to its largest value: ranks round for themselves.
_SAME = 1e-3


class LlamaMetaFolder(Container):
    """A folder with `params.json` and `consolidated.00.pth`."""

    def recognises(self, path: Path) -> bool:
        return path.is_dir() and (path / PARAMS).exists() and bool(_shards(path))

    def open(self, path: Path, on_fault: OnFault) -> Contents:
        params = read_json(path / PARAMS, on_fault)
        found = _shards(path)
        for rank in set(range(max(found) + 1)) - found.keys():
            raise _missing(path, rank)
        files = [found[rank] for rank in sorted(found)]
        merged = MergedShards(files, params.get("dim"), on_fault)
        written = merged.ranks_written(params)
        if written is not None and written > len(files):
            raise _missing(path, len(files), f"each file holds a {written}th of {_QUERIES}")
        if written is not None and written < len(files):
            what = f"there are {len(files)} shards, and each holds one of {written} parts of {_QUERIES}"
            raise CheckpointError(what, where=str(path), fix="Remove the shards that are of another checkpoint")
        remark = merged.compare_copies()
        vocabulary = merged.layout.get(EMBEDDING, ((0,), ""))[0][0]
        config = {**params, "model_type": "llama_meta", "embedding_rows": vocabulary}
        beside = (path / PARAMS, *files[1:])
        return Contents(config, path / PARAMS, {files[0]: merged}, beside, remarks=(remark,) if remark else ())


def _shards(path: Path) -> dict[int, Path]:
    """The files of the ranks, by rank."""
    return {int(match[1]): file for file in path.iterdir() if (match := _SHARD.fullmatch(file.name))}


def _missing(path: Path, rank: int, why: str | None = None) -> CheckpointError:
    what = f"the shard consolidated.{rank:02}.pth is missing"
    return CheckpointError(what, where=str(path), why=why, fix="Download the missing file")


class MergedShards:
    """Tensor-parallel shards as one file; a tensor is put together as it is read."""

    def __init__(self, files: list[Path], hidden_size: Any, on_fault: OnFault) -> None:
        for file in files:
            refuse_placeholder(file)
        self.files = files
        self._shards = [TorchFile(file, on_fault) for file in files]
        self._hidden_size = hidden_size
        first = self._shards[0].layout
        self.names = list(first)
        for file, shard in zip(files, self._shards, strict=True):
            if shard.layout != first:
                names = sorted(name for name in {*first, *shard.layout} if first.get(name) != shard.layout.get(name))
                raise CheckpointError(
                    f"'{names[0]}' is {first.get(names[0])} in {files[0].name} and {shard.layout.get(names[0])} here",
                    where=str(file),
                    tensor=names[0],
                    why="the ranks of one checkpoint hold parts of the same shape",
                )
        self.layout: dict[str, Layout] = {name: self._merged(name, layout) for name, layout in first.items()}

    def ranks_written(self, params: Mapping[str, Any]) -> int | None:
        """How many ranks the first layer's queries were cut for; None where params and file do not tell."""
        shape, _ = self._shards[0].layout.get(_QUERIES, ((), ""))
        hidden, heads = params.get("dim"), params.get("n_heads")
        if not (shape and isinstance(hidden, int) and isinstance(heads, int)):
            return None
        rows = shape[0]
        head_dim = params.get("head_dim")
        whole = heads * head_dim if isinstance(head_dim, int) else hidden
        return whole // rows if whole % rows == 0 else None

    def compare_copies(self) -> str | None:
        """A remark where the ranks' copies of what is not cut differ a little.

        Raises CheckpointError where they differ by more, or where two ranks hold the same part of what is cut.
        """
        import torch

        largest, widest = 0.0, ""
        for name in [name for name in self.names if self.axis(name) is None]:
            first, *others = (shard.read(name).double() for shard in self._shards)
            size, dtype = float(first.abs().max()) or 1.0, self._shards[0].read(name).dtype
            allowed = max(_SAME, 2 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)
            for file, other in zip(self.files[1:], others, strict=True):
                difference = float((other - first).abs().max()) / size
                if not difference <= allowed and first.isfinite().all():
                    copy = f"its copy in {self.files[0].name}, by {difference:.2g} of the largest value"
                    raise CheckpointError(
                        f"'{name}' differs from {copy}",
                        where=str(file),
                        tensor=name,
                        why="every rank of one checkpoint holds the same, so the files are of different checkpoints",
                        fix="Download the files of one checkpoint",
                    )
                if difference > largest:
                    largest, widest = difference, name
        if _QUERIES in self.layout and len(self.files) > 1:
            self._refuse_twins()
        what = f"the ranks' copies of '{widest}' differ, by {largest:.1e} of the largest value: the first one is taken"
        return what if widest else None

    def _refuse_twins(self) -> None:
        """Raise CheckpointError where two ranks hold the same part of the first layer's queries."""
        parts = [shard.read(_QUERIES) for shard in self._shards]
        for (a, one), (b, two) in combinations(zip(self.files, parts, strict=True), 2):
            if one.equal(two) and one.any():
                raise CheckpointError(
                    f"'{_QUERIES}' is the very same part as in {a.name}",
                    where=str(b),
                    tensor=_QUERIES,
                    why="each rank holds a part of its own, so one file is there twice",
                    fix="Download the file again",
                )

    def axis(self, name: str) -> int | None:
        """The axis along which a tensor is cut; None where every rank has all of it."""
        return parallel_axis(name, self._shards[0].layout[name][0], len(self.files), self._hidden_size)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, whole."""
        import torch

        axis = self.axis(name)
        if axis is None or len(self.files) == 1:
            return self._shards[0].read(name)
        return torch.cat([shard.read(name) for shard in self._shards], dim=axis)

    def chunks(self, name: str) -> Iterator[bytes]:
        """The tensor's bytes."""
        import torch

        yield self.read(name).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    def _merged(self, name: str, layout: Layout) -> Layout:
        shape, dtype = layout
        axis = self.axis(name)
        if axis is None:
            return layout
        return tuple(size * len(self.files) if i == axis else size for i, size in enumerate(shape)), dtype


def parallel_axis(name: str, shape: tuple[int, ...], ranks: int, hidden_size: Any) -> int | None:
    """The axis along which Meta cuts a tensor; `shape` is that of one rank's part."""
    if _ROWS.fullmatch(name):
        return 0
    if _COLUMNS.fullmatch(name):
        return 1
    if name == EMBEDDING:
        return 0 if shape[1] == hidden_size else 1
    return None


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], ranks: int, hidden_size: int) -> list[Path]:
    """Cut tensors by the ranks and write `consolidated.NN.pth`; the embedding is cut along its rows.

    Raises CheckpointError where a tensor cannot be cut evenly.
    """
    import torch

    files = []
    for rank in range(ranks):
        parts = {}
        for name, tensor in tensors.items():
            axis = parallel_axis(name, tuple(tensor.shape), ranks, hidden_size)
            if axis is None or ranks == 1:
                parts[name] = tensor
                continue
            if tensor.shape[axis] % ranks:
                raise CheckpointError(
                    f"'{name}' of shape {list(tensor.shape)} cannot be cut for {ranks} ranks",
                    where=str(folder),
                    fix="Choose a number of ranks that divides it",
                )
            parts[name] = tensor.chunk(ranks, dim=axis)[rank].clone()
        file = folder / f"consolidated.{rank:02}.pth"
        torch.save(parts, file)
        files.append(file)
    return files
