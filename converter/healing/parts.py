"""The parts of a run, each on its device: the model in training, its optimizer, its teacher, its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel

from converter.conversion.settings import HealSettings
from converter.families.opened import SourceModel
from converter.healing.batches import Batches, Sequences, sequences_of
from converter.healing.loop import Loop
from converter.healing.optimizer import adamw, parameter_groups
from converter.healing.packed import check_no_leak
from converter.healing.recorded import RecordedTeacher, folder_for
from converter.healing.schedules import theta_of
from converter.healing.student import Student, Teacher, in_bfloat16
from converter.healing.teachers import place_teacher
from converter.healing.trainee import Trainee
from converter.healing.zero import zero_trainee
from converter.measure.models import load_transformers
from converter.spec import Norm
from converter.text.gather import HealTexts

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
    learner: Learner,
    settings: HealSettings,
    texts: HealTexts,
    context: int,
    accelerator: Accelerator,
    work: Path,
    say: Callable[[str], None] = lambda text: None,
) -> Loop:
    """A run over sequences of `context` tokens; a recorded teacher's answers lie in the folder `work`.

    Raises VerificationError where packed documents see each other.
    """
    model = learner.model.train()
    without_dropout(model)
    without_padding(model)
    if settings.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    check_no_leak(model)
    batches = Batches(texts.corpus, context, settings.sequences_per_step, settings.seed)
    held_out = sequences_of(texts.windows(context, settings.evaluation_tokens), accelerator.num_processes)
    teacher: Teacher | RecordedTeacher | None = None
    rows = int(model.config.vocab_size)
    if learner.source is not None and settings.teacher == "recorded":
        teacher = _recorded(learner.source, rows, settings, accelerator, batches, held_out, work, say)
    elif learner.source is not None:
        teacher = _teacher(learner.source, rows, settings, accelerator)
    centred = learner.source is not None and learner.source.spec.norm is Norm.LAYERNORM
    student = Student(model, settings.minimised, centred)
    trainee = prepared(accelerator, student, learner.roles, settings)
    thetas = None
    if learner.theta is not None and learner.theta != (theta := theta_of(model)):
        thetas = (theta, learner.theta)
    return Loop(settings, accelerator, trainee, teacher, batches, held_out, thetas)


def prepared(accelerator: Accelerator, student: Student, roles: Roles, settings: HealSettings) -> Trainee:
    """The student as accelerate distributes or shards it, and its optimizer."""
    optimizer = adamw(parameter_groups(student, roles, settings))
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        return zero_trainee(accelerator, student, optimizer)
    module, wrapped = accelerator.prepare(student, optimizer)
    # accelerate's wrapper serves fp16 and skipped steps, of which there are none.
    return Trainee(accelerator, student, module, wrapped.optimizer, settings.clip)


def without_dropout(model: nn.Module) -> None:
    """No dropout: little text is seen, once, and the teacher's answer is to be met exactly."""
    for module in model.modules():
        name = "p" if isinstance(module, nn.Dropout) else "attention_dropout"
        if hasattr(module, name):
            setattr(module, name, 0.0)


def without_padding(model: nn.Module) -> None:
    """No row of an embedding is left out of learning: what pads may be a token of the text, and padding is masked."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None


def _teacher(source: SourceModel, rows: int, settings: HealSettings, accelerator: Accelerator) -> Teacher:
    """The source, frozen, checked for leaks, where the settings want it; in bf16 where the run computes in bf16."""
    model = load_transformers(source)
    check_no_leak(model)
    if accelerator.mixed_precision == "bf16":
        in_bfloat16(model)
    place_teacher(model, "whole" if settings.teacher == "recorded" else settings.teacher, accelerator)
    return Teacher(model, accelerator.autocast, rows)


def _recorded(
    source: SourceModel,
    rows: int,
    settings: HealSettings,
    accelerator: Accelerator,
    batches: Batches,
    held_out: Sequences,
    work: Path,
    say: Callable[[str], None],
) -> RecordedTeacher:
    """The source's answers to all that a run will ask, on disk; each process records those to its own share."""
    folder = folder_for(work, source.checkpoint.stats(), settings.top_k)
    teacher = RecordedTeacher(folder, settings.top_k, source.spec.context)

    def asked() -> Iterator[Sequences]:
        rank, ranks = accelerator.process_index, accelerator.num_processes
        yield held_out.share(rank, ranks)
        for step in range(batches.steps(settings.tokens)):
            yield batches.share(step, rank, ranks)

    teacher.record(lambda: _teacher(source, rows, settings, accelerator), asked(), say)
    accelerator.wait_for_everyone()
    teacher.look()
    return teacher
