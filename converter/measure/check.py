"""Every fault of a checkpoint, not the first alone; with `full` also what is inside its tensors.

The rules are those of opening and converting (`converter.measure.examine`), which otherwise stop at the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.errors import CheckpointError, ConverterError, UnsupportedError, paragraph, printable
from converter.files.checkpoint import Checkpoint, TensorInfo
from converter.files.tokenizer import load_tokenizer, vocabulary_size
from converter.measure.examine import Examined, examine
from converter.measure.vocabulary import Vocabulary

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
    def of(cls, error: ConverterError, *, remark: bool = False) -> Fault:
        """From what a rule has found."""
        what = paragraph(error.what, error.why).rstrip(".")
        return cls(Path(error.where or ""), getattr(error, "tensor", None), what, error.fix, remark)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "file": str(self.file)}

    def __str__(self) -> str:
        return printable(f"{'remark' if self.remark else 'fault'}: {self.file}: {self.what}")


def check(path: str | Path, full: bool = False, *, progress: Progress | None = None) -> tuple[Fault, ...]:
    """Every fault and remark of a checkpoint, by path or Hub id; there is no fault in a sound one.

    Without `full` a fault is what `convert` refuses before it reads a weight: damaged, missing and left-over data, an
    index and shards that disagree, pieces of training state, unsafe pickles, a config that is broken or means other
    tensors, weights that are quantised, buffers that carry something, a tokenizer that is broken or has ids without
    a row in the embeddings. With `full` the tokenizer is loaded, and every tensor is read, one at a time: NaN and Inf,
    and weights of zeros. A family that we do not know is a remark, and its files are checked by themselves. Raises
    `CheckpointError` where there is no such path.
    """
    examined = examine(path)
    checkpoint = examined.checkpoint
    if examined.unknown:
        faults = [_unknown(checkpoint, error) for error in examined.faults]
    else:
        faults = [Fault.of(error) for error in examined.faults]
    if examined.source is not None:
        faults += [Fault(checkpoint.config_file, None, note, remark=True) for note in examined.source.notes]
    told = {fault.file for fault in faults if not fault.remark}  # the config's faults are the tokenizer's too
    faults += [fault for fault in _tokenizer(examined, full) if fault.file not in told]
    if full:
        if progress:
            progress.stage("check", checkpoint.total_bytes)
        for info in checkpoint.tensors.values():
            faults += _look_inside(checkpoint, info)
            if progress:
                progress.advance(info.nbytes)
    return tuple(faults)


def _unknown(checkpoint: Checkpoint, error: ConverterError) -> Fault:
    what = f"the files were checked by themselves, not against the config: {error.what}, so it does not convert"
    return Fault(checkpoint.config_file, None, what, error.fix, remark=True)


def _tokenizer(examined: Examined, full: bool) -> Iterator[Fault]:
    """What is wrong with the files of the tokenizer, and with `full` whatever keeps it from loading."""
    folder = examined.checkpoint.path
    try:
        vocabulary_size(folder)
        if full and examined.source is not None and not examined.faults:
            Vocabulary.of(examined.source).check()
        elif full:
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
    if dead:  # a pruned model has such weights, so they are no fault
        much = "zero throughout: pruned, never filled, or its bytes were lost"
        what = f"tensor '{info.name}' " + (f"is {much}" if dead == rows else f"has {dead} of {rows} rows of zeros")
        yield Fault(info.file, info.name, what, remark=True)
