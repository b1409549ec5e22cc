"""What a healing run is about: opened, checked, and refused where it cannot work, before anything is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from converter import __version__
from converter.conversion.plan import DtypeName
from converter.conversion.recipe import Recipe, load_recipe, with_overrides
from converter.conversion.settings import HealSettings
from converter.errors import ConverterError, UnsupportedError
from converter.families import Family
from converter.families.opened import SourceModel
from converter.files.writer import parse_size
from converter.healing.export import check_exportable, check_generation_config
from converter.healing.positions import healed_config
from converter.measure.vocabulary import Vocabulary, common_ids
from converter.spec import ModelSpec
from converter.text.gather import HealTexts


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """One run, known before it starts."""

    settings: HealSettings
    converted: SourceModel
    #: What it was converted from; None where nothing is learnt from it or measured against it.
    source: SourceModel | None
    #: What config.json will say of the model itself.
    config: dict[str, Any]
    #: Tokens of a sequence.
    context: int
    #: The rotary base that the run ends with; None for a model without one.
    theta: float | None
    dtype: DtypeName
    shard_size: int

    @property
    def reader(self) -> SourceModel:
        """The model in whose tokens the text is read: the source, unless it has padding rows that the other lacks."""
        if self.source is None or self.source.spec.vocab_size > self.converted.spec.vocab_size:
            return self.converted
        return self.source

    @property
    def compared_context(self) -> int:
        """The length of the closing comparison: that of the training, where the source has so many positions."""
        if self.source is None or not self.source.spec.absolute_positions:
            return self.context
        return min(self.context, self.source.spec.context)

    def fingerprint(self, texts: HealTexts) -> dict[str, Any]:
        """What makes two runs the same. How many processes and micro-batches share a step changes nothing."""
        opened = {"converted": self.converted, "teacher": self.source}
        files = {name: model.checkpoint.stats() for name, model in opened.items() if model is not None}
        measured = texts.windows(self.context, self.settings.evaluation_tokens)
        digests = {"text": texts.corpus.fingerprint, "held-out text": measured.digest()}
        stored = {"dtype": self.dtype, "shard size": self.shard_size}
        return {"tool": __version__, **files, **digests, **stored, **self.settings.fingerprint()}


def heal_settings(converted: Path, recipe: str | None, overrides: Iterable[str]) -> HealSettings:
    """The `heal` section of a recipe, of the one beside the converted checkpoint, or the defaults."""
    beside = converted / "recipe.yaml"
    if recipe is None and beside.is_file():
        recipe = str(beside)
    base = load_recipe(recipe) if recipe is not None else Recipe("of defaults", "", ())
    return with_overrides(base, overrides).heal


def open_job(
    settings: HealSettings,
    converted: str | Path,
    teacher: str | Path | None,
    dtype: DtypeName | None,
    max_shard_size: str | int,
) -> Job:
    """Open the checkpoints of a run. Raises ConverterError for what cannot work."""
    student = SourceModel.open(converted)
    check_exportable(student.family, student.where)
    source = None if teacher is None else _open_teacher(student, teacher)
    if source is None and (settings.stage_one > 0 or any(loss.asks_teacher for loss in settings.minimised)):
        raise ConverterError(
            "there is no teacher", fix="Name the source with --teacher, or learn from text alone: heal.kl=0, heal.ce=1"
        )
    if source is not None and settings.stage_one > 0:
        _check_layers(student, source)
    check_generation_config(student)
    config, context, theta = what_is_learnt(settings, student.family, student.spec, student.checkpoint.config)
    stored = {info.dtype for info in student.checkpoint.tensors.values()}
    kept: DtypeName = next((name for name in get_args(DtypeName) if stored == {name}), "float32")
    return Job(
        settings,
        student,
        source,
        config,
        context=context,
        theta=theta,
        dtype=dtype or kept,
        shard_size=parse_size(max_shard_size),
    )


def what_is_learnt(
    settings: HealSettings, family: Family, spec: ModelSpec, config: Mapping[str, Any]
) -> tuple[dict[str, Any], int, float | None]:
    """The config that a model of these facts is written with, its context and its theta, all found sound.

    Raises ConverterError where the settings leave nothing to learn, or ask for positions that the model cannot have.
    """
    if not settings.minimised:
        weights = ", ".join(f"heal.{name}" for name in settings.losses)
        raise ConverterError(
            "the weights of all losses are 0, which leaves nothing to learn from", fix=f"Set one of {weights} above 0"
        )
    context, theta = settings.context or spec.context, None
    if spec.rope is not None:
        theta = settings.rope_theta or spec.rope.theta
    elif settings.rope_theta:
        raise UnsupportedError(
            "the converted model has no rotary positions", where="heal.rope_theta", fix="Leave the theta out"
        )
    return healed_config(family, spec, config, theta, context), context, theta


def _open_teacher(student: SourceModel, teacher: str | Path) -> SourceModel:
    """The source, which must have the converted model's tokens."""
    source = SourceModel.open(teacher)
    if source.family.model_class is None and source.family.stand_in is None:
        raise UnsupportedError(
            f"transformers has no class that runs a {source.family.name}, so it cannot teach",
            where=source.where,
            fix="Convert it to Hugging Face's format first: `converter recipes list` shows how",
        )
    common_ids(Vocabulary.of(source), Vocabulary.of(student))
    if source.spec.vocab_size < student.spec.vocab_size:
        raise UnsupportedError(
            f"the converted model has {student.spec.vocab_size} rows and its teacher {source.spec.vocab_size}",
            where=student.where,
            why="the teacher says nothing about the padding rows of the converted model",
            fix="Convert again with --trim-vocab, which drops them",
        )
    return source


def _check_layers(student: SourceModel, source: SourceModel) -> None:
    """The first stage compares layer with layer."""
    shapes = [(model.spec.num_layers, model.spec.hidden_size) for model in (student, source)]
    if shapes[0] != shapes[1] or shapes[0][0] < 2:
        raise UnsupportedError(
            "the first stage needs two layers or more, as many and as wide as the teacher's: the converted model has "
            "{} of {}, the teacher {} of {}".format(*shapes[0], *shapes[1]),
            where="heal.stage_one",
            fix="Set heal.stage_one to 0",
        )
