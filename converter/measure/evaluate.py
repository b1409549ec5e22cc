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

from converter.errors import ConverterError, VerificationError
from converter.files.hub import local_path
from converter.files.tokenizer import load_tokenizer, same_ids
from converter.measure.metrics import Comparison, Figures, Tally
from converter.measure.models import is_rotary, load_any, pick_device
from converter.spec import Positions
from converter.text.documents import Corpus, load_corpus
from converter.text.windows import Ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from converter.show.progress import Progress


#: Longest context that is taken where none is given.
_LONGEST = 2048


#: Logits of one model that are held at once.
_LOGITS = 60_000_000


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


@dataclass(frozen=True)
class Evaluation:
    """A model on a text. `no_kl` and `no_context` say in words why figures are missing, the latter by context."""

    path: str
    results: tuple[AtContext, ...]
    no_kl: str | None
    no_context: dict[int, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def evaluate(
    paths: str | Path | Sequence[str | Path],
    *,
    text: str | Path | Sequence[str | Path],
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
    listed = [paths] if isinstance(paths, (str, Path)) else list(paths)
    texts = [text] if isinstance(text, (str, Path)) else list(text)
    contexts = [context] if isinstance(context, int) else sorted(set(context))
    if not listed:
        raise ConverterError("there is no checkpoint to evaluate")
    counts = (("stride", stride, 1), ("max_tokens", max_tokens, 2), *(("context", each, 2) for each in contexts))
    for name, value, least in counts:
        if value is not None and value < least:
            raise ConverterError(f"a {name} of {value} leaves nothing to predict", fix=f"Choose {least} or more")
    device = pick_device(device)
    first = _Subject.open(listed[0], texts, max_tokens, device)
    contexts = contexts or [min(_LONGEST, first.model.config.max_position_embeddings)]
    evaluations = []
    for number, path in enumerate(listed):
        subject = first if number == 0 else _Subject.open(path, texts, max_tokens, device, reference=first)
        evaluations.append(_evaluate(subject, first, contexts, stride, progress))
    return evaluations


@dataclass(frozen=True, eq=False)
class _Subject:
    """A model, and the text in its tokens."""

    path: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast | None
    corpus: Corpus
    no_kl: str | None

    @classmethod
    def open(
        cls,
        path: str | Path,
        texts: Sequence[str | Path],
        max_tokens: int | None,
        device: str,
        reference: _Subject | None = None,
    ) -> _Subject:
        """Load a model; its tokens are those of the reference where the two can be compared."""
        local = local_path(path)
        model = load_any(local).to(device).eval()
        tokenizer = load_tokenizer(local if local.is_dir() else local.parent)
        no_kl = None if reference is None else _difference(reference, model, tokenizer)
        if reference is not None and no_kl is None:
            return cls(str(path), model, tokenizer or reference.tokenizer, reference.corpus, None)
        config = model.config
        opening = config.bos_token_id if config.bos_token_id is not None else config.eos_token_id
        known = isinstance(opening, int) and 0 <= opening < config.vocab_size
        end_of_text = opening if known else None
        corpus = load_corpus(
            texts,
            tokenizer,
            vocab_size=config.vocab_size,
            end_of_text=end_of_text,
            max_tokens=max_tokens if reference is None else None,
            max_documents=None if reference is None else reference.corpus.documents,  # the same text, in other tokens
        )
        return cls(str(path), model, tokenizer, corpus, no_kl)

    @property
    def positions(self) -> int | None:
        """How many positions it has learnt; None for rotary ones, which have no end."""
        spec = getattr(self.model, "spec", None)  # the reference model's
        rotary = spec.positions is not Positions.LEARNED if spec else is_rotary(self.model)
        return None if rotary else int(self.model.config.max_position_embeddings)


def _difference(reference: _Subject, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None) -> str | None:
    """Why a model has no KL to the first, in a line."""
    sizes = [each.config.vocab_size for each in (reference.model, model)]
    if sizes[0] != sizes[1]:
        return f"its vocabulary has {sizes[1]} tokens, and that of {reference.path} {sizes[0]}"
    if reference.tokenizer is not None and tokenizer is not None:
        try:
            same_ids(reference.tokenizer, tokenizer)
        except VerificationError as error:
            return f"its tokenizer is not that of {reference.path}: {error.what}"
    return None


def _evaluate(
    subject: _Subject,
    first: _Subject,
    contexts: Sequence[int],
    stride: int,
    progress: Progress | None,
) -> Evaluation:
    size = _size_in_bytes(subject.corpus, subject.tokenizer)
    results, no_context = [], {}
    for context in contexts:
        if subject.positions is not None and context > subject.positions:
            no_context[context] = f"has learnt {subject.positions} positions, too few for a context of {context}"
            continue
        comparable = subject.no_kl is None and (first.positions is None or context <= first.positions)
        reference = first if comparable and subject is not first else subject
        step = min(stride, context - 1)
        spans = sorted(_spans(subject.corpus, context, step), key=len)
        if progress:
            progress.stage(f"{subject.path} at {context}", sum(map(len, spans)), unit="tokens")
        found = _compare(reference.model, subject.model, subject.corpus, spans, progress)
        total = found.total
        results.append(
            AtContext(
                context=context,
                stride=step,
                tokens=total.tokens,
                loss=total.loss,
                perplexity=math.exp(min(total.loss, 700.0)),
                bits_per_byte=total.loss * total.tokens / size / math.log(2.0) if size else None,
                kl=total.kl if reference is not subject else None,
                agreement=total.agreement if reference is not subject else None,
                buckets=found.buckets,
            )
        )
    return Evaluation(subject.path, tuple(results), subject.no_kl, no_context)


@torch.no_grad()
def _compare(
    reference: PreTrainedModel,
    model: PreTrainedModel,
    corpus: Corpus,
    spans: Sequence[_Span],
    progress: Progress | None,
) -> Comparison:
    """Both models over the same windows, in the order of their lengths; a model against itself runs once."""
    if not spans:
        raise ConverterError("the text holds nothing to predict", fix="Give a longer one")
    longest = len(spans[-1])
    tally = Tally(longest)
    rows = max(1, _LOGITS // model.config.vocab_size // longest)
    for start in range(0, len(spans), rows):
        batch = spans[start : start + rows]
        ids, row, position, target = (torch.from_numpy(each).to(model.device) for each in _batch(corpus, batch))
        logits = model(input_ids=ids, use_cache=False).logits[row, position]
        other = logits if reference is model else reference(input_ids=ids, use_cache=False).logits[row, position]
        tally.add(other, logits, target, position)
        if progress:
            progress.advance(sum(map(len, batch)))
    return tally.comparison()


@dataclass(frozen=True)
class _Span:
    """A window over the corpus: tokens start to stop, of which those from `scored` on count."""

    start: int
    scored: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def _spans(corpus: Corpus, context: int, stride: int) -> Iterator[_Span]:
    """The windows of every document of two tokens or more."""
    for first, end in zip(corpus.offsets[:-1].tolist(), corpus.offsets[1:].tolist(), strict=True):
        start, scored = first, first + 1
        while scored < end:
            stop = min(start + context, end)
            yield _Span(start, scored, stop)
            start, scored = start + stride, stop


def _batch(corpus: Corpus, spans: Sequence[_Span]) -> tuple[Ids, Ids, Ids, Ids]:
    """Token ids (n, T) padded on the right; and which (row, position) predicts which token that counts, (N,) each."""
    ids = np.zeros((len(spans), max(map(len, spans))), dtype=np.int64)
    for row, span in zip(ids, spans, strict=True):
        row[: len(span)] = corpus.ids[span.start : span.stop]
    rows = np.repeat(np.arange(len(spans)), [span.stop - span.scored for span in spans])
    positions = np.concatenate([np.arange(span.scored - 1, span.stop - 1) - span.start for span in spans])
    return ids, rows, positions, ids[rows, positions + 1]


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
