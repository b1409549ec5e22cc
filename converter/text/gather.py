"""The text of a conversion: what calibrated ops look at, and what the damage is measured on, apart from each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from converter.errors import ConverterError
from converter.families.opened import SourceModel
from converter.text.stdlib import TINY_GPT2_SHA256, held_out_documents, training_documents
from converter.text.windows import Document, Windows, documents_from_strings, hold_out, read_documents, windows

if TYPE_CHECKING:
    from converter.conversion.plan import Plan, PlannedStep

#: Without any text exact ops are gated on random tokens; nothing else can be measured on those.
_RANDOM_TOKENS = "no text given: random tokens, good for the gates of exact ops only"
#: Windows longer than this cost more than they tell about the damage.
_LONGEST_WINDOW = 2048


@dataclass(frozen=True)
class Texts:
    """Token windows for calibration and for measuring damage, apart from each other."""

    calibration: Windows | None
    evaluation: Windows
    description: str
    real: bool


def calibrated_step(plan: Plan) -> PlannedStep | None:
    """The first op that needs text."""
    return next((step for step in plan.steps if step.op.calibrated and step.needed), None)


def gather_texts(plan: Plan, text: Sequence[Path], eval_text: Sequence[Path]) -> Texts:
    """Calibration and evaluation windows from the user's files, or from the embedded corpus for its example.

    Raises ConverterError where a calibrated op has no text.
    """
    settings, spec = plan.recipe, plan.source.spec
    if spec.context < 2:
        raise ConverterError(
            f"a model with a context of {spec.context} predicts nothing from text, so nothing can be measured",
            where=plan.source.where,
            fix="Use --no-verify, and a recipe without calibrated ops",
        )
    calibration, evaluation, description = _documents(plan, text, eval_text)
    if not evaluation:
        if (step := calibrated_step(plan)) is not None:
            raise ConverterError(
                f"op '{step.op.name}' is calibrated and needs text",
                why="it fits the model to activations on text like that which the model was trained on",
                fix="Give --text FILE (plain text, .npy or nanoGPT .bin), or take the op out of the recipe",
            )
        return Texts(None, _random_windows(plan), _RANDOM_TOKENS, real=False)

    def cut(documents: list[Document], context: int, tokens: int) -> Windows:
        length = min(context or _LONGEST_WINDOW, spec.context)
        return windows(documents, length, tokens)

    measured = cut(evaluation, settings.verify.context, settings.verify.tokens)
    if measured.predictions == 0:
        raise ConverterError("the held-out text is too short to measure anything", fix="Give a longer --eval-text")
    fitted = cut(calibration, settings.calibration.context, settings.calibration.tokens) if calibration else None
    return Texts(fitted, measured, f"{description}, {measured.predictions:,} predictions", real=True)


def _documents(
    plan: Plan, text: Sequence[Path], eval_text: Sequence[Path]
) -> tuple[list[Document], list[Document], str]:
    """Calibration documents, held-out documents, and where they come from."""
    if not text and not eval_text:
        return _embedded_documents(plan)
    documents = source_documents(plan.source, text)
    if eval_text:
        if not documents and calibrated_step(plan) is not None:
            return [], [], ""
        return documents, source_documents(plan.source, eval_text), ", ".join(path.name for path in eval_text)
    calibration, evaluation = hold_out(documents)
    return calibration, evaluation, "a held-out tenth of " + ", ".join(path.name for path in text)


def _embedded_documents(plan: Plan) -> tuple[list[Document], list[Document], str]:
    """The embedded corpus, for the embedded example only."""
    tokenizer = plan.source.tokenizer
    if tokenizer is None or not is_embedded_example(plan.source):
        return [], [], ""
    opening = plan.source.opening
    budget = 8 * plan.recipe.calibration.tokens  # characters; a token of this corpus has about four
    calibration = documents_from_strings(_sample(training_documents(), budget), tokenizer, opening)
    held_out = documents_from_strings(held_out_documents(), tokenizer, opening)
    return calibration, held_out, "held-out modules of the Python standard library"


def source_documents(source: SourceModel, paths: Sequence[Path]) -> list[Document]:
    """Files as documents in a checkpoint's own tokens."""
    if not paths:
        return []
    return read_documents(
        paths,
        source.tokenizer,
        vocab_size=source.spec.vocab_size,
        end_of_text=source.opening,
    )


def is_embedded_example(source: SourceModel) -> bool:
    """Whether the weights are those of `examples/tiny-gpt2`, by their hash."""
    files = source.checkpoint.files
    if len(files) != 1 or files[0].stat().st_size > 1 << 24:
        return False
    return source.checkpoint.sha256()[files[0].name] == TINY_GPT2_SHA256


def _sample(documents: Sequence[str], characters: int) -> dict[str, str]:
    """Documents in a fixed random order, as many as hold about this many characters."""
    chosen: dict[str, str] = {}
    total = 0
    for index in np.random.default_rng(0).permutation(len(documents)).tolist():
        if total >= characters:
            break
        chosen[str(index)] = documents[index]
        total += len(documents[index])
    return chosen


def _random_windows(plan: Plan) -> Windows:
    spec = plan.source.spec
    length = min(spec.context, 256)
    ids = np.random.default_rng(0).integers(0, plan.target_spec.vocab_size, (4, length), dtype=np.int64)
    return Windows(ids, np.full(4, length, dtype=np.int64))
