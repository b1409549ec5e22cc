"""The healed model as a plain Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from converter.conversion.plan import DtypeName
from converter.errors import CheckpointError, UnsupportedError
from converter.families import Family
from converter.families.companions import generation_config, with_ids, write_companions
from converter.families.opened import SourceModel
from converter.files.json_text import write_json
from converter.files.safetensors import Layout
from converter.files.writer import METADATA, CheckpointWriter


def check_exportable(family: Family, where: str) -> None:
    """Raise UnsupportedError unless transformers' class of this family has the tensors that its files have."""
    if family.model_class is None or family.stand_in is not None:
        raise UnsupportedError(
            f"a checkpoint of family '{family.name}' cannot be healed as it is",
            where=where,
            why="transformers has no class that runs its files",
            fix="Convert it to a LLaMA first: `converter recipes list` shows how",
        )


def check_generation_config(source: SourceModel) -> None:
    """Raise CheckpointError where transformers would refuse to save the generation config beside the export."""
    from transformers import GenerationConfig

    try:
        GenerationConfig(**generation_config(source)).validate(strict=True)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            "the generation config is not sound",
            where=str(source.checkpoint.path / "generation_config.json"),
            why=" ".join(str(error).split()),
            fix="Correct the file: transformers would refuse to save it beside the healed model",
        ) from error


def layout_of(source: SourceModel, dtype: DtypeName) -> dict[str, Layout]:
    """Name -> shape and dtype of every tensor of the export: those of the converted checkpoint, a tied head once."""
    tensors = source.checkpoint.tensors
    return {source.family.full_name(bare): (tensors[source.names[bare]].shape, dtype) for bare in source.used}


def export_weights(
    gathered: Callable[[str], Tensor],
    layout: Mapping[str, Layout],
    folder: Path | None,
    max_shard_size: int,
    metadata: Mapping[str, str] = METADATA,
) -> None:
    """Write the weights tensor by tensor; all processes take part, and the one with a `folder` writes.

    Each tensor is gathered when its turn comes: no process ever holds the whole model.
    """
    writer = CheckpointWriter(folder, layout, max_shard_size, metadata) if folder is not None else None
    for name, (_, dtype) in layout.items():
        tensor = gathered(name)
        refuse_overflow(name, tensor, dtype)  # in every process: one that stopped alone would keep the others waiting
        if writer is not None:
            writer.write(name, tensor.to("cpu", getattr(torch, dtype)))
    if writer is not None:
        writer.finish()


def refuse_overflow(name: str, tensor: Tensor, dtype: str) -> None:
    """Raise UnsupportedError, with their number, where values of a tensor are too large for a dtype."""
    target: torch.dtype = getattr(torch, dtype)
    if target == tensor.dtype:
        return
    low, high = tensor.aminmax()
    largest, end = float(torch.maximum(-low, high)), torch.finfo(target).max
    if largest > end and (overflow := int((~torch.isfinite(tensor.to(target))).sum())):
        raise UnsupportedError(
            f"{overflow} of {tensor.numel()} values of {name} overflow in {dtype}",
            why=f"the largest is {largest:.4g}, and {dtype} ends at {end:.4g}",
            fix="Use --dtype bfloat16 or float32",
        )


def write_metadata(
    source: SourceModel,
    folder: Path,
    dtype: DtypeName,
    config: Mapping[str, Any],
) -> None:
    """What stands beside the weights, and the recipe; `config` is the converted checkpoint's as healing changes it."""
    write_json(folder / "config.json", with_ids(source, config, dtype))
    write_companions(source, folder)
    path = source.checkpoint.path
    if (path / "recipe.yaml").is_file():
        (folder / "recipe.yaml").write_bytes((path / "recipe.yaml").read_bytes())


def check_export(folder: Path, source: SourceModel, layout: Mapping[str, Layout]) -> SourceModel:
    """Open what was written, by its headers: every name, shape and dtype must be there, and the ties as they were."""
    written = SourceModel.open(folder)
    found = {info.name: (info.shape, info.dtype) for info in written.checkpoint.tensors.values()}
    if found != dict(layout) or written.spec.tied_head != source.spec.tied_head:
        raise CheckpointError(
            "the written checkpoint is not what was meant to be written",
            where=str(folder),
            why=f"these tensors differ: {sorted(set(found.items()) ^ set(layout.items()))[:4]}",
            fix="This is a defect; please report it",
        )
    return written
