"""Text as token windows, for calibration and for evaluation.

Three steps: files or strings become documents (`read_documents`, `documents_from_strings`), documents
are split into calibration and held-out ones (`hold_out`), and either side is cut into windows that a
model can run (`windows`). Everything is deterministic. numpy only: this module imports no torch.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from converter.errors import ConverterError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Ids = npt.NDArray[np.integer[Any]]

#: (sqrt(5) - 1) / 2. Multiples of it, modulo 1, fill the unit interval evenly at every stage.
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0

#: Characters that are tokenized at once, and of a piece of a long text.
_BATCH, _PIECE = 1 << 22, 1 << 18
#: Where a text may be cut; how many such places are tried, and how many characters to each side are looked at.
_SPACE = re.compile(r"\s(?=\S)")
_TRIES, _AROUND = 8, 256


@dataclass(frozen=True, eq=False)
class Document:
    """One text: where it is from, and its token ids (1-D, int64, or int32 where they are views of a corpus)."""

    name: str
    ids: Ids


@dataclass(frozen=True, eq=False)
class Windows:
    """Token windows: `ids` (n, T), padded on the right with 0, and `lengths` (n,), both int64.

    A causal model at position t sees nothing to the right of t, so padding on the right changes no valid
    position. Mask by `lengths`, never by id: 0 is a token like any other.
    """

    ids: Ids
    lengths: Ids

    @property
    def tokens(self) -> int:
        """How many tokens there are, padding not counted."""
        return int(self.lengths.sum())

    @property
    def predictions(self) -> int:
        """How many next tokens can be scored: one fewer than its length in each window."""
        return int((self.lengths - 1).sum())

    def digest(self) -> str:
        """SHA-256 of all of it."""
        return hashlib.sha256(self.ids.tobytes() + self.lengths.tobytes()).hexdigest()


def as_paths(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """One file or several, as paths."""
    return [Path(file) for file in ([files] if isinstance(files, (str, Path)) else files)]


def read_documents(
    files: Sequence[Path],
    tokenizer: PreTrainedTokenizerFast | None,
    *,
    vocab_size: int,
    end_of_text: int | None,
) -> list[Document]:
    """The documents in files, in order.

    A `.npy` holds a 2-D array of integers, a document a row, taken as it is. A `.bin` holds uint16 as
    nanoGPT writes it: one stream, in which `end_of_text` separates documents. Everything else is UTF-8
    text, in which the tokenizer's eos token, written out, separates documents; it is tokenized with no
    special tokens added. Documents of text and of `.bin` open with `end_of_text`, unless it is None, and
    empty ones are dropped.

    Raises `ConverterError` for a file that is missing, empty, damaged or of another kind, for a text with
    no tokenizer to read it, and for ids that a vocabulary of `vocab_size` does not have.
    """
    if not files:
        raise ConverterError("No text was given", fix="Name at least one .txt, .npy or .bin file")
    if end_of_text is not None and not 0 <= end_of_text < vocab_size:
        raise ConverterError(
            f"The document-opening token {end_of_text} is not in the vocabulary",
            why=f"The model has ids 0 to {vocab_size - 1}",
            fix="Take the id from the model's config (bos_token_id or eos_token_id)",
        )
    documents: list[Document] = []
    for path in files:
        if not path.is_file():
            raise ConverterError(
                "There is no such file",
                where=str(path),
                why="It is a folder" if path.is_dir() else None,
                fix="Name a .txt, .npy or .bin file",
            )
        if path.suffix == ".npy":
            rows = _read_npy(path, vocab_size)
        elif path.suffix == ".bin":
            rows = _read_bin(path, vocab_size, end_of_text)
        else:
            rows = _read_text(path, tokenizer, vocab_size, end_of_text)
        if not rows:
            raise ConverterError(
                "The file holds no tokens", where=str(path), why="Nothing is left of it but separators and spaces"
            )
        names = [str(path)] if len(rows) == 1 else [f"{path}#{index}" for index in range(1, len(rows) + 1)]
        documents += [Document(name, ids) for name, ids in zip(names, rows, strict=True)]
    return documents


def documents_from_strings(
    texts: Mapping[str, str], tokenizer: PreTrainedTokenizerFast, end_of_text: int | None
) -> list[Document]:
    """A document for each named text, tokenized with no special tokens added, opened with `end_of_text`."""
    encoded = _encode(list(texts.values()), tokenizer)
    return [Document(name, _open(ids, end_of_text)) for name, ids in zip(texts, encoded, strict=True)]


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


def windows(documents: Sequence[Document], context: int, max_tokens: int | None, seed: int | None = None) -> Windows:
    """Cut documents into consecutive windows of `context` tokens that do not overlap.

    The last piece of a document is a shorter window; a piece of one token predicts nothing and is dropped.
    T is the longest window's length. Windows are in the order of the documents.

    Where there is more than `max_tokens`, as many windows as fit are taken, spread evenly over all windows
    and so over all documents in proportion to their length; the same ones each time, or, with a `seed`,
    another selection as even. Full windows come first, so that late positions are measured too; shorter
    ones are taken only when no full one is left. Should not even one window fit, one is cut to `max_tokens`.

    Raises `ConverterError` where there is no window of two tokens.
    """
    for name, value in (("context", context), ("max_tokens", max_tokens)):
        if value is not None and value < 2:
            raise ConverterError(f"A {name} of {value} leaves nothing to predict", fix=f"Choose a {name} of at least 2")
    pieces = [document.ids[start : start + context] for document in documents for start in _starts(document, context)]
    if not pieces:
        raise ConverterError(
            "There is no text to run",
            why=f"None of {len(documents)} documents has two tokens or more",
            fix="Give more text",
        )
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    if max_tokens is not None and lengths.sum() > max_tokens:
        chosen = _choose(lengths, context, max_tokens, seed)
        pieces = [pieces[index][:max_tokens] for index in chosen]
        lengths = np.minimum(lengths[chosen], max_tokens)
    ids = np.zeros((len(pieces), int(lengths.max())), dtype=np.int64)
    for row, piece in zip(ids, pieces, strict=True):
        row[: len(piece)] = piece
    return Windows(ids, lengths)


def _starts(document: Document, context: int) -> range:
    """Where the windows of a document begin: a last piece of one token is none."""
    return range(0, len(document.ids) - 1, context)


def _choose(lengths: Ids, context: int, max_tokens: int, seed: int | None) -> list[int]:
    """Indices, in order, of the windows to keep within `max_tokens`: full ones first, each kind spread evenly.

    The k windows i of n with the smallest frac(i * golden ratio) are spread evenly for every k (Steinhaus'
    three-gap theorem), and a shift of the fractions is another even selection.
    """
    shift = 0.0 if seed is None else float(np.random.default_rng(seed).random())
    kinds = [np.flatnonzero(lengths == context), np.flatnonzero(lengths < context)]
    order = np.concatenate([kind[np.argsort((np.arange(len(kind)) * _GOLDEN + shift) % 1.0)] for kind in kinds])
    fitting = int(np.searchsorted(np.cumsum(lengths[order]), max_tokens, side="right"))
    return sorted(order[: max(fitting, 1)].tolist())


def _cut(document: Document, fraction: float) -> tuple[list[Document], list[Document]]:
    """One document in two: its last `fraction` is held out; at least two tokens on each side."""
    size = len(document.ids)
    at = min(max(size - round(size * fraction), 2), size - 2)
    before, after = Document(f"{document.name}[:{at}]", document.ids[:at]), document.ids[at:]
    return [before], [Document(f"{document.name}[{at}:]", after)]


def _read_npy(path: Path, vocab_size: int) -> list[Ids]:
    """The rows of a 2-D integer array."""
    fix = "Save a 2-D array of integers, a document a row, with numpy.save"
    try:
        # A map never unpickles, and reads the header alone: a damaged one cannot claim all memory.
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # numpy parses the header as Python, and passes on whatever that says
        raise ConverterError("The file is not a sound .npy", where=str(path), why=str(error), fix=fix) from error
    if array.dtype.kind not in "iu" or array.ndim != 2:
        raise ConverterError(
            "The array does not hold token ids", where=str(path), why=f"It is {array.ndim}-D {array.dtype}", fix=fix
        )
    if array.size == 0:
        raise ConverterError("The array is empty", where=str(path), why=f"Its shape is {array.shape}", fix=fix)
    check_ids(array, path, vocab_size)
    return list(array.astype(np.int64))


def _read_bin(path: Path, vocab_size: int, end_of_text: int | None) -> list[Ids]:
    """The documents of a uint16 stream, each opened with `end_of_text`, which separates them in the stream."""
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise ConverterError(
            "The file is empty" if size == 0 else "The file is not a stream of uint16",
            where=str(path),
            why=f"Its {size} bytes are not whole two-byte ids" if size else None,
            fix="Write it as nanoGPT's prepare.py does: numpy.array(ids, dtype=numpy.uint16).tofile(path)",
        )
    try:
        stream = np.fromfile(path, dtype="<u2")
    except OSError as error:
        raise ConverterError("The file cannot be read", where=str(path), why=str(error)) from error
    check_ids(stream, path, vocab_size)
    ids = stream.astype(np.int64)
    if end_of_text is None:
        return [ids]
    pieces = np.split(ids, np.flatnonzero(ids == end_of_text))
    bodies = (piece[1:] if len(piece) and piece[0] == end_of_text else piece for piece in pieces)
    return [_open(body, end_of_text) for body in bodies if len(body)]


def _read_text(
    path: Path, tokenizer: PreTrainedTokenizerFast | None, vocab_size: int, end_of_text: int | None
) -> list[Ids]:
    """The documents of a UTF-8 text; line ends stay as they are."""
    tokenizer = need_tokenizer(tokenizer, path)
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConverterError("The file cannot be read", where=str(path), why=str(error)) from error
    except UnicodeDecodeError as error:
        raise ConverterError(
            "The file is not UTF-8 text",
            where=str(path),
            why=f"Byte {error.start} is 0x{error.object[error.start]:02x}: {error.reason}",
            fix="Convert it to UTF-8, or name it .npy or .bin if it holds token ids",
        ) from error
    if not text:
        raise ConverterError("The file is empty", where=str(path), fix="Name a file with text in it")
    parts = text.split(tokenizer.eos_token) if tokenizer.eos_token else [text]
    encoded = _encode([part for part in parts if part.strip()], tokenizer)
    for ids in encoded:
        check_ids(ids, path, vocab_size)
    return [_open(ids, end_of_text) for ids in encoded if len(ids)]


def need_tokenizer(tokenizer: PreTrainedTokenizerFast | None, where: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer; raises `ConverterError` where there is none to read a text with."""
    if tokenizer is None:
        raise ConverterError(
            "The text cannot be tokenized",
            where=str(where),
            why="The checkpoint has no tokenizer",
            fix="Put the tokenizer's files into the checkpoint's folder, or give token ids as .npy or .bin",
        )
    return tokenizer


def _encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> list[Ids]:
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
    for batch in _batches((number, piece) for number, text in enumerate(texts) for piece in _pieces(text, backend)):
        encodings = backend.encode_batch_fast([piece for _, piece in batch], add_special_tokens=False)
        for (number, _), encoding in zip(batch, encodings, strict=True):
            found[number].append(np.array(encoding.ids, dtype=np.int64))
    return [np.concatenate(pieces) for pieces in found]


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


def _open(ids: Ids, end_of_text: int | None) -> Ids:
    """`ids` with the document-opening token in front."""
    return ids if end_of_text is None else np.concatenate([np.array([end_of_text], dtype=np.int64), ids])


def check_ids(ids: npt.NDArray[Any], where: str | Path, vocab_size: int) -> None:
    """Raise `ConverterError` unless every id is in the vocabulary."""
    if ids.size == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ConverterError(
            f"Token id {low if low < 0 else high} is not in the vocabulary",
            where=str(where),
            why=f"The model has ids 0 to {vocab_size - 1}",
            fix="Use text that was tokenized for this model",
        )
