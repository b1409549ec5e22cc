"""Text as token windows, for calibration and for evaluation.

Documents are split into those to learn from and held-out ones (`split`, `hold_out`), and either side is cut into
windows that a model can run (`windows`). Everything is deterministic. numpy only: this module imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from converter.errors import ConverterError
from converter.text.documents import GOLDEN, LEAST, Document, Piece, Reading, joined, read
from converter.text.sources import Text
from converter.text.tokens import Ids, ModelTokens

#: Of so many documents of a long text one is held out.
_ONE_IN = 10
#: The part of a budget that goes to windows at whose end a document ends.
_ENDS = 8


@dataclass(frozen=True, eq=False)
class Windows:
    """Token windows: `ids` (n, T), padded on the right with 0, and `lengths` (n,), both int64.

    A causal model at position t sees nothing to the right of t, so padding on the right changes no valid
    position. Mask by `lengths`, never by id: 0 is a token like any other. With `ended` (n,) a document really ends
    with a window: the token to predict behind its last one is `end_of_text`, if the model has such a token.
    """

    ids: Ids
    lengths: Ids
    ended: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    end_of_text: int | None = None

    def __post_init__(self) -> None:
        if len(self.ended) == 0 or self.end_of_text is None:
            object.__setattr__(self, "ended", np.zeros(len(self.lengths), dtype=np.bool_))

    @property
    def tokens(self) -> int:
        """How many tokens there are, padding not counted."""
        return int(self.lengths.sum())

    @property
    def predictions(self) -> int:
        """How many next tokens can be scored: all but the first of each window, and the end behind it."""
        return int((self.lengths - 1).sum() + self.ended.sum())

    def digest(self) -> str:
        """SHA-256 of all of it."""
        parts = (self.ids.tobytes(), self.lengths.tobytes(), self.ended.tobytes(), str(self.end_of_text).encode())
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def rows(self, chosen: slice | Ids, length: int | None = None) -> Windows:
        """Some of the windows, cut to `length`."""
        length = length or self.ids.shape[1]
        lengths = self.lengths[chosen]
        ended = self.ended[chosen] & (lengths <= length)
        return Windows(self.ids[chosen, :length], lengths.clip(max=length), ended, self.end_of_text)


@dataclass(frozen=True, eq=False)
class Split:
    """Documents to learn from, and held-out ones; what a user should know about the text in `notes`."""

    learnt: list[Document]
    held_out: list[Document]
    notes: tuple[str, ...] = ()


def read_split(texts: Sequence[Text], tokens: ModelTokens, learn: int, hold: int) -> Split:
    """Read until there are about `learn` tokens to learn from and `hold` held-out ones, or the text ends.

    Which side a document is on does not depend on how many were asked for, so all commands of a run hold out the same.
    Of a text of more than LEAST tokens one of ten documents is held out, by its number in the order of reading, which
    a larger budget only makes longer. A smaller text is read whole by all, and split by `hold_out`.
    """
    reading = read(texts, tokens, partial(_enough, learn, hold, _Sizes()))
    held = [piece for number, piece in enumerate(reading.pieces) if _held(number)]
    learnt = [piece for number, piece in enumerate(reading.pieces) if not _held(number)]
    if reading.tokens <= LEAST or not (_usable(held) and _usable(learnt)):  # all of it was read
        return Split(*hold_out(reading.documents), reading.notes)
    return Split(joined(learnt), joined(held), reading.notes)


@dataclass
class _Sizes:
    """Tokens of either side, of the pieces that were counted."""

    learnt: int = 0
    held: int = 0
    pieces: int = 0


def _enough(learn: int, hold: int, sizes: _Sizes, reading: Reading) -> bool:
    for number in range(sizes.pieces, len(reading.pieces)):
        count = reading.pieces[number].tokens
        count = count if count >= 2 else 0
        if _held(number):
            sizes.held += count
        else:
            sizes.learnt += count
    sizes.pieces = len(reading.pieces)
    return reading.tokens > LEAST and sizes.learnt >= max(learn, 1) and sizes.held >= max(hold, 1)


def _held(number: int) -> bool:
    """Whether a document of a long text is held out: a random one of every ten."""
    block, place = divmod(number, _ONE_IN)
    return _chosen(block) == place


@lru_cache
def _chosen(block: int) -> int:
    return int(np.random.default_rng([0, block]).integers(_ONE_IN))


def _usable(pieces: Sequence[Piece]) -> bool:
    return any(piece.tokens >= 2 for piece in pieces)


def hold_out(
    documents: Sequence[Document], fraction: float = 0.1, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """Split into (calibration, held-out) documents, with about `fraction` of the tokens held out.

    Whole documents, at least one on each side, chosen at random from `seed` until the next would lead
    away from `fraction`; each side keeps the order of `documents`. Of a single document the last part is
    cut off. Documents with no next token to predict (fewer than 2 tokens) are left out.

    Raises `ConverterError` where there is not enough to split.
    """
    if not 0.0 < fraction < 1.0:
        raise ConverterError(f"A fraction of {fraction} cannot be held out", fix="Choose it between 0 and 1")
    usable = [document for document in documents if len(document.ids) >= 2]
    if len(usable) == 1 and len(usable[0].ids) >= 4:
        return _cut(usable[0], fraction)
    if len(usable) < 2:
        raise ConverterError(
            "There is too little text to hold some of it out",
            why=f"Of {len(documents)} documents, {len(usable)} have two tokens or more",
            fix="Give more text",
        )
    sizes = [len(document.ids) for document in usable]
    target = fraction * sum(sizes)
    held: set[int] = set()
    total = 0
    for index in np.random.default_rng(seed).permutation(len(usable)).tolist():
        if len(held) < len(usable) - 1 and abs(total + sizes[index] - target) < abs(total - target):
            held.add(index)
            total += sizes[index]
    if not held:  # every document is more than twice the target
        held.add(min(range(len(usable)), key=sizes.__getitem__))
    return (
        [document for index, document in enumerate(usable) if index not in held],
        [document for index, document in enumerate(usable) if index in held],
    )


def windows(
    documents: Sequence[Document],
    context: int,
    max_tokens: int | None,
    seed: int | None = None,
    end_of_text: int | None = None,
) -> Windows:
    """Cut documents into consecutive windows of `context` tokens that do not overlap.

    The last piece of a document is a shorter window; a piece of one token predicts nothing and is dropped.
    T is the longest window's length. Windows are in the order of the documents.

    Where there is more than `max_tokens`, as many windows as fit are taken, spread evenly over all windows
    and so over all documents in proportion to their length; the same ones each time, or, with a `seed`,
    another selection as even. With an `end_of_text`, up to an eighth of them are windows with which a document really
    ends, so that its end is seen; of a long document such a window is full, its end included, and overlaps the one
    before. Then full windows come first, so that late positions are measured too; shorter ones are taken only when no
    full one is left. Should not even one window fit, one is cut to `max_tokens`.

    Raises `ConverterError` where there is no window of two tokens.
    """
    for name, value in (("context", context), ("max_tokens", max_tokens)):
        if value is not None and value < 2:
            raise ConverterError(f"A {name} of {value} leaves nothing to predict", fix=f"Choose a {name} of at least 2")
    places = [(document, start) for document in documents for start in _starts(document, context, end_of_text)]
    if not places:
        raise ConverterError(
            "There is no text to run",
            why=f"None of {len(documents)} documents has two tokens or more",
            fix="Give more text",
        )
    lengths = np.array([min(len(document.ids) - start, context) for document, start in places], dtype=np.int64)
    ended = np.array([document.ended and start + context > len(document.ids) for document, start in places])
    ended &= end_of_text is not None
    if max_tokens is not None and lengths.sum() > max_tokens:
        chosen = _choose(lengths, ended, context, max_tokens, seed)
        places = [places[index] for index in chosen]
        ended = ended[chosen] & (lengths[chosen] <= max_tokens)
        lengths = np.minimum(lengths[chosen], max_tokens)
    ids = np.zeros((len(places), int(lengths.max())), dtype=np.int64)
    for row, (document, start), length in zip(ids, places, lengths.tolist(), strict=True):
        row[:length] = document.ids[start : start + length]
    return Windows(ids, lengths, ended, end_of_text)


def _starts(document: Document, context: int, end_of_text: int | None) -> list[int]:
    """Where the windows of a document begin: a last piece of one token is none.

    The last one before a real end reaches back until it is full, the end included: of short ones a fit would see less
    text in each step. So the end is predicted at position context - 2. At the one behind it a model that learnt from
    windows of its context has never predicted anything (the embedded example: P(end) .42 there, .26 elsewhere).
    """
    size = len(document.ids)
    starts = [*range(0, size - 1, context)]
    if document.ended and end_of_text is not None and size >= context:
        starts = [*range(0, size - context + 1, context), size - context + 1]
    return starts


def _choose(lengths: Ids, ended: npt.NDArray[np.bool_], context: int, max_tokens: int, seed: int | None) -> list[int]:
    """Indices, in order, of the windows to keep within `max_tokens`: ends, then full ones, each kind spread evenly.

    The k windows i of n with the smallest frac(i * golden ratio) are spread evenly for every k (Steinhaus'
    three-gap theorem), and a shift of the fractions is another even selection.
    """
    shift = 0.0 if seed is None else float(np.random.default_rng(seed).random())

    def spread(which: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        kind = np.flatnonzero(which)
        return kind[np.argsort((np.arange(len(kind)) * GOLDEN + shift) % 1.0)]

    ends = spread(ended)
    ends = ends[: int(np.searchsorted(np.cumsum(lengths[ends]), max_tokens // _ENDS, side="right"))]
    others = np.ones(len(lengths), dtype=np.bool_)
    others[ends] = False
    order = np.concatenate([ends, spread(others & (lengths == context)), spread(others & (lengths < context))])
    fitting = int(np.searchsorted(np.cumsum(lengths[order]), max_tokens, side="right"))
    return sorted(order[: max(fitting, 1)].tolist())


def _cut(document: Document, fraction: float) -> tuple[list[Document], list[Document]]:
    """One document in two: its last `fraction` is held out; at least two tokens on each side."""
    size = len(document.ids)
    at = min(max(size - round(size * fraction), 2), size - 2)
    before, after = Document(f"{document.name}[:{at}]", document.ids[:at]), document.ids[at:]
    return [before], [Document(f"{document.name}[{at}:]", after, document.ended)]
