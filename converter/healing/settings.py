"""How a model is healed: the `heal` section of a recipe, and `--set heal.x=y`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Fields that are a share of the run, from nothing to all of it.
_SHARES = ("warmup", "theta_ramp", "final_rate", "stage_one")
#: Fields of which nothing would make no run.
_POSITIVE = (
    "tokens",
    "sequences_per_step",
    "rate",
    "temperature",
    "rate_q_k",
    "rate_norms",
    "rate_mlp",
    "keep",
    "evaluation_tokens",
    "top_k",
)


@dataclass(frozen=True)
class HealSettings:
    """Losses, data, rates and checkpoints of a healing run.

    The rate is low and starts from nothing: a converted model that is near its source is easily pushed away from it
    again (1e-3 takes the embedded example from a KL of .056 to .154 in 80,000 tokens).
    """

    #: Weights of the KL to the teacher and of the cross-entropy with the text.
    kl: float = 1.0
    ce: float = 0.0
    #: Both distributions are softened by it, and the KL is multiplied by its square, as in Hinton et al. 2015.
    temperature: float = 1.0
    #: forward: KL(teacher || student).
    direction: Literal["forward", "reverse"] = "forward"
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
        for name in _SHARES:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be a share, from 0 to 1")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0")
        if min(self.kl, self.ce, self.weight_decay, self.clip, self.rope_theta, self.target) < 0:
            raise ValueError("weights and limits must not be negative")
        if self.teacher == "recorded" and self.stage_one > 0:
            raise ValueError("stage_one compares layers, and of a recorded teacher there are tokens only")
        if self.teacher == "recorded" and self.temperature != 1.0:
            raise ValueError(
                "temperature must be 1 with a recorded teacher: what is left beside top_k is known at 1 only"
            )
        if self.context == 1:
            raise ValueError("context must be at least 2, to leave a token to predict")

    @property
    def needs_teacher(self) -> bool:
        """Whether anything is learnt from the source."""
        return self.kl > 0 or self.stage_one > 0

    @property
    def compared_with(self) -> str:
        """What the KL of a step or an evaluation is to. That to a few tokens is at most that to the source."""
        return f"the source's top {self.top_k}" if self.teacher == "recorded" else "the source"
