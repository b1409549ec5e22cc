"""Where a frozen teacher lies: whole in every process, its layers sharded, or its layers in the CPU's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from converter.errors import ConverterError, UnsupportedError

if TYPE_CHECKING:
    from accelerate import Accelerator


def place_teacher(
    model: PreTrainedModel, where: Literal["whole", "sharded", "offloaded"], accelerator: Accelerator
) -> None:
    """Put a model where it shall lie. Embeddings and head, which every batch reads whole, are always on the device.

    Raises ConverterError where it cannot be split.
    """
    if where != "whole":
        layers = layers_of(model)
        if where == "sharded" and accelerator.num_processes == 1:
            raise ConverterError(
                "one process has nobody to share the teacher with",
                where="heal.teacher=sharded",
                fix="Choose whole or offloaded, or launch several processes",
            )
        for layer in layers:
            if where == "sharded":
                fully_shard(layer)
            else:
                from accelerate import cpu_offload

                cpu_offload(layer, accelerator.device)
        _move_rest(model, set(layers), accelerator)
    else:
        model.to(accelerator.device)


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated layers of a transformers model."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise UnsupportedError(
            f"transformers does not say what the layers of a {type(model).__name__} are, so it cannot be split",
            fix="Use heal.teacher=whole",
        )
    return layers


def _move_rest(module: nn.Module, layers: set[nn.Module], accelerator: Accelerator) -> None:
    """Move everything but the layers to the device."""
    for child in module.children():
        if child not in layers:
            _move_rest(child, layers, accelerator)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.data = tensor.data.to(accelerator.device)
