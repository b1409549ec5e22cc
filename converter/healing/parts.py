"""The parts of a run, each on its device: the model in training, its optimizer, its teacher, its batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from converter.healing.batches import Batches
from converter.healing.documents import check_no_leak
from converter.healing.loop import Loop
from converter.healing.losses import LossWeights
from converter.healing.model import Student, Teacher
from converter.healing.optimizer import adamw, parameter_groups
from converter.healing.settings import HealSettings
from converter.healing.teachers import place_teacher
from converter.healing.texts import HealTexts, sequences_of
from converter.healing.theta import theta_of
from converter.source import SourceModel
from converter.spec import Norm
from converter.text import windows
from converter.verification import load_transformers

if TYPE_CHECKING:
    from accelerate import Accelerator

Roles = Mapping[str, Iterable[str]]


@dataclass(frozen=True, eq=False)
class Learner:
    """A model to be trained, the roles of its parameters, and the source that it learns from, if any."""

    model: PreTrainedModel
    roles: Roles
    source: SourceModel | None = None
    #: The rotary base to end with; None for the model's own.
    theta: float | None = None


def roles_of(source: SourceModel) -> Roles:
    """What each parameter of transformers' class of a checkpoint is."""
    return {source.family.full_name(bare): roles for bare, roles in source.used.items()}


def make_loop(
    learner: Learner, settings: HealSettings, texts: HealTexts, context: int, accelerator: Accelerator
) -> Loop:
    """A run over sequences of `context` tokens. Raises VerificationError where packed documents see each other."""
    model = learner.model.train()
    without_dropout(model)
    if settings.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    check_no_leak(model)
    teacher = _teacher(learner.source, settings, accelerator) if learner.source is not None else None
    weights = LossWeights(settings.kl, settings.ce, settings.temperature, settings.direction)
    centred = learner.source is not None and learner.source.spec.norm is Norm.LAYERNORM
    student = Student(model, weights, centred)
    module, optimizer = prepared(accelerator, student, learner.roles, settings)
    thetas = None
    if learner.theta is not None and learner.theta != (theta := theta_of(model)):
        thetas = (theta, learner.theta)
    held_out = windows(texts.held_out, context, settings.evaluation_tokens)
    return Loop(
        settings,
        accelerator,
        student,
        module,
        optimizer,
        teacher,
        Batches(texts.corpus, context, settings.sequences_per_step, settings.seed),
        sequences_of(held_out, accelerator.num_processes),
        thetas,
    )


def prepared(
    accelerator: Accelerator, student: Student, roles: Roles, settings: HealSettings
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The student as accelerate distributes or shards it, and its optimizer."""
    module, optimizer = accelerator.prepare(student, adamw(parameter_groups(student, roles, settings)))
    return module, optimizer.optimizer  # accelerate's wrapper serves fp16 and skipped steps, of which there are none


def without_dropout(model: nn.Module) -> None:
    """No dropout: little text is seen, once, and the teacher's answer is to be met exactly."""
    for module in model.modules():
        name = "p" if isinstance(module, nn.Dropout) else "attention_dropout"
        if hasattr(module, name):
            setattr(module, name, 0.0)


def _teacher(source: SourceModel, settings: HealSettings, accelerator: Accelerator) -> Teacher:
    """The source, frozen, checked for leaks, where the settings want it; in bf16 where the run computes in bf16."""
    model = load_transformers(source)
    check_no_leak(model)
    if accelerator.mixed_precision == "bf16":
        model.to(torch.bfloat16)
    place_teacher(model, settings.teacher, accelerator)
    return Teacher(model, accelerator.autocast)
