"""A model in training as its launch distributes it: how a gradient is made, applied, and what of it is stored.

`Trainee` serves one process, data parallel and FSDP2, by torch's own means. DeepSpeed's engine does each of these
things in its own way: `converter.healing.zero`.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint.state_dict_loader as loader
import torch.distributed.checkpoint.state_dict_saver as saver
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from converter.errors import CheckpointError, ConverterError
from converter.healing.student import Student, Sums

if TYPE_CHECKING:
    from accelerate import Accelerator

#: The parts of what is stored.
MODEL, OPTIMIZER = "model", "optimizer"


class Trainee:
    """A student, the `module` that accelerate has made of it, and its optimizer. `clip`: largest norm; 0: any."""

    #: Whose snapshots it reads.
    kind = "torch"

    def __init__(
        self,
        accelerator: Accelerator,
        student: Student,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip: float,
    ) -> None:
        self.student, self.module, self.optimizer = student, module, optimizer
        self._accelerator, self._clip = accelerator, clip

    def add_gradient(self, losses: Callable[[], Sums], scale: float, *, last: bool) -> Sums:
        """Add the gradient of a micro-batch, times `scale`; with the `last` of a step comes the mean over ranks.

        `losses` runs the module.
        """
        with nullcontext() if last else self._accelerator.no_sync(self.module):
            found = losses()
            self._accelerator.backward(found.total * scale)
        return found

    def step(self) -> float:
        """Apply the gradient, unless it is not finite, and forget it; its norm before clipping."""
        norm = float(self._accelerator.clip_grad_norm_(self.module.parameters(), self._clip or math.inf))
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def save(self, folder: Path) -> None:
        """Store weights and moments, each process its shards; any number of processes can read them."""
        self._save(folder / MODEL, get_model_state_dict(self.module))
        self._save(folder / OPTIMIZER, get_optimizer_state_dict(self.module, self.optimizer))

    def load(self, folder: Path) -> None:
        """Take over what was stored; raises CheckpointError where a part of it is missing or damaged."""
        self.load_weights(folder)
        moments = get_optimizer_state_dict(self.module, self.optimizer)
        self._load(folder / OPTIMIZER, moments)
        set_optimizer_state_dict(self.module, self.optimizer, moments)

    def load_weights(self, folder: Path) -> None:
        """The weights alone."""
        weights = get_model_state_dict(self.module)
        self._load(folder / MODEL, weights)
        set_model_state_dict(self.module, weights)

    @property
    def whole(self) -> bool:
        """Whether each process has all of every weight."""
        return not any(isinstance(parameter, DTensor) for parameter in self.student.parameters())

    def gathered(self) -> Callable[[str], Tensor]:
        """A function from a name in the student's model to its weight, for all processes to call together."""
        state = self.student.model.state_dict(keep_vars=True)

        def gather(name: str) -> Tensor:
            tensor: Tensor = state[name].detach()
            return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

        return gather

    def _save(self, folder: Path, tensors: dict[str, Any]) -> None:
        try:
            with _alone_is_meant():
                saver.save(tensors, checkpoint_id=folder, no_dist=self._alone)
        except CheckpointException as error:  # a BaseException around what its writers raise
            why = str(error).strip().splitlines()[-1]
            raise ConverterError("the snapshot cannot be written", where=str(folder), why=why) from error

    def _load(self, folder: Path, tensors: dict[str, Any]) -> None:
        try:
            with _alone_is_meant(), _without_tracebacks():
                loader.load(tensors, checkpoint_id=folder, no_dist=self._alone)
        except (Exception, CheckpointException) as error:
            raise damaged(folder, error) from error

    @property
    def _alone(self) -> bool:
        return bool(self._accelerator.num_processes == 1)


def damaged(part: Path, error: BaseException | str) -> CheckpointError:
    """What is wrong where a part of what was stored cannot be read."""
    why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return CheckpointError(
        f"the snapshot's {part.stem} state is missing or damaged",
        where=str(part),
        why="Without the optimizer's moments the run would not be the same" if part.name == OPTIMIZER else why,
        fix="Remove this snapshot to go on from an older one, or start again with --overwrite",
    )


@contextmanager
def _alone_is_meant() -> Iterator[None]:
    """torch.distributed.checkpoint warns where there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """torch logs a traceback of what is missing, then raises it: the error alone reaches the user."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.ERROR))
    try:
        yield
    finally:
        logging.disable(disabled)
