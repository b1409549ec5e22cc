"""Swap the layout of a LoRA adapter (a PEFT folder) for a base whose rows were swapped.

The adapted weight is W + s B A (Hu et al. 2021, eq. 3), so permuting the rows of W + s B A is permuting the
rows of W and of B; A stays. What else goes by the rows of q or k moves too: DoRA's magnitudes (Liu et
al. 2024, eq. 5: a norm for each row), the bias of B, biases that were trained along. On a fused qkv the
rows of B lie as the base's do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.errors import CheckpointError, ConverterError, UnsupportedError, raise_fault
from converter.families.opened import SourceModel
from converter.families.rotating import stored_orders
from converter.files.container import read_json
from converter.files.output import OutputFolder, disk_errors
from converter.files.record import RECORD, Digests, digests_of, read_record, save_record
from converter.files.safetensors import SafetensorsFile
from converter.layout import Rows
from converter.rope.moves import Move
from converter.rope.settle import declared_voices, settle, swap_entry
from converter.rope.swap import Say, SwapReport, copy_with_moves, look, open_source
from converter.spec import RopeLayout

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_MERGE = "Merge first: load base and adapter with PEFT, `merge_and_unload()`, save, and swap the result"

#: A tensor of an adapter: the module of the base, then what it is. The adapter's own name may stand inside.
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\."
    r"(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|base_layer)"
    r"(?:\.(?P<adapter>\w+))?(?:\.(?P<end>weight|bias))?"
)
_PLAIN = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.(?P<end>weight|bias)")


@dataclass(frozen=True)
class _Rotating:
    """A module of the base whose output rows are, or hold, q or k."""

    order: Rows
    name: str


def swap_adapter(
    adapter: str | Path,
    target: str | Path,
    *,
    to: RopeLayout,
    base: Path | None = None,
    claimed: RopeLayout | None = None,
    overwrite: bool = False,
    say: Say = lambda line: None,
) -> SwapReport:
    """Write the adapter in folder `adapter` to `target`, for the base with its rows in layout `to`.

    The base is `base`, or the folder that the adapter's config names: the one that the adapter was trained
    on, with the rows that it had then. Raises a ConverterError where rows cannot follow.
    """
    folder = Path(adapter)
    config = _read_config(folder)
    source = open_source(base or _base_of(config, folder))
    file = SafetensorsFile(folder / _WEIGHTS)
    moves = _plan(file, source, to, config)
    record = read_record(folder)
    if record is not None and not record.speaks_of_rows(_digests(file, moves)):
        record = None
    stamp = record.layout if record is not None else None
    if stamp is to:
        raise ConverterError(f"the rows are {to.value} already", where=str(folder), why=f"{RECORD} says so")
    voices = {"the adapter's stamp": stamp.value} if stamp is not None else {}
    voices |= declared_voices(source, to, claimed)
    settlement = settle(source, to, voices, claimed, look(source, None))
    say(f"Will move rows in {len(moves)} of {len(file.layout)} tensors of the adapter")
    inputs = (folder, source.checkpoint.opened)
    with OutputFolder(Path(target), overwrite=overwrite, inputs=inputs) as output, disk_errors(output.partial):
        for each in sorted(path for path in folder.iterdir() if path.is_file()):
            copy_with_moves(each, output.partial / each.name, moves if each == file.path else ())
        history = (record.content.get("rope_swaps") or []) if record is not None else []
        entry = swap_entry(settlement, to, len(moves))
        content = {"rope": {"layout": to.value}, "rope_swaps": [*history, entry]}
        save_record(output.partial, content, _digests(SafetensorsFile(output.partial / _WEIGHTS), moves))
        output.commit()
    moved = sum(move.nbytes for move in moves)
    return SwapReport(settlement.layout.value, to.value, len(moves), moved, None, settlement.voices)


def _digests(file: SafetensorsFile, moves: list[Move]) -> Digests:
    return digests_of(
        {name: (layout, file.path, file.span(name)[0]) for name, layout in file.layout.items()},
        [move.name for move in moves],
    )


def _read_config(folder: Path) -> dict[str, Any]:
    for name in (CONFIG, _WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"the folder has no {name}", where=str(folder), fix="An adapter is a folder that PEFT saved"
            )
    config = read_json(folder / CONFIG, raise_fault)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"the adapter is of type {kind}, not LORA", where=str(folder / CONFIG), fix=_MERGE)
    for key, why in (
        ("layer_replication", "it repeats layers of the base"),
        ("trainable_token_indices", "it replaces rows of the embedding"),
        ("fan_in_fan_out", "the base's weights are stored as (in, out)"),
        ("target_parameters", "it adapts parameters that are not linears"),
    ):
        if config.get(key):
            raise UnsupportedError(f"the adapter has {key}", where=str(folder / CONFIG), why=why, fix=_MERGE)
    return config


def _base_of(config: dict[str, Any], folder: Path) -> Path:
    name = config.get("base_model_name_or_path")
    for candidate in (Path(str(name)), folder / str(name)):
        if name and candidate.is_dir():
            return candidate
    raise ConverterError(
        f"the adapter's base '{name}' is not a folder here",
        where=str(folder / CONFIG),
        why="its config says how many heads there are",
        fix="Name it with --base",
    )


def _plan(file: SafetensorsFile, source: SourceModel, to: RopeLayout, config: dict[str, Any]) -> list[Move]:
    modules = _rotating_modules(source, to)
    moves = []
    for name, (shape, _) in file.layout.items():
        found = _NAME.fullmatch(name) or _PLAIN.fullmatch(name)
        module = source.family.bare_name(f"{found['module']}.weight").removesuffix(".weight") if found else name
        rotating = modules.get(module)
        if found is None or rotating is None:
            _refuse_hidden(name, modules, file.path)
            continue
        kind = found.groupdict().get("kind")
        if kind in ("lora_A", "lora_embedding_A"):
            continue
        if kind is None and found["end"] == "weight":
            raise UnsupportedError(f"'{name}' replaces a weight of q or k", where=str(file.path), fix=_MERGE)
        axis = 1 if len(shape) == 2 and shape[0] == 1 else 0  # older DoRA magnitudes are (1, rows)
        if shape[axis] != len(rotating.order):
            raise CheckpointError(
                f"'{name}' of shape {list(shape)} has {shape[axis]} rows, and '{rotating.name}' of the base "
                f"{len(rotating.order)}",
                where=str(file.path),
                fix="Name the base that the adapter was trained on with --base",
            )
        start, nbytes = file.span(name)
        moves.append(Move(name, file.path, start, nbytes // shape[axis], rotating.order))
    if not moves:
        raise ConverterError(
            "the adapter touches neither q nor k",
            where=str(file.path),
            why=f"it adapts {config.get('target_modules')}, whose rows stay where they are in either layout",
            fix="Use it as it is",
        )
    return moves


def _rotating_modules(source: SourceModel, to: RopeLayout) -> dict[str, _Rotating]:
    """Module of the base, without the family's prefix -> the order of its rows."""
    modules = {}
    for name, order in stored_orders(source, to):
        info = source.checkpoint.tensors[source.names[name]]
        if name.endswith(".weight") and len(info.shape) == 2:
            modules[name.removesuffix(".weight")] = _Rotating(order, info.name)
    return modules


def _refuse_hidden(name: str, modules: dict[str, _Rotating], file: Path) -> None:
    """A tensor of q or k under a name that we do not know must not stay behind."""
    if any(f".{module}." in f".{name}." for module in modules):
        raise UnsupportedError(f"'{name}' belongs to q or k in a way that is not known", where=str(file), fix=_MERGE)
