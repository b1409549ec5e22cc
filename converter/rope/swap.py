"""Swap the layout of a checkpoint folder into a new folder: rows are moved, everything else is copied by the kernel."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.checkpoint import Checkpoint
from converter.errors import ConverterError
from converter.hub import local_path
from converter.output import OutputFolder, disk_errors
from converter.rope.moves import Move, plan_moves, refuse_quantised, rotating_mappings, total_bytes, write_move
from converter.rope.scores import here, verify_scores
from converter.rope.settle import STAMP, Settlement, declared_voices, settle, stamped
from converter.source import SourceModel
from converter.spec import QKNorm, RopeLayout

if TYPE_CHECKING:
    from converter.rope.detect import Detection
    from converter.text import Windows

Say = Callable[[str], None]

#: Files that may hold weights; those that are not the checkpoint's own would keep the old order.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".npz")
_PIECE = 1 << 30
#: Families whose files are no folder of safetensors: they are written as Hugging Face checkpoints.
_OTHER_FORMATS = ("gguf", "llama_meta")


@dataclass(frozen=True)
class SwapReport:
    """What a swap did."""

    layout_before: str
    layout_after: str
    tensors: int
    bytes_moved: int
    #: Largest relative difference of attention scores at 256 positions.
    score_error: float
    voices: dict[str, str]
    notes: tuple[str, ...] = ()
    left_behind: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**vars(self), "notes": list(self.notes), "left_behind": list(self.left_behind)}


def open_source(path: Path) -> SourceModel:
    """A checkpoint that may be swapped; raises where q or k is quantised."""
    path = local_path(path)
    refuse_quantised(Checkpoint.open(path))
    return SourceModel.open(path)


def swap(
    source: str | Path,
    target: str | Path,
    *,
    to: RopeLayout,
    claimed: RopeLayout | None = None,
    text: Path | None = None,
    overwrite: bool = False,
    say: Say = lambda line: None,
) -> SwapReport:
    """Write the checkpoint in `source` to `target` with its rows in layout `to`.

    Raises a ConverterError, and leaves nothing behind, where the layout cannot be settled or is `to`
    already; VerificationError where the scores differ afterwards.
    """
    opened = open_source(Path(source))
    if opened.family.name in _OTHER_FORMATS:
        return _through_conversion(opened, Path(target), to, claimed, text, overwrite)
    voices = declared_voices(opened, to, claimed)
    moves = plan_moves(opened, to)
    say(announcement(opened, moves))
    files = opened.checkpoint.files
    with OutputFolder(Path(target), overwrite=overwrite, source=Path(source)) as output:
        output.check_space(sum(file.stat().st_size for file in files))
        places = {file: output.partial / file.relative_to(opened.checkpoint.path) for file in files}
        with disk_errors(output.partial), ThreadPoolExecutor(1) as pool:
            copying = pool.submit(_copy_untouched, moves, places)
            settlement = settle(opened, to, voices, claimed, look(opened, text))
            copying.result()
            _write_moved(moves, places)
        left_behind = _copy_others(opened, output.partial)
        after = {move.name: (places[move.file], move.start) for move in moves}
        error = verify_scores(opened, here(moves), after, settlement.layout, to)
        with disk_errors(output.partial):
            content = stamped(opened.checkpoint.path, opened, settlement, to, len(moves))
            (output.partial / STAMP).write_text(content, encoding="utf-8")
        output.commit()
    return make_report(opened, moves, settlement, to, error, left_behind)


def _through_conversion(
    source: SourceModel, target: Path, to: RopeLayout, claimed: RopeLayout | None, text: Path | None, overwrite: bool
) -> SwapReport:
    """A GGUF or Meta source as a Hugging Face checkpoint of the same architecture."""
    from converter.conversion import convert
    from converter.ops.swap_rope_layout import SwapRopeLayout
    from converter.recipe import Recipe

    assert source.spec.rope is not None
    settlement = settle(source, None, declared_voices(source, None, claimed), claimed, look(source, text))
    family = str(source.checkpoint.config.get("general.architecture", "llama"))
    step = SwapRopeLayout(to="half_split" if to is RopeLayout.HALF_SPLIT else "interleaved")
    recipe = Recipe(f"{source.family.name}-to-{family}", (source.family.name,), family, (step,))
    texts = [text] if text is not None else []
    convert(source.checkpoint.opened, target, recipe=recipe, text=texts, overwrite=overwrite)
    needed = step.needed(source.spec)
    tensors = len(list(rotating_mappings(source))) if needed else 0
    return SwapReport(settlement.layout.value, to.value, tensors, 0, 0.0, settlement.voices)


def look(source: SourceModel, text: Path | None) -> Detection:
    """What the weights say, or with a text the losses."""
    from converter.rope.detect import detect_by_loss, detect_source

    return detect_source(source) if text is None else detect_by_loss(source, text_windows(source, text))


def text_windows(source: SourceModel, text: Path, tokens: int = 8192) -> Windows:
    """Windows of a text, as long as the model allows, up to 512 tokens: a wrong layout shows late in a window."""
    from converter.text import read_documents, windows
    from converter.tokenizer import load_tokenizer

    ids = source.token_ids()
    opening = ids["bos_token_id"] if ids["bos_token_id"] is not None else ids["eos_token_id"]
    documents = read_documents(
        [text],
        load_tokenizer(source.checkpoint.path),
        vocab_size=source.spec.vocab_size,
        end_of_text=opening if isinstance(opening, int) else None,
    )
    return windows(documents, min(source.spec.context, 512), tokens)


def announcement(source: SourceModel, moves: list[Move]) -> str:
    """How many tensors will be touched, by kind."""
    spec = source.spec
    assert spec.rope is not None
    layers = sum(spec.rope.rotates(layer) for layer in range(spec.num_layers))
    kinds = [f"{layers} layers"]
    if {"q", "k"} & spec.biases:
        kinds.append("biases")
    if spec.qk_norm is not None:
        kinds.append("norms of each head" if spec.qk_norm is QKNorm.PER_HEAD else "norms")
    skipped = spec.num_layers - layers
    also = f"; {skipped} layers do not rotate and stay" if skipped else ""
    return (
        f"Will move rows in {len(moves)} tensors ({', '.join(kinds)}{also}), {total_bytes(moves) / 1e6:,.1f} MB of "
        f"{source.checkpoint.total_bytes / 1e6:,.1f} MB"
    )


def make_report(
    source: SourceModel,
    moves: list[Move],
    settlement: Settlement,
    to: RopeLayout,
    error: float,
    left_behind: tuple[str, ...] = (),
) -> SwapReport:
    """The report of a finished swap."""
    assert source.spec.rope is not None
    notes = [settlement.note] if settlement.note else []
    if to is not source.spec.rope.layout:
        notes.append(
            f"{source.family.model_class} of transformers reads {source.spec.rope.layout.value} and would compute "
            f"something else from these rows; {STAMP} says what they are"
        )
    return SwapReport(
        settlement.layout.value,
        to.value,
        len(moves),
        total_bytes(moves),
        error,
        settlement.voices,
        tuple(notes),
        left_behind,
    )


def _copy_untouched(moves: list[Move], places: Mapping[Path, Path]) -> None:
    """Every weight file, but for the rows that move."""
    for file, place in places.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        end = file.stat().st_size
        with file.open("rb") as source, place.open("wb") as target:
            os.truncate(target.fileno(), end)
            position = 0
            for move in sorted((move for move in moves if move.file == file), key=lambda move: move.start):
                kernel_copy(source.fileno(), target.fileno(), position, move.start - position)
                position = move.start + move.nbytes
            kernel_copy(source.fileno(), target.fileno(), position, end - position)


def _write_moved(moves: list[Move], places: Mapping[Path, Path]) -> None:
    for file, place in places.items():
        with file.open("rb") as source, place.open("r+b") as target:
            for move in moves:
                if move.file == file:
                    write_move(move, source.fileno(), target.fileno())


def kernel_copy(source: int, target: int, start: int, size: int, target_start: int | None = None) -> None:
    """Copy a range of one open file to another, without its bytes passing through this process."""
    out = start if target_start is None else target_start
    while size:
        try:
            copied = os.copy_file_range(source, target, min(size, _PIECE), start, out)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            copied = _sendfile(source, target, start, out, size)
        if not copied:
            raise ConverterError("a file became shorter while it was copied")
        start, out, size = start + copied, out + copied, size - copied


def _sendfile(source: int, target: int, start: int, out: int, size: int) -> int:
    """Where ranges cannot be copied between two files: on other disks, and in old kernels."""
    os.lseek(target, out, os.SEEK_SET)
    try:
        return os.sendfile(target, source, start, min(size, _PIECE))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        return os.write(target, os.pread(source, min(size, 1 << 20), start))


def _others(source: SourceModel) -> list[Path]:
    """Files of the folder beside the checkpoint's weights."""
    root = source.checkpoint.path
    own = {file.resolve() for file in source.checkpoint.files}
    return [
        file
        for file in sorted(root.rglob("*"))
        if file.is_file()
        and file.resolve() not in own
        and not any(part.startswith(".") for part in file.relative_to(root).parts)
    ]


def other_weights(source: SourceModel) -> tuple[str, ...]:
    """Weights in the folder that are not the checkpoint's: they would keep the old order."""
    root = source.checkpoint.path
    return tuple(str(file.relative_to(root)) for file in _others(source) if file.suffix in _WEIGHTS)


def _copy_others(source: SourceModel, folder: Path) -> tuple[str, ...]:
    """Config, tokenizer and the like; the names of other weights, which are left behind."""
    for file in _others(source):
        if file.suffix in _WEIGHTS:
            continue
        place = folder / file.relative_to(source.checkpoint.path)
        with disk_errors(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            with file.open("rb") as content, place.open("wb") as target:
                kernel_copy(content.fileno(), target.fileno(), 0, file.stat().st_size)
    return other_weights(source)
