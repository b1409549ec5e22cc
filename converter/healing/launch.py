"""One process or many: what accelerate found, and whether that is what the launch asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, broadcast_object_list

from converter.conversion.settings import HealSettings
from converter.errors import ConverterError, UnsupportedError
from converter.healing.zero import check_config, zero_plugin

T = TypeVar("T")

#: What launchers set: torchrun and accelerate the first, then those that mpirun sets.
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
#: The main process reads the text and measures while the others wait; a dead one is the launcher's to notice.
_PATIENCE = timedelta(hours=12)


def join(device: str) -> PartialState:
    """Meet the other processes of this launch, where there are any."""
    if _asked("DEEPSPEED"):
        check_config()
        # accelerate takes `cpu` to mean that there is no DeepSpeed, and DeepSpeed runs on CPUs too.
        return PartialState(cpu=False, timeout=_PATIENCE, **({"backend": "gloo"} if device == "cpu" else {}))
    return PartialState(cpu=device == "cpu", timeout=_PATIENCE)


def start(device: str, settings: HealSettings, log_with: Sequence[str], folder: Path) -> Accelerator:
    """accelerate's view of this process; trackers write into `folder`.

    Raises ConverterError where several processes or a sharded model were asked for and are not what came out, and
    for trackers that are not installed.
    """
    AcceleratorState._reset_state()  # an earlier run of this process may have had another precision
    bfloat16 = settings.precision == "bfloat16" or (
        settings.precision == "auto" and device != "cpu" and _has_bfloat16()
    )
    # The first stage has no use for the final norm and the head, and DDP would wait for their gradients.
    ddp = DistributedDataParallelKwargs(find_unused_parameters=settings.stage_one > 0)
    deepspeed = _asked("DEEPSPEED")
    plugin = zero_plugin(settings, bfloat16) if deepspeed else None
    try:
        join(device)
        accelerator = Accelerator(
            cpu=device == "cpu" and not deepspeed,
            mixed_precision="bf16" if bfloat16 else "no",
            log_with=list(log_with) or None,
            project_dir=folder,
            kwargs_handlers=[ddp],
            deepspeed_plugin=plugin,
        )
    except ValueError as error:  # an unknown tracker
        raise ConverterError("accelerate does not start", why=str(error)) from error
    check_launch(accelerator.distributed_type, accelerator.num_processes)
    absent = set(log_with) - {str(name) for name in accelerator.log_with}
    if absent:
        raise ConverterError(f"{' and '.join(sorted(absent))} is not installed", where="--log-with", fix="Install it")
    if accelerator.is_fsdp2 and bfloat16:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # accelerate's own policy would also round sums of losses, and sums of gradients over ranks, to bf16.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    return accelerator


def check_launch(found: DistributedType, num_processes: int) -> None:
    """Raise ConverterError unless the processes are joined, and shard, as the launch asked them to.

    accelerate lets every process of a launch that it cannot join train by itself, in silence, and on CPU it
    drops the sharding.
    """
    size = max((int(os.environ.get(name) or 1) for name in _SIZES), default=1)
    if size > 1 and num_processes == 1:
        raise ConverterError(
            f"the launch has {size} processes, and this one found no other",
            why="Each of them would train a model of its own",
            fix="Where there are no GPUs, start them by `torchrun --nproc-per-node N -m converter heal ...`",
        )
    if _asked("FSDP") and os.environ.get("FSDP_VERSION", "1") != "2":
        raise UnsupportedError("healing shards by FSDP2", fix="Use --fsdp_version 2")
    if _asked("FSDP") and (found is not DistributedType.FSDP or num_processes == 1):
        raise ConverterError(
            f"the launch asks for FSDP, and accelerate runs {num_processes} process(es) without it",
            why="It shards over several GPUs only, and would otherwise go on unsharded",
            fix="Launch on at least two GPUs, or without --use_fsdp",
        )


def _asked(kind: str) -> bool:
    """Whether the launch asks for FSDP or DEEPSPEED, as accelerate's launcher passes it on."""
    return os.environ.get(f"ACCELERATE_USE_{kind}", "false").lower() in ("true", "1")


def first(state: Accelerator | PartialState, work: Callable[[], T]) -> T | None:
    """Run something on the main process while the others wait; None on them. Its ConverterError is raised on all."""
    result: T | None = None
    failure: list[ConverterError | None] = [None]
    if state.is_main_process:
        try:
            result = work()
        except ConverterError as error:
            failure = [error]
    if state.num_processes > 1:
        broadcast_object_list(failure)
    if failure[0] is not None:
        raise failure[0]
    return result


def share(state: Accelerator | PartialState, value: T) -> T:
    """The main process's value, on all."""
    values = [value]
    if state.num_processes > 1:
        broadcast_object_list(values)
    return values[0]


def leave(state: PartialState) -> None:
    """Part from the other processes, and end this one where there are any.

    DTensor's caches keep a process group alive when it is destroyed. A thread of its gloo part that then frees a
    tensor while the interpreter shuts down ends the process by SIGABRT, which the launcher takes for a failed run:
    this was so in 5 of 10 sharded runs of torch 2.13. So there is no shutdown: everything is written by now.
    """
    several = state.num_processes > 1
    state.destroy_process_group()
    if several:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _has_bfloat16() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
