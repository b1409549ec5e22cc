"""What a conversion and a healing run learn from, and what the damage is measured on, apart from each other.

Both read the same text in the same way (`read_sides`), so that neither learns from what the other is measured on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from converter.errors import ConverterError
from converter.families.opened import SourceModel
from converter.text.corpus import Corpus, cached_split
from converter.text.documents import Document, Reading, at_least, documents_of, read
from converter.text.sources import Text
from converter.text.stdlib import TINY_GPT2_SHA256, held_out_documents, training_documents
from converter.text.tokens import ModelTokens
from converter.text.windows import Split, Windows, read_split, windows

if TYPE_CHECKING:
    from converter.conversion.plan import Plan, PlannedStep

#: Without any text exact ops are gated on random tokens; nothing else can be measured on those.
_RANDOM_TOKENS = "no text given: random tokens, good for the gates of exact ops only"
_EMBEDDED = "held-out modules of the Python standard library"
#: Windows longer than this cost more than they tell about the damage.
_LONGEST_WINDOW = 2048


@dataclass(frozen=True)
class Texts:
    """Token windows for calibration and for measuring damage, apart from each other."""

    calibration: Windows | None
    evaluation: Windows
    description: str
    real: bool
    #: What a user should know about the text.
    notes: tuple[str, ...] = ()


def calibrated_step(plan: Plan) -> PlannedStep | None:
    """The first op that needs text."""
    return next((step for step in plan.steps if step.op.calibrated and step.needed), None)


def gather_texts(plan: Plan, text: Sequence[Text], eval_text: Sequence[Text]) -> Texts:
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
    split, description = _split(plan, text, eval_text)
    if not split.held_out:
        if (step := calibrated_step(plan)) is not None:
            raise ConverterError(
                f"op '{step.op.name}' is calibrated and needs text",
                why="it fits the model to its activations on text",
                fix="Give --text, a text like that which the model was trained on, or take the op out of the recipe",
            )
        return Texts(None, _random_windows(plan), _RANDOM_TOKENS, real=False)

    end_of_text = tokens_of(plan.source).end_of_text

    def cut(documents: list[Document], context: int, tokens: int) -> Windows:
        length = min(context or _LONGEST_WINDOW, spec.context)
        return windows(documents, length, tokens, end_of_text=end_of_text)

    measured = cut(split.held_out, settings.verify.context, settings.verify.tokens)
    if measured.predictions == 0:
        raise ConverterError("the held-out text is too short to measure anything", fix="Give a longer --eval-text")
    fitted = cut(split.learnt, settings.calibration.context, settings.calibration.tokens) if split.learnt else None
    return Texts(fitted, measured, f"{description}, {measured.predictions:,} predictions", True, split.notes)


def _split(plan: Plan, text: Sequence[Text], eval_text: Sequence[Text]) -> tuple[Split, str]:
    """Calibration documents, held-out documents, and where they come from."""
    if not text and not eval_text:
        return _embedded(plan)
    if not text and calibrated_step(plan) is not None:
        return Split([], []), ""
    # Twice what is wanted: there are then enough full windows to choose from.
    learn, hold = 2 * plan.recipe.calibration.tokens, 2 * plan.recipe.verify.tokens
    return read_sides(text, eval_text, tokens_of(plan.source), learn, hold), described(text, eval_text)


def read_sides(text: Sequence[Text], eval_text: Sequence[Text], tokens: ModelTokens, learn: int, hold: int) -> Split:
    """What to learn from, and what to measure on: `eval_text`, or a tenth of `text`; about so many tokens of each."""
    if not eval_text:
        return read_split(text, tokens, learn, hold)
    measured = read(eval_text, tokens, at_least(hold))
    learnt = read(text, tokens, at_least(learn)) if text else Reading()
    return Split(learnt.documents, measured.documents, (*learnt.notes, *measured.notes))


def described(text: Sequence[Text], eval_text: Sequence[Text]) -> str:
    """What is measured on, in words."""
    names = ", ".join(Path(each).name for each in (eval_text or text))
    return names if eval_text else f"a held-out tenth of {names}"


def _embedded(plan: Plan) -> tuple[Split, str]:
    """The embedded corpus, for the embedded example only."""
    tokens = tokens_of(plan.source)
    if tokens.tokenizer is None or not is_embedded_example(plan.source):
        return Split([], []), ""
    budget = 8 * plan.recipe.calibration.tokens  # characters; a token of this corpus has about four
    learnt = documents_of(_sample(training_documents(), budget), tokens)
    return Split(learnt, documents_of(held_out_documents(), tokens)), _EMBEDDED


def tokens_of(source: SourceModel) -> ModelTokens:
    """The tokens that a checkpoint reads a text in."""
    return ModelTokens(source.tokenizer, source.spec.vocab_size, source.opening, source.ends)


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


@dataclass(frozen=True, eq=False)
class HealTexts:
    """What a run learns from, and what it is measured on."""

    corpus: Corpus
    held_out: list[Document]
    description: str
    #: What a user should know about the text.
    notes: tuple[str, ...] = ()

    def windows(self, context: int, tokens: int) -> Windows:
        """Windows to measure on, the ends of documents among them."""
        return windows(self.held_out, context, tokens, end_of_text=self.corpus.end_of_text)


def gather_heal_texts(
    source: SourceModel, text: Sequence[Text], eval_text: Sequence[Text], cache: Path, learn: int, hold: int
) -> HealTexts:
    """Corpus and held-out documents from the user's files, or from the embedded corpus for its example.

    About `learn` tokens to learn from and `hold` to measure on, if there are so many, kept in the folder `cache`.
    What is held out of a text is what a conversion holds out of it. Raises ConverterError where there is no text.
    """
    tokens, embedded = tokens_of(source), is_embedded_example(source)
    if not text and (tokens.tokenizer is None or not embedded):
        raise ConverterError(
            "there is no text to learn from",
            fix="Give --text: files, folders or hub:owner/name, of the kind that the model was trained on",
        )
    if not text:
        named = {str(number): document for number, document in enumerate(training_documents())}
        corpus = Corpus.of(documents_of(named, tokens), tokens.end_of_text)
        return HealTexts(corpus, documents_of(held_out_documents(), tokens), _EMBEDDED)
    decisive = (learn, hold, len(text))
    corpus, held_out, notes = cached_split(
        (*text, *eval_text), tokens, decisive, cache, lambda: read_sides(text, eval_text, tokens, learn, hold)
    )
    return HealTexts(corpus, held_out.split(), described(text, eval_text), notes)
