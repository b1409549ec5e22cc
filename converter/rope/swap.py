"""Swap the layout of a checkpoint folder into a new folder: rows are moved, everything else is copied by the kernel."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.errors import ConverterError, did_you_mean
from converter.families.opened import SourceModel
from converter.families.rotating import rotating_mappings, source_digests
from converter.files.checkpoint import Checkpoint
from converter.files.hub import local_path
from converter.files.output import OutputFolder, disk_errors
from converter.files.record import RECORD, save_record
from converter.rope.detect import Detection, detect_source
from converter.rope.direct_io import NewFile, will_need
from converter.rope.moves import Move, plan_moves, refuse_quantised, total_bytes
from converter.rope.scores import compare_scores, read_rows
from converter.rope.settle import Settlement, declared_voices, settle, swapped_record
from converter.spec import QKNorm, RopeLayout
from converter.text.sources import Text

Say = Callable[[str], None]

#: Files that may hold weights; those that are not the checkpoint's own would keep the old order.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".npz")
#: Families whose files are no folder of safetensors: they are written as Hugging Face checkpoints.
_OTHER_FORMATS = ("gguf", "llama_meta")


@dataclass(frozen=True)
class SwapReport:
    """What a swap did."""

    layout_before: str
    layout_after: str
    tensors: int
    bytes_moved: int
    #: Largest relative difference of attention scores at 256 positions; None where they were not compared.
    score_error: float | None
    voices: dict[str, str]
    notes: tuple[str, ...] = ()
    left_behind: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**vars(self), "notes": list(self.notes), "left_behind": list(self.left_behind)}


def open_source(path: Path) -> SourceModel:
    """A checkpoint that may be swapped; raises where q or k is quantised."""
    path = local_path(path)
    refuse_quantised(Checkpoint.open(path))
    return SourceModel.open(path)


def detect(path: str | Path) -> Detection:
    """The layout of a checkpoint, from its headers, q and k. Raises a ConverterError where it cannot be opened."""
    return detect_source(SourceModel.open(path))


def swap(
    source: str | Path,
    target: str | Path,
    *,
    to: RopeLayout | str,
    claimed: RopeLayout | str | None = None,
    text: Text | None = None,
    overwrite: bool = False,
    say: Say = lambda line: None,
) -> SwapReport:
    """Write the checkpoint in `source` to `target` with its rows in layout `to`, "half_split" or "interleaved".

    `claimed` is what its rows are in now: where it is not so, nothing moves.

    Raises a ConverterError, and leaves nothing behind, where the layout cannot be settled or is `to`
    already; VerificationError where the scores differ afterwards.
    """
    to, claimed = _layout(to), None if claimed is None else _layout(claimed)
    opened = open_source(Path(source))
    if opened.family.name in _OTHER_FORMATS:
        return _through_conversion(opened, Path(target), to, claimed, text, overwrite)
    voices = declared_voices(opened, to, claimed)
    moves = plan_moves(opened, to)
    say(announcement(opened, moves))
    root, files = opened.checkpoint.path, opened.checkpoint.files
    inputs = [opened.checkpoint.opened, *([text] if text else [])]
    with OutputFolder(Path(target), overwrite=overwrite, inputs=inputs) as output:
        output.check_space(sum(file.stat().st_size for file in files))
        places = {file: output.partial / file.relative_to(root) for file in files}
        with disk_errors(output.partial), ThreadPoolExecutor(1) as pool:
            settling = pool.submit(lambda: settle(opened, to, voices, claimed, look(opened, text)))

            def refused() -> None:
                if settling.done():
                    settling.result()

            for file, place in places.items():
                place.parent.mkdir(parents=True, exist_ok=True)
                copy_with_moves(file, place, [move for move in moves if move.file == file], refused)
            left_behind = _copy_others(opened, output.partial)
            settlement = settling.result()
        after = read_rows(opened, {move.name: (places[move.file], move.start) for move in moves})
        error = compare_scores(opened.spec, read_rows(opened), settlement.layout, after, to)
        with disk_errors(output.partial):
            record = swapped_record(opened, settlement, to, len(moves))
            save_record(output.partial, record, source_digests(SourceModel.open(output.partial)))
        output.commit()
    return make_report(opened, moves, settlement, to, error, left_behind)


def _layout(name: str) -> RopeLayout:
    names = [layout.value for layout in RopeLayout]
    if name not in names:
        raise ConverterError(f"'{name}' is no layout", fix=did_you_mean(name, names))
    return RopeLayout(name)


def _through_conversion(
    source: SourceModel, target: Path, to: RopeLayout, claimed: RopeLayout | None, text: Text | None, overwrite: bool
) -> SwapReport:
    """A GGUF or Meta source as a Hugging Face checkpoint of the same architecture."""
    from converter.conversion.recipe import Recipe
    from converter.conversion.run import convert
    from converter.ops.swap_rope_layout import SwapRopeLayout

    if to is RopeLayout.INTERLEAVED:
        raise ConverterError(
            f"a {source.family.name} is written as a Hugging Face checkpoint, and those are half_split",
            where=source.where,
            fix="Swap --to half_split, and the result to interleaved if you need that",
        )
    settlement = settle(source, None, declared_voices(source, None, claimed), claimed, look(source, text))
    if settlement.layout is not source.declared_layout:
        raise ConverterError(
            f"the rows are {settlement.layout.value}, which no {source.family.name} of this architecture is",
            where=source.where,
            fix="Convert it as it is, with `converter convert`, and then swap the result with this --from",
        )
    family = str(source.checkpoint.config.get("general.architecture", "llama"))
    step = SwapRopeLayout(to="half_split")
    recipe = Recipe(f"{source.family.name}-to-{family}", family, (step,))
    texts = [text] if text is not None else []
    convert(source.checkpoint.opened, target, recipe=recipe, text=texts, overwrite=overwrite)
    needed = step.needed(source.spec)
    tensors = len(list(rotating_mappings(source))) if needed else 0
    return SwapReport(settlement.layout.value, to.value, tensors, 0, None, settlement.voices)


def look(source: SourceModel, text: Text | None) -> Detection:
    """What the weights say, or with a text the losses."""
    if text is None:
        return detect_source(source)
    from converter.rope.by_loss import detect_by_loss, text_windows

    return detect_by_loss(source, text_windows(source, text))


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
    error: float | None,
    left_behind: tuple[str, ...] = (),
) -> SwapReport:
    """The report of a finished swap."""
    notes = [settlement.note] if settlement.note else []
    if source.declared_layout is not None and to is not source.declared_layout:
        notes.append(
            f"{source.family.model_class} of transformers reads {source.declared_layout.value} and would compute "
            f"something else from these rows; {RECORD} says what they are"
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


def copy_with_moves(file: Path, place: Path, moves: Iterable[Move], check: Callable[[], None] = lambda: None) -> None:
    """Write a file anew in one pass: the rows that move in their new order, every other byte as it is.

    `check` is called between tensors, for its error to end the copy.
    """
    size = file.stat().st_size
    moves = sorted(moves, key=lambda move: move.start)
    with file.open("rb") as source, NewFile(place, size) as target:
        for move in moves:
            check()
            target.copy(source.fileno(), target.position, move.start)
            move.copy(source.fileno(), target)
        target.copy(source.fileno(), target.position, size)
        target.finish()
    for move in moves:  # what is to be checked comes back from the disk while the next file is copied
        will_need(place, move.start, move.nbytes)


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
        if file.suffix in _WEIGHTS or file == source.checkpoint.path / RECORD:
            continue
        place = folder / file.relative_to(source.checkpoint.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    return other_weights(source)
