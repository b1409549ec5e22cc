"""Text in a model's tokens: what its tokenizer makes of it, and which of its special tokens stand around a document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from converter.errors import ConverterError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Ids = npt.NDArray[np.integer[Any]]

#: Characters that are tokenized at once, and of a piece of a long text.
_BATCH, _PIECE = 1 << 22, 1 << 18
#: Where a text may be cut; how many such places are tried, and how many characters to each side are looked at.
_SPACE = re.compile(r"\s(?=\S)")
_TRIES, _AROUND = 8, 256


@dataclass(frozen=True)
class ModelTokens:
    """The tokens that a model reads a text in.

    A document begins with `opening`, unless it is None; where a document ends, the model is to say `end_of_text`,
    one of `ends`, unless there is none.
    """

    tokenizer: PreTrainedTokenizerFast | None
    size: int
    opening: int | None
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for token in (self.opening, *self.ends):
            if token is not None and not 0 <= token < self.size:
                raise ConverterError(
                    f"The special token {token} is not in the vocabulary",
                    why=f"The model has ids 0 to {self.size - 1}",
                    fix="Take the id from the model's config (bos_token_id or eos_token_id)",
                )

    @property
    def end_of_text(self) -> int | None:
        """The token behind a document."""
        return next(iter(self.ends), None)

    @property
    def separators(self) -> tuple[int, ...]:
        """Tokens that stand between the documents of a stream of ids."""
        return self.ends if self.opening is None else (self.opening, *self.ends)

    def reader(self, where: str) -> PreTrainedTokenizerFast:
        """The tokenizer; raises `ConverterError` where there is none to read a text with."""
        if self.tokenizer is None:
            raise ConverterError(
                "The text cannot be tokenized",
                where=where,
                why="The checkpoint has no tokenizer",
                fix="Put the tokenizer's files into the checkpoint's folder, or give token ids as .npy or .bin",
            )
        return self.tokenizer

    def check(self, ids: Ids, where: str) -> None:
        """Raise `ConverterError` unless every id is in the vocabulary."""
        if ids.size == 0:
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.size:
            raise ConverterError(
                f"Token id {low if low < 0 else high} is not in the vocabulary",
                where=where,
                why=f"The model has ids 0 to {self.size - 1}",
                fix="Use text that was tokenized for this model",
            )

    def opened(self, ids: Ids) -> Ids:
        """`ids` with the document-opening token in front, int32."""
        front = [] if self.opening is None else [self.opening]
        return np.concatenate([np.array(front, dtype=np.int32), ids.astype(np.int32)])


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> list[Ids]:
    """Token ids of texts, whole and with nothing added.

    The backend is asked directly: it need not keep character offsets then, and is three times as fast on
    one long text. As transformers does before each call, truncation and padding, which a tokenizer.json
    can carry, are switched off first. What it says takes some hundred bytes a token until it is an array, so it is
    asked for a batch at a time, and long texts in pieces, which its threads share.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    found: list[list[Ids]] = [[] for _ in texts]
    try:
        for batch in _batches((number, piece) for number, text in enumerate(texts) for piece in _pieces(text, backend)):
            encodings = backend.encode_batch_fast([piece for _, piece in batch], add_special_tokens=False)
            for (number, _), encoding in zip(batch, encodings, strict=True):
                found[number].append(np.array(encoding.ids, dtype=np.int64))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise _without_id(texts, backend, error) from error
    return [np.concatenate(pieces) for pieces in found]


def _without_id(texts: Sequence[str], backend: Any, error: Exception) -> ConverterError:
    """The error of a text that a tokenizer has no ids for: one of characters lacks some and has no unknown token."""
    lacking = sorted(set("".join(texts)) - backend.get_vocab().keys())
    characters = lacking and all(len(token) == 1 for token in backend.get_vocab())
    return ConverterError(
        "the tokenizer cannot read the text",
        why=f"it has no {', '.join(map(repr, lacking[:8]))}" if characters else f"{type(error).__name__}: {error}",
        fix="Give a text like the one that the model was trained on, or token ids as .npy or .bin",
    )


def _batches(pieces: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Consecutive pieces of about _BATCH characters in all."""
    batch: list[tuple[int, str]] = []
    size = 0
    for number, piece in pieces:
        batch.append((number, piece))
        size += len(piece)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: str, backend: Any) -> Iterator[str]:
    """A text in pieces of _PIECE characters or more, cut where that changes no token.

    That is before or after the last space, or line end, of several, if the tokenizer says the same of the text around
    it whether cut or not. One that puts a space in front of whatever it is given never does: its text stays whole.
    """
    start = 0
    while len(text) - start > 2 * _PIECE:
        spaces = islice(_SPACE.finditer(text, start + _PIECE), _TRIES)
        cut = next((at for space in spaces for at in space.span() if _may_cut(text, at, backend)), None)
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _may_cut(text: str, cut: int, backend: Any) -> bool:
    left, right = text[max(0, cut - _AROUND) : cut], text[cut : cut + _AROUND]
    whole, *parts = (backend.encode(each, add_special_tokens=False).ids for each in (left + right, left, right))
    return bool(whole == parts[0] + parts[1])
