"""Meta's own LLaMA folders: `params.json`, and `consolidated.NN.pth`, one for each rank of tensor parallelism.

Every rank holds a part of each linear and of the embedding, and all of each norm. A linear that writes heads or
neurons (wq, wk, wv, w1, w3, output) is cut along its rows, one that reads them (wo, w2) along its columns;
the embedding along its columns in LLaMA 1 and 2, and along its rows since LLaMA 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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


class LlamaMetaFolder(Container):
    """A folder with `params.json` and `consolidated.00.pth`."""

    def recognises(self, path: Path) -> bool:
        return path.is_dir() and (path / PARAMS).exists() and (path / "consolidated.00.pth").exists()

    def open(self, path: Path, on_fault: OnFault) -> Contents:
        params = read_json(path / PARAMS, on_fault)
        found = {int(match[1]): file for file in path.iterdir() if (match := _SHARD.fullmatch(file.name))}
        missing = sorted(set(range(max(found) + 1)) - found.keys())
        if missing:
            raise CheckpointError(
                f"the shard consolidated.{missing[0]:02}.pth is missing",
                where=str(path),
                fix="Download the missing file",
            )
        files = [found[rank] for rank in sorted(found)]
        merged = MergedShards(files, params.get("dim"), on_fault)
        vocabulary = merged.layout.get(EMBEDDING, ((0,), ""))[0][0]
        config = {**params, "model_type": "llama_meta", "embedding_rows": vocabulary}
        return Contents(config, path / PARAMS, {files[0]: merged}, (path / PARAMS, *files[1:]))


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
                    f"'{name}' of shape {list(tensor.shape)} cannot be cut for {ranks} ranks", where=str(folder)
                )
            parts[name] = tensor.chunk(ranks, dim=axis)[rank].clone()
        file = folder / f"consolidated.{rank:02}.pth"
        torch.save(parts, file)
        files.append(file)
    return files
