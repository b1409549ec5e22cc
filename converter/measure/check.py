"""Every fault of a checkpoint, not the first alone; with `full` also what is inside its tensors.

The rules are those of opening: `Checkpoint.open` and `SourceModel` bring what they find to a list here, where
they otherwise stop at it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.errors import CheckpointError, UnsupportedError, paragraph, reporting
from converter.families.opened import SourceModel
from converter.files.checkpoint import Checkpoint, TensorInfo
from converter.files.hub import local_path
from converter.files.tokenizer import load_tokenizer, vocabulary_size

if TYPE_CHECKING:
    from converter.show.progress import Progress


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong in a checkpoint: in which file, with which tensor, what, and what to do.

    A `remark` is worth knowing and does not make the checkpoint unsound.
    """

    file: Path
    tensor: str | None
    what: str
    fix: str | None = None
    remark: bool = False

    @classmethod
    def of(cls, error: CheckpointError, *, remark: bool = False) -> Fault:
        """From what a rule has found."""
        what = paragraph(error.what, error.why).rstrip(".")
        return cls(Path(error.where or ""), error.tensor, what, error.fix, remark)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "file": str(self.file)}

    def __str__(self) -> str:
        return f"{'remark' if self.remark else 'fault'}: {self.file}: {self.what}"


def check(path: str | Path, full: bool = False, *, progress: Progress | None = None) -> tuple[Fault, ...]:
    """Every fault and remark of a checkpoint, by path or Hub id; there is no fault in a sound one.

    By the headers: damaged, missing and left-over data, an index and shards that disagree, pieces of
    training state, unsafe pickles, a config that is broken or means other tensors, and a tokenizer whose files are
    broken or whose ids have no row in the embeddings. With `full` the tokenizer is loaded, and every tensor is read,
    one at a time: NaN and Inf, and weights of zeros. Raises `CheckpointError` where there is no such path.
    """
    found: list[CheckpointError] = []
    checkpoint = Checkpoint.open(local_path(path), found.append)
    faults, rows = ([Fault.of(error) for error in found], None) if found else _against_config(checkpoint)
    told = {fault.file for fault in faults}  # the config's faults are the tokenizer's too
    faults += [fault for fault in _tokenizer(checkpoint.path, rows, full) if fault.file not in told]
    if full:
        if progress:
            progress.stage("check", checkpoint.total_bytes)
        for info in checkpoint.tensors.values():
            faults += _look_inside(checkpoint, info)
            if progress:
                progress.advance(info.nbytes)
    return tuple(faults)


def _against_config(checkpoint: Checkpoint) -> tuple[list[Fault], int | None]:
    """Whether the tensors are those that the config means, if we know its family; the rows of the embeddings."""
    found: list[CheckpointError] = []
    with reporting(found.append, checkpoint.path):
        try:
            source = SourceModel(checkpoint, found.append)
        except UnsupportedError as error:
            if not found:
                what = f"the files were checked by themselves, not against the config: {error.what}"
                return [Fault(checkpoint.config_file, None, what, remark=True)], None
    return [Fault.of(error) for error in found], None if found else source.spec.vocab_size


def _tokenizer(folder: Path, rows: int | None, full: bool) -> Iterator[Fault]:
    """What is wrong with the tokenizer: its files, and ids for which the embeddings have no row."""
    try:
        ids = vocabulary_size(folder)
        if ids is not None and rows is not None and ids > rows:
            what = f"the tokenizer has {ids} ids and the embeddings {rows} rows: text can give ids without a row"
            yield Fault(folder, None, what, remark=True)
        if full:
            load_tokenizer(folder)
    except CheckpointError as error:
        yield Fault.of(error)
    except UnsupportedError as error:
        yield Fault(folder, None, paragraph(error.what, error.why).rstrip("."), error.fix, remark=True)


def _look_inside(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[Fault]:
    from converter.files.weights import count_dead_rows, count_non_finite

    tensor = checkpoint.read(info.name)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return
    nans, infinities = count_non_finite(tensor)
    if nans or infinities:
        counts = " and ".join(f"{count} {kind}" for count, kind in ((nans, "NaN"), (infinities, "Inf")) if count)
        what = f"tensor '{info.name}' contains {counts} among {tensor.numel()} numbers"
        fix = "Take a checkpoint from before training diverged."
        yield Fault(info.file, info.name, what, fix)
    if tensor.ndim != 2:
        return
    rows, dead = tensor.shape[0], count_dead_rows(tensor)
    if dead == rows and not _has_bias(checkpoint, info):
        what = f"tensor '{info.name}' is zero throughout: it was never filled, or its bytes were lost"
        yield Fault(info.file, info.name, what, "Download or copy the file again.")
    elif dead:
        what = f"tensor '{info.name}' has {dead} of {rows} rows that are zero throughout"
        yield Fault(info.file, info.name, what, remark=True)


def _has_bias(checkpoint: Checkpoint, info: TensorInfo) -> bool:
    """Whether a linear still computes something without its weight: a bias that is not zero."""
    bias = checkpoint.tensors.get(info.name.removesuffix("weight") + "bias")
    return bias is not None and bool(checkpoint.read(bias.name).any())
