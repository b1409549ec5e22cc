"""What `test_heal_processes.py` runs on two gloo processes: healing runs, each described by a line of a JSON file."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from accelerate import PartialState
from torch.distributed.fsdp import fully_shard

from converter.healing import parts
from converter.healing.optimizer import parameter_groups
from converter.healing.processes import leave
from converter.healing.run import heal as run


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Steps as large as their gradients: an error in a gradient's scale shows, where AdamW would hide it."""
    return torch.optim.SGD(groups, lr=0.0)


def sharded(accelerator: Any, student: Any, roles: Any, settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    """FSDP2 as accelerate applies it on GPUs: each layer, then the rest."""
    for layer in student.model.model.layers:
        fully_shard(layer)
    fully_shard(student)
    return student, parts.adamw(parameter_groups(student, roles, settings))


def heal(job: dict[str, Any]) -> None:
    """One run, with the optimizer or the sharding that it names."""
    changes: dict[str, Callable[..., Any]] = {}
    if job.pop("sgd", False):
        changes["adamw"] = sgd
    if job.pop("sharded", False):
        changes["prepared"] = sharded
    originals = {name: getattr(parts, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(parts, name, value)
        run(**job, device="cpu")
    finally:
        for name, value in originals.items():
            setattr(parts, name, value)


if __name__ == "__main__":
    warnings.simplefilter("error")
    with open(sys.argv[1], encoding="utf-8") as jobs:
        for line in jobs:
            heal(json.loads(line))
    leave(PartialState())
