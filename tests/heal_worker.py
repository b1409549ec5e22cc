"""What tests run on two gloo processes: healing runs, each described by a line of a JSON file."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
from accelerate import PartialState
from torch.distributed.fsdp import fully_shard

from converter.healing import parts
from converter.healing.launch import leave
from converter.healing.loop import InterruptedRunError
from converter.healing.optimizer import parameter_groups
from converter.healing.run import heal as run
from converter.healing.student import Student
from converter.healing.trainee import Trainee
from converter.show.progress import Progress

_FORWARD = Student.forward


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Steps as large as their gradients: an error in a gradient's scale shows, where AdamW would hide it."""
    return torch.optim.SGD(groups, lr=0.0)


def sharded(accelerator: Any, student: Any, roles: Any, settings: Any) -> Trainee:
    """FSDP2 as accelerate applies it on GPUs: each layer, then the rest."""
    for layer in student.model.model.layers:
        fully_shard(layer)
    fully_shard(student)
    optimizer = parts.adamw(parameter_groups(student, roles, settings))
    return Trainee(accelerator, student, student, optimizer, settings.clip)


class Stop(Progress):
    """Has its process told to stop when a step is over, as a launcher tells it."""

    def __init__(self, step: int) -> None:
        self._step = step

    def advance(self, amount: int, figures: Mapping[str, float] | None = None) -> None:
        if figures is not None and figures["step"] == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def broken_at(step: int) -> Callable[..., Any]:
    """A forward of the student whose gradients are not finite in that step, of one micro-batch."""
    trained = itertools.count(1)

    def broken(self: Student, *inputs: Any) -> Any:
        found = _FORWARD(self, *inputs)
        if torch.is_grad_enabled() and next(trained) == step:
            return found._replace(total=found.total * math.nan)
        return found

    return broken


def with_angles(self: Student, *inputs: Any) -> Any:
    """A forward of the student that fails where its rotary frequencies are not, to the last bit, its config's."""
    rotary: Any = self.model.model.rotary_emb
    if not torch.equal(rotary.inv_freq, type(rotary)(config=self.model.config).inv_freq):
        raise AssertionError(f"the rotary frequencies are in {rotary.inv_freq.dtype}")
    return _FORWARD(self, *inputs)


def heal(job: dict[str, Any]) -> None:
    """One run, with the optimizer or the sharding that it names, to the step at which it is to stop or to break."""
    changes: list[tuple[Any, str, Any]] = []
    if job.pop("sgd", False):
        changes.append((parts, "adamw", sgd))
    if job.pop("sharded", False):
        changes.append((parts, "prepared", sharded))
    if step := job.pop("broken", 0):
        changes.append((Student, "forward", broken_at(step)))
    if job.pop("angles", False):
        changes.append((Student, "forward", with_angles))
    stop = job.pop("stop", 0)
    originals = [(place, name, getattr(place, name)) for place, name, _ in changes]
    try:
        for place, name, value in changes:
            setattr(place, name, value)
        with suppress(InterruptedRunError) if stop else nullcontext():
            run(**job, device="cpu", **({"progress": Stop(stop)} if stop else {}))
    finally:
        for place, name, value in originals:
            setattr(place, name, value)


if __name__ == "__main__":
    if "ACCELERATE_USE_DEEPSPEED" not in os.environ:  # which calls what torch calls deprecated
        warnings.simplefilter("error")
    with open(sys.argv[1], encoding="utf-8") as jobs:
        for line in jobs:
            heal(json.loads(line))
    leave(PartialState())
