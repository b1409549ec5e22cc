"""Any text as documents in a model's tokens, within a budget.

A budget reads slots of all sources in an order that is spread evenly over them: multiples of the golden ratio, modulo
1, so that any beginning of the order is spread as evenly, and a larger budget reads what a smaller one reads, and more.
What a source's slots are, and where documents begin and end, is said in `converter.text.sources`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from converter.errors import ConverterError, at
from converter.text import sequential
from converter.text.sources import IdRows, IdStream, Lines, PlainText, Raw, Rows, Source, Text, expand, texts_of
from converter.text.tokens import Ids, ModelTokens, encode

#: (sqrt(5) - 1) / 2. Multiples of it, modulo 1, fill the unit interval evenly at every stage.
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
#: Tokens that every reading takes at least, if there are so many: a text of no more is known whole to every command.
LEAST = 1 << 18
#: Characters that are tokenized at once: enough for the tokenizer's threads.
_BATCH = 1 << 20
#: A dataset of the Hub is read as if it were a file of this size: nobody knows.
_HUB_BYTES = 1 << 27
_ROW_READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".json": sequential.json_values,
    ".csv": partial(sequential.table, delimiter=","),
    ".tsv": partial(sequential.table, delimiter="\t"),
    ".parquet": sequential.parquet,
    ".arrow": sequential.arrow,
}
_LINES = (".jsonl", ".ndjson", ".jsonlines")


@dataclass(frozen=True, eq=False)
class Document:
    """One text: where it is from, and its token ids (1-D). With `ended` its end is real: text ends behind it."""

    name: str
    ids: Ids
    ended: bool = False


@dataclass(frozen=True, eq=False)
class Piece:
    """A document, or a piece of one that is too long for a slot: with `starts` the document begins here."""

    document: Document
    starts: bool
    #: Source, slot, and number in the slot: what is behind what in the text.
    place: tuple[int, int, int]

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return len(self.document.ids)


@dataclass
class Reading:
    """What was read so far: pieces in the order of the reading, and rows without text, by source."""

    pieces: list[Piece] = field(default_factory=list)
    tokens: int = 0
    #: Whether there is no more.
    whole: bool = False
    without_text: dict[str, int] = field(default_factory=dict)

    @property
    def documents(self) -> list[Document]:
        """The documents in the order of the text."""
        return joined(self.pieces)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know."""
        return tuple(
            f"{name}: {count:,} {'row has' if count == 1 else 'rows have'} no text and {'is' if count == 1 else 'are'} "
            "left out"
            for name, count in self.without_text.items()
        )

    def count(self, name: str, rows: int) -> None:
        """Note rows without text."""
        self.without_text[name] = self.without_text.get(name, 0) + rows


Enough = Callable[[Reading], bool]


def at_least(tokens: int | None, least: int = LEAST) -> Enough:
    """Enough is so many tokens, and no fewer than `least`; without `tokens` nothing is."""
    return lambda reading: tokens is not None and reading.tokens >= max(tokens, least)


def read(texts: Sequence[Text], tokens: ModelTokens, enough: Enough | None = None) -> Reading:
    """Read files, folders and datasets of the Hub, to their end or until there is `enough`.

    A `.bin` holds one stream of uint16 (or of the width that a TokenFile or a header of llm.c says), in which the
    model's special tokens separate documents. A `.npy` holds a 2-D array of integers, a document a row, taken as it
    is. `.jsonl`, `.ndjson`, `.jsonlines`, `.json`, `.csv`, `.tsv`, `.parquet`, `.arrow`, folders that `datasets` saved
    and `hub:owner/name` hold a row a document, in the field `text`. Everything else is UTF-8 text. In texts the
    tokenizer's eos token, written out, separates documents, and nothing else is added but the opening token. Text may
    be compressed: .gz, .zst, .bz2, .xz. A folder stands for its files at any depth.

    Raises ConverterError for what is missing, empty, damaged, neither text nor token ids, or of another vocabulary.
    """
    reading = Reading()
    sources = [_source(each, tokens, token_bytes, reading) for each, token_bytes in expand(texts)]
    found = [0] * len(sources)
    for number, document, starts, slot in _tokenized(_visits(sources), sources, tokens):
        reading.pieces.append(Piece(document, starts, (number, slot, found[number])))
        reading.tokens += len(document.ids)
        found[number] += 1
        if enough is not None and enough(reading):
            return reading
    for number, source in enumerate(sources):
        if not found[number]:
            why = "Nothing is left of it but zeros, separators and spaces, or rows without text"
            raise ConverterError("The file holds no tokens: there is no text in it", where=source.name, why=why)
    reading.whole = True
    return reading


def _source(named: Path | str, tokens: ModelTokens, token_bytes: int | None, reading: Reading) -> Source:
    """What reads a file, a folder that `datasets` saved, or a dataset of the Hub."""
    name = str(named)
    count = partial(reading.count, name)
    if isinstance(named, str):
        tokens.reader(name)
        return Rows(name, _HUB_BYTES, lambda: texts_of(sequential.hub(name), name, count))
    if named.is_dir():
        tokens.reader(name)
        size = sum(file.stat().st_size for file in named.rglob("*.arrow"))
        return Rows(name, size, lambda: texts_of(sequential.saved(named), name, count))
    compressed = named.suffix.lower() in sequential.COMPRESSED
    kind = (named.with_suffix("") if compressed else named).suffix.lower()
    if kind in (".npy", ".bin"):
        if compressed:
            raise ConverterError("Token ids are read from their place", where=name, fix=f"Unpack it to a {kind} first")
        return IdRows(named) if kind == ".npy" else IdStream(named, token_bytes, tokens.separators, tokens.size)
    separator = tokens.reader(name).eos_token
    size = named.stat().st_size
    if kind in _LINES and not compressed:
        return Lines(named, count)
    if kind in _LINES or kind in _ROW_READERS:
        if compressed and kind in (".parquet", ".arrow"):
            raise ConverterError(f"A {kind} is compressed inside", where=name, fix="Unpack it first")
        rows = sequential.lines if kind in _LINES else _ROW_READERS[kind]
        return Rows(name, size, lambda: texts_of(rows(named), name, count))
    return Rows(name, size, lambda: sequential.plain(named, separator)) if compressed else PlainText(named, separator)


def _visits(sources: Sequence[Source]) -> Iterator[tuple[int, int, Raw]]:
    """Source, slot and raw document, over all slots in an order spread evenly; then what no slot had."""
    ends = np.cumsum([source.slots for source in sources])
    total = int(ends[-1])
    for place in np.argsort(np.arange(total) * GOLDEN % 1.0, kind="stable").tolist():
        number = int(np.searchsorted(ends, place, side="right"))
        slot = place - int(ends[number]) + sources[number].slots
        for raw in sources[number].read(slot):
            yield number, 0 if isinstance(sources[number], Rows) else slot, raw
    for number, source in enumerate(sources):
        for raw in source.rest():
            yield number, 0, raw


def _tokenized(
    raws: Iterable[tuple[int, int, Raw]], sources: Sequence[Source], tokens: ModelTokens
) -> Iterator[tuple[int, Document, bool, int]]:
    """Source, document, whether it starts, and slot; texts are tokenized a batch at a time."""
    waiting: list[tuple[int, int, Raw]] = []
    size = 0
    for each in raws:
        waiting.append(each)
        size += len(each[2].content)
        if size >= _BATCH:
            yield from _batch(waiting, sources, tokens)
            waiting, size = [], 0
    yield from _batch(waiting, sources, tokens)


def _batch(
    raws: Sequence[tuple[int, int, Raw]], sources: Sequence[Source], tokens: ModelTokens
) -> Iterator[tuple[int, Document, bool, int]]:
    texts = [_sound(raw.content) for _, _, raw in raws if isinstance(raw.content, str)]
    with at(", ".join(sorted({sources[number].name for number, _, _ in raws}))):
        encoded = iter(encode(texts, tokens.reader("text")) if texts else [])
    for number, slot, raw in raws:
        ids = next(encoded) if isinstance(raw.content, str) else raw.content
        tokens.check(ids, sources[number].name)
        if not len(ids):
            continue
        opens = raw.starts and not isinstance(sources[number], IdRows)
        document = Document(sources[number].name, tokens.opened(ids) if opens else ids.astype(np.int32), raw.ended)
        yield number, document, raw.starts, slot


def _sound(text: str) -> str:
    """A text without halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def joined(pieces: Sequence[Piece]) -> list[Document]:
    """Documents in the order of the text; pieces that follow each other are one again."""
    documents: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: piece.place):
        last = documents[-1][-1] if documents else None
        if last is not None and not piece.starts and _follows(last, piece):
            documents[-1].append(piece)
        else:
            documents.append([piece])
    return [_one(parts) for parts in documents]


def _follows(last: Piece, piece: Piece) -> bool:
    """Whether a piece goes on where another stopped, in the same slot or in the next."""
    (source, slot, number), (other, before, earlier) = piece.place, last.place
    if last.document.ended or source != other:
        return False
    return number == earlier + 1 if slot == before else slot == before + 1


def _one(parts: Sequence[Piece]) -> Document:
    if len(parts) == 1:
        return parts[0].document
    return Document(
        parts[0].document.name, np.concatenate([part.document.ids for part in parts]), parts[-1].document.ended
    )


def documents_of(texts: Mapping[str, str], tokens: ModelTokens) -> list[Document]:
    """A document for each named text, tokenized with no special tokens added, opened; its end is real."""
    encoded = encode(list(texts.values()), tokens.reader("text"))
    return [Document(name, tokens.opened(ids), ended=True) for name, ids in zip(texts, encoded, strict=True)]
