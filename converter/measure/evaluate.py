"""How well models predict held-out text, by context length and by position, and how far they are from the first.

Each document is scored whole, by a window that slides over it (as in transformers' guide to the perplexity of
models of fixed length): of a window only the last `stride` tokens count, but for the first, so that every
token has at least context - stride tokens before it, or all that there are. So every context length is
measured on the very same tokens, all but the first of each document.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from converter.errors import ConverterError, UnsupportedError
from converter.measure.metrics import Comparison, EndOfText, Figures, Tally
from converter.measure.models import RunnableCheckpoint, pick_device
from converter.measure.verify import LOGITS, LONGEST_WINDOW
from converter.measure.vocabulary import common_ids
from converter.reference import RunningModel
from converter.text.corpus import Corpus, load_corpus
from converter.text.sources import Text, listed
from converter.text.tokens import Ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from converter.show.progress import Progress


@dataclass(frozen=True)
class AtContext:
    """A model's figures for one context length, in nats per token over `tokens` predictions.

    KL to the first model and top-1 agreement with it are None where there is nothing to compare. `buckets`
    are the same figures by the position in the window.
    """

    context: int
    stride: int
    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float | None
    kl: float | None
    agreement: float | None
    buckets: tuple[Figures, ...]
    #: What it says of the end-of-text token, beside the first model; None for a model without such a token.
    end_of_text: EndOfText | None = None


@dataclass(frozen=True)
class Evaluation:
    """A model on a text. `no_kl` and `no_context` say in words why figures are missing, the latter by context."""

    path: str
    results: tuple[AtContext, ...]
    no_kl: str | None
    no_context: dict[int, str]
    #: What a user should know of how the checkpoint was read.
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def evaluate(
    paths: str | Path | Sequence[str | Path],
    *,
    text: Text | Sequence[Text],
    context: int | Sequence[int] = (),
    stride: int = 256,
    max_tokens: int | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> list[Evaluation]:
    """Held-out loss of checkpoints by context length, and their KL to the first; each a path or a Hub id.

    `text` is anything that can be healed on: files, folders, hub:owner/name. Without a `context` it is the first
    model's, up to 2048. A stride is cut to context - 1: a token is predicted by the one before it, which must be
    in its window. With `max_tokens` the text ends with the document that reaches so many of the first
    model's tokens. Two models are in memory at once. `progress` has a stage for each model and context, in tokens.

    Raises a ConverterError for checkpoints and texts that cannot be read. A context beyond a table of learned
    positions is noted in `no_context`, and the rest is measured.
    """
    compared = [paths] if isinstance(paths, (str, Path)) else list(paths)
    texts = listed(text)
    contexts = [context] if isinstance(context, int) else sorted(set(context))
    if not compared:
        raise ConverterError("there is no checkpoint to evaluate", fix="Name one or more")
    counts = (("stride", stride, 1), ("max_tokens", max_tokens, 2), *(("context", each, 2) for each in contexts))
    for name, value, least in counts:
        if value is not None and value < least:
            raise ConverterError(f"a {name} of {value} leaves nothing to predict", fix=f"Choose {least} or more")
    device = pick_device(device)
    first = _Subject.open(compared[0], texts, max_tokens, device)
    for note in first.corpus.notes:
        (progress or Progress()).say(f"Note: {note}.")
    contexts = contexts or [min(LONGEST_WINDOW, first.checkpoint.model.context or LONGEST_WINDOW)]
    evaluations = [_evaluate(first, first, contexts, stride, progress)]
    for path in compared[1:]:  # no name keeps a model, so it is gone before the next one is loaded
        evaluations.append(
            _evaluate(_Subject.open(path, texts, max_tokens, device, first), first, contexts, stride, progress)
        )
    return evaluations


@dataclass(frozen=True, eq=False)
class _Subject:
    """A checkpoint that runs, and the text in its tokens."""

    path: str
    checkpoint: RunnableCheckpoint
    corpus: Corpus
    no_kl: str | None

    @classmethod
    def open(
        cls,
        path: str | Path,
        texts: Sequence[Text],
        max_tokens: int | None,
        device: str,
        reference: _Subject | None = None,
    ) -> _Subject:
        """Load a model; its tokens are those of the reference where the two can be compared."""
        loaded = RunnableCheckpoint(path, device)
        no_kl = None if reference is None else _difference(reference, loaded)
        if reference is not None and no_kl is None:
            return cls(str(path), loaded, reference.corpus, None)
        corpus = load_corpus(
            texts,
            loaded.tokens(),
            max_tokens=max_tokens if reference is None else None,
            max_pieces=None if reference is None else reference.corpus.pieces,  # the same text, in other tokens
        )
        return cls(str(path), loaded, corpus, no_kl)


def _difference(reference: _Subject, loaded: RunnableCheckpoint) -> str | None:
    """Why a model has no KL to the first, in a line."""
    try:
        common = common_ids(reference.checkpoint.vocabulary, loaded.vocabulary)
    except UnsupportedError as error:
        return " ".join(f"{error.what}; {error.why}".split())
    if int(reference.corpus.ids.max(initial=0)) >= common:
        return f"the text has ids beyond the {common} that both models have"
    return None


def _evaluate(
    subject: _Subject,
    first: _Subject,
    contexts: Sequence[int],
    stride: int,
    progress: Progress | None,
) -> Evaluation:
    tokenizer = subject.checkpoint.tokenizer
    if subject.corpus is first.corpus and tokenizer is None:
        tokenizer = first.checkpoint.tokenizer
    size = _size_in_bytes(subject.corpus, tokenizer)
    longest, first_longest = subject.checkpoint.model.longest, first.checkpoint.model.longest
    results, no_context = [], {}
    for context in contexts:
        if longest is not None and context > longest:
            no_context[context] = f"has learnt {longest} positions, too few for a context of {context}"
            continue
        comparable = subject.no_kl is None and (first_longest is None or context <= first_longest)
        reference = first if comparable and subject is not first else subject
        step = min(stride, context - 1)
        spans = sorted(_spans(subject.corpus, context, step), key=len)
        if progress:
            progress.stage(f"{subject.path} at {context}", sum(map(len, spans)), unit="tokens")
        found = _compare(reference.checkpoint.model, subject.checkpoint.model, subject.corpus, spans, progress)
        total = found.total
        results.append(
            AtContext(
                context=context,
                stride=step,
                tokens=total.tokens,
                loss=total.loss,
                perplexity=math.exp(min(total.loss, 700.0)),
                bits_per_byte=_nats_of_text(found) / size / math.log(2.0) if size else None,
                kl=total.kl if reference is not subject else None,
                agreement=total.agreement if reference is not subject else None,
                buckets=found.buckets,
                end_of_text=found.end_of_text,
            )
        )
    return Evaluation(subject.path, tuple(results), subject.no_kl, no_context, subject.checkpoint.notes)


def _compare(
    reference: RunningModel,
    model: RunningModel,
    corpus: Corpus,
    spans: Sequence[_Span],
    progress: Progress | None,
) -> Comparison:
    """Both models over the same windows, in the order of their lengths; a model against itself runs once."""
    longest = len(spans[-1]) if spans else 1
    tally = Tally(longest, corpus.end_of_text)
    rows = max(1, LOGITS // model.vocab_size // longest)
    for start in range(0, len(spans), rows):
        batch = spans[start : start + rows]
        ids, row, position, target = (torch.from_numpy(each).to(model.device) for each in _batch(corpus, batch))
        logits = model.logits(ids)[row, position]
        other = logits if reference is model else reference.logits(ids)[row, position]
        tally.add(other, logits, target, position)
        if progress:
            progress.advance(sum(map(len, batch)))
    return tally.comparison()


@dataclass(frozen=True)
class _Span:
    """A window over the corpus: tokens start to stop, of which those from `scored` on count.

    With `ended` text ends behind it, and the end-of-text token counts too.
    """

    start: int
    scored: int
    stop: int
    ended: bool

    def __len__(self) -> int:
        return self.stop - self.start


def _spans(corpus: Corpus, context: int, stride: int) -> Iterator[_Span]:
    """The windows of every document of two tokens or more."""
    ended = corpus.ended & (corpus.end_of_text is not None)
    for first, end, real in zip(corpus.offsets[:-1].tolist(), corpus.offsets[1:].tolist(), ended.tolist(), strict=True):
        start, scored = first, first + 1
        while scored < end:
            stop = min(start + context, end)
            yield _Span(start, scored, stop, real and stop == end)
            start, scored = start + stride, stop


def _batch(corpus: Corpus, spans: Sequence[_Span]) -> tuple[Ids, Ids, Ids, Ids]:
    """Token ids (n, T) padded on the right; and which (row, position) predicts which token that counts, (N,) each."""
    ids = np.zeros((len(spans), max(map(len, spans))), dtype=np.int64)
    for row, span in zip(ids, spans, strict=True):
        row[: len(span)] = corpus.ids[span.start : span.stop]
    stops = [span.stop + span.ended for span in spans]
    rows = np.repeat(np.arange(len(spans)), [stop - span.scored for span, stop in zip(spans, stops, strict=True)])
    positions = [np.arange(span.scored - 1, stop - 1) - span.start for span, stop in zip(spans, stops, strict=True)]
    followed = np.zeros((len(spans), ids.shape[1] + 1), dtype=np.int64)  # with the token behind the text
    followed[:, :-1] = ids
    for row, span in zip(followed, spans, strict=True):
        if span.ended and corpus.end_of_text is not None:
            row[len(span)] = corpus.end_of_text
    at = np.concatenate(positions)
    return ids, rows, at, followed[rows, at + 1]


def _nats_of_text(found: Comparison) -> float:
    """The loss of all of a text, without what its ends cost: they have no bytes."""
    ends = found.end_of_text
    return found.total.loss * found.total.tokens - (ends.loss * ends.ends if ends else 0.0)


def _size_in_bytes(corpus: Corpus, tokenizer: PreTrainedTokenizerFast | None) -> int | None:
    """UTF-8 bytes of the text that is predicted, all but the first token of each document.

    None where the tokens do not give their text back: bits per byte would be those of another text.
    """
    if tokenizer is None:
        return None
    size = 0
    special = np.array(tokenizer.all_special_ids)
    for first, end in zip(corpus.offsets[:-1].tolist(), corpus.offsets[1:].tolist(), strict=True):
        ids = corpus.ids[first + 1 : end]
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        again = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if again != ids.tolist() or np.isin(ids, special).any():
            return None
        size += len(text.encode("utf-8"))
    return size
