"""Settings of a recipe beside its steps: sections of the file, and `--set section.x=y`."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from converter.losses import Loss, losses

#: Fields that change how a run is made and nothing about what it makes. `top_k` is one unless the teacher is recorded.
_FREE = ("keep", "micro_batch", "save_every", "gradient_checkpointing", "teacher", "top_k")
#: Fields that are a share of the run, from nothing to all of it.
_SHARES = ("warmup", "theta_ramp", "final_rate", "stage_one")
#: Fields of which nothing would make no run.
_POSITIVE = (
    "tokens",
    "sequences_per_step",
    "rate",
    "rate_q_k",
    "rate_norms",
    "rate_mlp",
    "keep",
    "evaluation_tokens",
    "top_k",
)


@dataclass(frozen=True)
class VerifySettings:
    """How much text the damage is measured on: at most `tokens`, in windows of `context` (0: the model's own)."""

    tokens: int = 32768
    context: int = 0

    def __post_init__(self) -> None:
        _check_windows(self.tokens, self.context)


@dataclass(frozen=True)
class CalibrationSettings:
    """How much text the calibrated ops see: at most `tokens`, in windows of `context` (0: the model's own)."""

    tokens: int = 65536
    context: int = 0

    def __post_init__(self) -> None:
        _check_windows(self.tokens, self.context)


def _check_windows(tokens: int, context: int) -> None:
    if tokens < 2 or context == 1:
        raise ValueError("must be at least 2, to leave a token to predict")


def parameters_of(settings: Any) -> dict[str, Any]:
    """The parameters of a dataclass, an op or a section of a recipe, with their annotations."""
    if isinstance(settings, HealSettings):
        return settings.parameters()
    hints = typing.get_type_hints(type(settings))
    return {each.name: hints[each.name] for each in dataclasses.fields(settings)}


@dataclass(frozen=True)
class HealSettings:
    """Losses, data, rates and checkpoints of a healing run.

    In a recipe a loss stands by its name and its weight, `kl: 1.0`, and its parameters beside it, `temperature: 2.0`.

    The rate is low and starts from nothing: a converted model that is near its source is easily pushed away from it
    again (1e-3 takes the embedded example from a KL of .056 to .154 in 80,000 tokens).
    """

    #: Every loss that is known, by name, with its weight and its parameters.
    losses: Mapping[str, Loss] = field(default_factory=lambda: {name: each() for name, each in losses().items()})
    #: Share of the run that fits the states after each layer to the teacher's, before it goes on with the logits.
    stage_one: float = 0.0

    #: Tokens to see in all.
    tokens: int = 2_000_000
    sequences_per_step: int = 8
    #: Tokens of a sequence; 0: the converted model's context.
    context: int = 0
    #: Tokens that a process runs at once, in whole sequences; 0: its share of a step.
    micro_batch: int = 0
    gradient_checkpointing: bool = False
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    #: Where the frozen teacher lies: whole in each process, a shard in each, or in the memory of the CPU. Or recorded:
    #: it says its `top_k` likeliest tokens once, to the disk, and is gone before the training begins.
    teacher: Literal["whole", "sharded", "offloaded", "recorded"] = "whole"
    top_k: int = 64

    #: Peak learning rate of AdamW, and what the parts of a layer get of it.
    rate: float = 2e-4
    rate_q_k: float = 2.0
    rate_norms: float = 2.0
    rate_mlp: float = 1.0
    schedule: Literal["cosine", "1-sqrt"] = "cosine"
    #: Share of the steps in which the rate rises, and what is left of it at the end.
    warmup: float = 0.1
    final_rate: float = 0.0
    weight_decay: float = 0.01
    #: Largest norm of a step's gradient; 0: no clipping.
    clip: float = 1.0

    #: A new base of the rotary frequencies; 0: the converted model's.
    rope_theta: float = 0.0
    #: Share of the steps in which theta rises to it; 0: at once.
    theta_ramp: float = 0.0

    #: Steps between two evaluations, and between two snapshots; 0: a tenth of the run.
    evaluate_every: int = 0
    save_every: int = 0
    #: Snapshots that are kept, beside that of the best evaluation.
    keep: int = 2
    #: Held-out tokens that an evaluation takes.
    evaluation_tokens: int = 32768
    #: Stop where the held-out KL (the cross-entropy, where the KL has no weight) is down here; 0: at the end.
    target: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError with what a value must be."""
        own = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        if not all(math.isfinite(value) for value in own.values() if isinstance(value, float)):
            raise ValueError("a number must be finite")
        for name in _SHARES:
            if not 0.0 <= own[name] <= 1.0:
                raise ValueError(f"{name} must be a share, from 0 to 1")
        for name in _POSITIVE:
            if not own[name] > 0:
                raise ValueError(f"{name} must be more than 0")
        if min(self.weight_decay, self.clip, self.target) < 0:
            raise ValueError("weights and limits must not be negative")
        if not (self.rope_theta == 0 or self.rope_theta > 1):
            raise ValueError("rope_theta must be more than 1, or 0 for the converted model's own")
        if self.teacher == "recorded" and self.stage_one > 0:
            raise ValueError("stage_one compares layers, and of a recorded teacher there are tokens only")
        for loss in self.losses.values() if self.teacher == "recorded" else ():
            if why := loss.against_recorded():
                raise ValueError(why)
        if self.context == 1:
            raise ValueError("context must be at least 2, to leave a token to predict")

    def fingerprint(self) -> dict[str, Any]:
        """The settings that the result depends on."""
        facts = {name: value for name, value in self.to_dict().items() if name not in _FREE}
        return facts | ({"top_k": self.top_k} if self.teacher == "recorded" else {})

    @property
    def minimised(self) -> tuple[Loss, ...]:
        """The losses that are learnt from."""
        return tuple(loss for loss in self.losses.values() if loss.weight)

    @property
    def compared_with(self) -> str:
        """What the KL of a step or an evaluation is to. That to a few tokens is at most that to the source."""
        return f"the source's top {self.top_k}" if self.teacher == "recorded" else "the source"

    @property
    def objective(self) -> str:
        """What is minimised, in words: "1 x KL to the source + 0.5 x cross-entropy"."""
        words = (f"{each.weight:g} x {each.label.format(source=self.compared_with)}" for each in self.minimised)
        return " + ".join(words)

    def parameters(self) -> dict[str, Any]:
        """Every setting of the section, with its annotation; the losses' first. Raises ValueError where two clash."""
        found: dict[str, Any] = dict.fromkeys(self.losses, float)
        hints = typing.get_type_hints(type(self))
        own = {each.name: hints[each.name] for each in dataclasses.fields(self) if each.name != "losses"}
        for more in (*(_parameters_of_loss(loss) for loss in self.losses.values()), own):
            if clash := found.keys() & more:
                raise ValueError(f"two settings of healing are called '{min(clash)}'")
            found |= more
        return found

    def replace(self, **values: Any) -> HealSettings:
        """A copy with some settings changed, each by its name in the section; raises ValueError for a bad value."""
        changed = dict(self.losses)
        for name, loss in self.losses.items():
            own = {key: values.pop(key) for key in _parameters_of_loss(loss) if key in values}
            own |= {"weight": values.pop(name)} if name in values else {}
            changed[name] = dataclasses.replace(loss, **own)
        return dataclasses.replace(self, **values, losses=changed)

    def to_dict(self) -> dict[str, Any]:
        """Every setting as the section has it."""
        values = {name: loss.weight for name, loss in self.losses.items()} | vars(self)
        for loss in self.losses.values():
            values |= {name: getattr(loss, name) for name in _parameters_of_loss(loss)}
        return {name: values[name] for name in self.parameters()}


def _parameters_of_loss(loss: Loss) -> dict[str, Any]:
    hints = typing.get_type_hints(type(loss))
    return {each.name: hints[each.name] for each in dataclasses.fields(loss) if each.name != "weight"}
