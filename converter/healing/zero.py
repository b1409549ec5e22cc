"""A model in training on DeepSpeed: ZeRO 1, 2 or 3, with or without offload, by accelerate's own config.

The engine owns the gradients, their clipping, and the optimizer's step. Its fp32 weights and moments lie flat, in
shards, perhaps in the CPU's memory or on a disk; through DeepSpeed's own functions they are read and written one tensor
at a time, so that a snapshot is two safetensors files which any number of processes can read, and no pickle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from converter.conversion.settings import HealSettings
from converter.errors import ConverterError, UnsupportedError
from converter.files.writer import METADATA
from converter.healing.export import export_weights
from converter.healing.optimizer import set_rate
from converter.healing.student import Student, Sums
from converter.healing.trainee import MODEL, OPTIMIZER, Trainee, damaged
from converter.losses.cross_entropy import CrossEntropy

if TYPE_CHECKING:
    from accelerate import Accelerator, DeepSpeedPlugin

#: What a DeepSpeed config may ask for, and what says it in healing.
_OURS = {
    "optimizer": "heal.rate and heal.weight_decay",
    "scheduler": "heal.schedule and heal.warmup",
    "fp16": "heal.precision",
    "amp": "heal.precision",
    "torch_autocast": "heal.precision",
    "tensor_parallel": "stage 3, which shards instead,",
}
_ONE_FILE = 1 << 62


def check_config() -> DeepSpeedPlugin:
    """accelerate's config of DeepSpeed, if healing can run on it.

    Raises ConverterError where DeepSpeed is not installed or not launched, and for a config that is damaged or asks for
    something else.
    """
    from accelerate import DeepSpeedPlugin
    from accelerate.utils import is_deepspeed_available

    if not is_deepspeed_available():
        raise ConverterError(
            "DeepSpeed is not installed", fix="Install it: `pip install 'checkpoint-converter[deepspeed]'`"
        )
    if "LOCAL_RANK" not in os.environ:
        raise ConverterError(
            "DeepSpeed is asked for, and no launcher has started this process",
            fix="Start it by `accelerate launch --use_deepspeed ... -m converter ...`, for one process too",
        )
    try:
        plugin = DeepSpeedPlugin()
    except Exception as error:  # whatever a JSON that is not a config leads to
        raise ConverterError("accelerate cannot use this DeepSpeed config", why=_told(error)) from error
    config: dict[str, Any] = plugin.deepspeed_config
    theirs = [name for name in _OURS if _is_on(config.get(name))]
    if theirs:
        raise UnsupportedError(
            f"the DeepSpeed config has its own {' and '.join(theirs)}",
            fix=f"Leave it out: {' and '.join(_OURS[name] for name in theirs)} say what holds",
        )
    zero = config["zero_optimization"]
    if not isinstance(zero, dict) or zero.get("stage") not in (1, 2, 3):
        raise UnsupportedError(
            "healing runs on ZeRO 1, 2 and 3",
            why=f"This config has {zero.get('stage')!r}" if isinstance(zero, dict) else "This config has none",
            fix='Put {"stage": 3} into "zero_optimization", or launch without DeepSpeed for plain data parallel',
        )
    for name in ("offload_optimizer", "offload_param"):
        place = _section(zero.get(name))
        if place.get("device") == "nvme" and place.get("nvme_path") in (None, "", "none"):
            raise ConverterError(f"{name} goes to nvme, and there is no nvme_path", fix="Name a folder on the disk")
    return plugin


def zero_plugin(settings: HealSettings, bfloat16: bool) -> DeepSpeedPlugin:
    """accelerate's config of DeepSpeed, with what the settings of healing say about precision, clipping and batches."""
    plugin = check_config()
    config: dict[str, Any] = plugin.deepspeed_config
    for name in _OURS:
        config.pop(name, None)  # switched off, or "auto"
    plugin.gradient_clipping = settings.clip
    config |= {
        "gradient_clipping": settings.clip,
        "bf16": {**_section(config.get("bf16")), "enabled": bfloat16},
        # Gradients are summed in fp32 over ranks, and over micro-batches too, unless the config says otherwise. For the
        # latter ZeRO 1 would take another optimizer, one that has no guard against what is not finite.
        "communication_data_type": config.get("communication_data_type") or "fp32",
        "data_types": ({"grad_accum_dtype": "fp32"} if config["zero_optimization"]["stage"] > 1 else {})
        | _section(config.get("data_types")),
        # Micro-batches are ours to count: the engine is told at each whether it is the last.
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": "auto",
    }
    return plugin


def zero_trainee(accelerator: Accelerator, student: Student, optimizer: torch.optim.Optimizer) -> ZeroTrainee:
    """The student in DeepSpeed's engine."""
    try:
        engine, wrapped = accelerator.prepare(student, optimizer)
    except Exception as error:  # pydantic's, DeepSpeed's own, assertions: each for some kind of bad config
        raise ConverterError("DeepSpeed does not start with this config", why=_told(error)) from error
    return ZeroTrainee(accelerator, student, engine, wrapped.optimizer)


class ZeroTrainee(Trainee):
    """A student in DeepSpeed's engine; `optimizer` is ZeRO's, around the one that was given."""

    kind = "DeepSpeed"

    def __init__(
        self, accelerator: Accelerator, student: Student, engine: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(accelerator, student, engine, optimizer, clip=0.0)  # the engine clips
        self._engine = engine

    def add_gradient(self, losses: Callable[[], Sums], scale: float, *, last: bool) -> Sums:
        """See Trainee."""
        self._engine.set_gradient_accumulation_boundary(last)
        found = losses()
        self._engine.backward(found.total * scale)
        return found

    def step(self) -> float:
        """See Trainee. The engine leaves out what is not finite, and tells of it by a norm of inf."""
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def save(self, folder: Path) -> None:
        """Store weights and moments in fp32; the main process writes what all of them bring together."""
        self._link_moments()
        self._write(folder / MODEL, {name: (parameter, None) for name, parameter in self._parameters()})
        moments = {
            f"{kind}.{name}": (parameter, kind) for kind in self._kinds() for name, parameter in self._parameters()
        }
        self._write(folder / OPTIMIZER, moments)

    def load(self, folder: Path) -> None:
        """See Trainee."""
        self.load_weights(folder)
        self._step_by_nothing()
        self._link_moments()
        with _stored(folder / OPTIMIZER) as stored:
            steps = int(stored.metadata()["steps"])
            for kind in self._kinds() if steps else ():  # no step taken, no moments stored
                for name, parameter in self._parameters():
                    self._set(parameter, stored.get_tensor(f"{kind}.{name}"), kind)
        for state in self._states():
            state["step"] = torch.full_like(state["step"], steps) if torch.is_tensor(state["step"]) else steps

    def load_weights(self, folder: Path) -> None:
        """See Trainee. The module runs on what it had until the next step; `gathered` gives the new ones."""
        with _stored(folder / MODEL) as stored:
            for name, parameter in self._parameters():
                self._set(parameter, stored.get_tensor(name))

    @property
    def whole(self) -> bool:
        """See Trainee."""
        return bool(self._engine.zero_optimization_stage() < 3)

    def gathered(self) -> Callable[[str], Tensor]:
        """See Trainee; in fp32."""
        parameters = dict(self.student.model.named_parameters(remove_duplicate=False))
        return lambda name: _full(parameters[name])

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.student.named_parameters())

    def _states(self) -> list[dict[str, Any]]:
        """Of each shard of parameters here: its moments, and how many steps it has seen."""
        return list(self._engine.basic_optimizer.state.values())

    def _kinds(self) -> list[str]:
        """What the optimizer keeps beside each parameter: AdamW's two moments, nothing of plain SGD."""
        return [kind for kind in (self._states() or [{}])[0] if kind != "step"]

    def _step_by_nothing(self) -> None:
        """Take a step at a rate of 0: it makes room for the moments, and has the module run on the weights as set."""
        set_rate(self.optimizer, 0.0)
        ids = torch.zeros(1, 2, dtype=torch.long, device=self._accelerator.device)
        positions = torch.arange(2, device=ids.device).reshape(1, 2)

        def losses() -> Sums:
            found: Sums = self.module(ids, ids, positions, ids, None, (CrossEntropy(1.0),))
            return found

        self.add_gradient(losses, 0.0, last=True)
        self.step()

    def _link_moments(self) -> None:
        """Tell ZeRO 1 and 2 where the moments are: by themselves they know those of the first group only (0.19)."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        if self.whole:
            zero: Any = self.optimizer
            for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
                lazy_init_hp_params_optimizer_state(group, flat, zero.optimizer.state)

    def _set(self, parameter: Any, value: Tensor, kind: str | None = None) -> None:
        """Give this process's shard of a parameter, or of its moment of a kind, its part of the whole `value`."""
        from deepspeed import utils

        value = value.to(self._accelerator.device)
        if not self.whole:
            shard = parameter.ds_tensor.numel()
            part = value.flatten()[shard * self._accelerator.process_index :][:shard]
            value = torch.cat([part, part.new_zeros(shard - len(part))])  # the last shard reaches behind the end
        place = "full" if self.whole else "local"
        if kind is None:
            getattr(utils, f"safe_set_{place}_fp32_param")(parameter, value)
        else:
            getattr(utils, f"safe_set_{place}_optimizer_state")(parameter, value, kind)

    def _write(self, folder: Path, tensors: Mapping[str, tuple[Any, str | None]]) -> None:
        """Write parameters, or their moments of a kind, as one safetensors file."""
        layout = {name: (_shape(parameter), "float32") for name, (parameter, _) in tensors.items()}
        steps = next((str(int(state["step"])) for state in self._states() if "step" in state), "0")
        writes = folder if self._accelerator.is_main_process else None
        if writes is not None:
            writes.mkdir()
        export_weights(lambda name: _full(*tensors[name]), layout, writes, _ONE_FILE, METADATA | {"steps": steps})


def _full(parameter: nn.Parameter, kind: str | None = None) -> Tensor:
    """A parameter, or its moment of a kind, brought together in fp32."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: Tensor = (
        safe_get_full_fp32_param(parameter) if kind is None else safe_get_full_optimizer_state(parameter, kind)
    )
    return found.detach()


def _shape(parameter: Any) -> tuple[int, ...]:
    """Of the whole parameter; ZeRO-3 leaves an empty one in its place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


@contextmanager
def _stored(part: Path) -> Iterator[Any]:
    """What `_write` has written; raises CheckpointError where it cannot be read."""
    try:
        with safe_open(part / "model.safetensors", "pt") as stored:
            yield stored
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise damaged(part, error) from error


def _is_on(section: Any) -> bool:
    """Whether a section of a DeepSpeed config is in force: one that says "auto" is not, and some have a switch."""
    if not isinstance(section, dict):
        return section not in (None, False, "auto")
    return section.get("enabled", True) not in (False, 0, "auto", "false") and section.get("autotp_size", 2) > 1


def _section(found: Any) -> dict[str, Any]:
    return dict(found) if isinstance(found, dict) else {}


def _told(error: Exception) -> str:
    """What an exception says, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
