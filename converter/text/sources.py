"""Where text comes from: each kind of file, a folder that `datasets` saved, a dataset of the Hub.

Every source is read in slots, so that a budget need not read all of it. Files of token ids, plain text and JSON lines
are cut at places that are spread evenly over the file and moved on to where a document ends. Other sources are
streamed from their beginning. Paths are literal: no character in them is a pattern.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.errors import ConverterError
from converter.text.kinds import head_of, refuse_no_ids, refuse_no_text

Ids = npt.NDArray[np.integer[Any]]
#: Token ids of a slot, and bytes or characters of one: a document that is longer is read in pieces.
SLOT_IDS, SLOT_BYTES = 1 << 15, 1 << 17
#: A dataset of the Hub is named `hub:owner/name`, `hub:owner/name/config`, either with `:split`.
HUB_PREFIX = "hub:"
#: The field of a row that holds its text.
FIELD = "text"
#: A byte order mark is no text.
_BOM = b"\xef\xbb\xbf"
#: Between two lines, where a cut changes the tokens of next to no tokenizer; and between two words.
_LINE, _WORD = re.compile(rb"\S\r?\n(?=\S)"), re.compile(rb"\S(?=\s)")
#: llm.c's files of tokens begin with 256 int32: a magic number, a version, the number of tokens.
_LLM_C = {20240520: 2, 20240801: 4}
_HEADER = 1024
#: So many ids tell their width.
_LEAST_IDS = 8


@dataclass(frozen=True)
class TokenFile(os.PathLike[str]):
    """A `.bin` of token ids, or a folder of such files, whose ids have another width than nanoGPT's two bytes."""

    path: str | Path
    token_bytes: int

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)


#: A file, a folder, or by name a dataset of the Hub.
Text = str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class Raw:
    """A document or a piece of one, as text or as token ids.

    `starts` is whether its document begins with it, `ended` whether its document ends behind it, by the source's data.
    """

    content: str | Ids
    starts: bool = True
    ended: bool = True


class Source(ABC):
    """A text that is read in `slots` parts, in any order; `name` is what messages call it."""

    def __init__(self, name: str, slots: int) -> None:
        self.name, self.slots = name, max(1, slots)

    @abstractmethod
    def read(self, slot: int) -> Iterator[Raw]:
        """The documents of a slot."""

    def rest(self) -> Iterator[Raw]:
        """What no slot had."""
        return iter(())


class Rows(Source):
    """A document a row, streamed from the beginning: each slot goes on where the last one stopped."""

    def __init__(self, name: str, size: int, rows: Callable[[], Iterator[Raw]]) -> None:
        super().__init__(name, -(-size // SLOT_BYTES))
        self._open = rows
        self._rows: Iterator[Raw] | None = None

    def read(self, slot: int) -> Iterator[Raw]:
        size = 0
        for row in self.rest():
            yield row
            size += len(row.content)
            if size >= SLOT_BYTES:
                return

    def rest(self) -> Iterator[Raw]:
        if self._rows is None:
            self._rows = self._open()
        return self._rows


class _Cut(Source):
    """Bytes of a file, cut at places that are moved on to the end of a document where there is one."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size
        super().__init__(str(path), -(-self.size // SLOT_BYTES))

    def _bytes(self, start: int, size: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(size)

    def _text(self, start: int, end: int) -> str:
        data = self._bytes(start, end - start)
        if start == 0 and data.startswith(_BOM):
            data = data[len(_BOM) :]
        return decoded(data, self.name, start)


class PlainText(_Cut):
    """UTF-8 text, in which the written-out end-of-text token separates documents."""

    def __init__(self, path: Path, separator: str | None) -> None:
        refuse_no_text(path, head_of(path))
        super().__init__(path)
        self._separator = separator.encode() if separator else None

    def read(self, slot: int) -> Iterator[Raw]:
        (start, starts), (end, ended) = self._place(slot), self._place(slot + 1)
        if end > start:
            separator = self._separator.decode() if self._separator else None
            yield from split_text(self._text(start, end), separator, starts, ended)

    def _place(self, slot: int) -> tuple[int, bool]:
        """Where a slot begins, and whether a document does."""
        begin = slot * SLOT_BYTES
        if slot == 0 or begin >= self.size:
            return min(begin, self.size), True
        before = len(self._separator) if self._separator else 0
        data = self._bytes(begin - before, SLOT_BYTES + before)
        if self._separator and (at := data.find(self._separator)) >= 0:
            return begin + at, True  # `at` is counted from `before` the place, and the separator is as long
        for pattern in (_LINE, _WORD):
            if found := pattern.search(data, before):
                return begin - before + found.end(), False
        place = next((at for at in range(before, len(data)) if data[at] & 0xC0 != 0x80), before)
        return begin - before + place, False


class Lines(_Cut):
    """JSON lines: a document a line."""

    def __init__(self, path: Path, count: Callable[[int], None]) -> None:
        refuse_no_text(path, head_of(path))
        super().__init__(path)
        self._count = count

    def read(self, slot: int) -> Iterator[Raw]:
        start, end = self._place(slot), self._place(slot + 1)
        if end > start:
            yield from texts_of(json_lines(self._text(start, end).split("\n"), self.name), self.name, self._count)

    def _place(self, slot: int) -> int:
        """Where the first line begins at or behind a place."""
        at = slot * SLOT_BYTES
        if slot == 0:
            return 0
        with self.path.open("rb") as file:
            file.seek(min(at, self.size) - 1)
            file.readline()
            return file.tell()


class IdStream(Source):
    """A file of token ids in one stream, in which special tokens separate documents.

    A document is ended by the token behind it. At the end of the file nothing says that it ends there: shards are cut
    anywhere. The holes of a sparse file hold nothing, and a slot of zeros is one.
    """

    def __init__(self, path: Path, width: int | None, separators: tuple[int, ...], vocab_size: int) -> None:
        refuse_no_ids(path, head_of(path))
        self.path, self.separators = path, np.array(sorted(set(separators)), dtype=np.int64)
        self._offset, width = _llm_c_header(path, width)
        self.dtype = np.dtype(f"<u{width}")
        size = path.stat().st_size - self._offset
        if size % width:
            raise ConverterError(
                f"The file is not a stream of uint{8 * width}",
                where=str(path),
                why=f"Its {size} bytes are not whole {width}-byte ids",
                fix="Write it as nanoGPT's prepare.py does, or say how wide its ids are: --token-bytes",
            )
        self.count = size // width
        self._slots = _with_data(path, self._offset, width, self.count)
        super().__init__(str(path), len(self._slots))
        if len(self._slots):
            self._check_width(vocab_size)

    def read(self, slot: int) -> Iterator[Raw]:
        if slot >= len(self._slots):
            return
        number = int(self._slots[slot])
        start, end = self._place(number), self._place(number + 1)
        ids = self._ids(start, end + 1)
        if not ids.any():
            return
        first = start == 0 or (slot > 0 and int(self._slots[slot - 1]) < number - 1)  # behind a hole
        marks = np.flatnonzero(np.isin(ids, self.separators)).tolist()
        begins = [0, *(mark + 1 for mark in marks)]
        for begin, stop in zip(begins, [*marks, min(end - start, len(ids))], strict=True):
            if stop > begin:
                yield Raw(ids[begin:stop], starts=begin > 0 or first, ended=stop < len(ids) and stop in marks)

    def _ids(self, start: int, end: int) -> Ids:
        count = min(end, self.count) - start
        try:
            return np.fromfile(self.path, self.dtype, max(count, 0), offset=self._offset + start * self.dtype.itemsize)
        except OSError as error:
            raise ConverterError("The file cannot be read", where=self.name, why=str(error)) from error

    def _place(self, number: int) -> int:
        """Where a slot begins: at the first separator in it, or where it is cut."""
        begin = number * SLOT_IDS
        if number == 0 or begin >= self.count:
            return min(begin, self.count)
        marks = np.isin(self._ids(begin, begin + SLOT_IDS), self.separators)
        return begin + int(marks.argmax()) if marks.any() else begin

    def _check_width(self, vocab_size: int) -> None:
        """Ids that are read as of half their width are every second one 0, or hardly more."""
        start = int(self._slots[0]) * SLOT_IDS
        ids = self._ids(start, start + SLOT_IDS)
        if len(ids) < _LEAST_IDS or not ids.any():
            return
        width = self.dtype.itemsize
        for wider in (8, 4, 2):
            step = wider // width
            if step < 2 or len(ids) % step:
                continue
            high = ids.reshape(-1, step)[:, 1:]
            if int(high.max()) <= (vocab_size - 1) >> (8 * width):
                raise ConverterError(
                    f"The ids are wider than the {width} bytes that they are read as",
                    where=self.name,
                    why=f"Every {'second' if step == 2 else 'other'} id is {'0' if not high.any() else 'next to 0'}",
                    fix=f"Say that they have {wider}: --token-bytes {wider}",
                )


def _llm_c_header(path: Path, width: int | None) -> tuple[int, int]:
    """Bytes before the first id, and bytes of an id: nanoGPT's two, unless a header of llm.c or the user says so."""
    header = np.fromfile(path, "<i4", 3)
    known = _LLM_C.get(int(header[0])) if len(header) == 3 else None
    if known is None or path.stat().st_size < _HEADER:
        return 0, width or 2
    stated, found = int(header[2]), (path.stat().st_size - _HEADER) // known
    if stated != found:
        why = f"Its header says {stated} tokens, and there are {found}"
        raise ConverterError("The file is cut short or damaged", where=str(path), why=why, fix="Make it again")
    if width not in (None, known):
        why = f"Its header is llm.c's for ids of {known} bytes"
        raise ConverterError(f"The ids do not have {width} bytes", where=str(path), why=why, fix="Omit --token-bytes")
    return _HEADER, known


def _with_data(path: Path, offset: int, width: int, count: int) -> npt.NDArray[np.int64]:
    """Numbers of the slots that are not holes of a sparse file."""
    if not hasattr(os, "SEEK_DATA"):
        return np.arange(-(-count // SLOT_IDS))
    slots, end, size = [], offset, path.stat().st_size
    with path.open("rb") as file:
        while end < size:
            try:
                begin = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:  # no data behind here
                break
            end = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
            first, last = (max(place - offset, 0) // (width * SLOT_IDS) for place in (begin, end - 1))
            slots.append(np.arange(first, last + 1))
    return np.unique(np.concatenate(slots)) if slots else np.arange(0)


class IdRows(Source):
    """A 2-D `.npy` of token ids, mapped: a document a row, as it is; nothing says that its text ends there."""

    def __init__(self, path: Path) -> None:
        fix = "Save a 2-D array of integers, a document a row, with numpy.save"
        try:
            # A map never unpickles, and reads the header alone: a damaged one cannot claim all memory.
            array = np.lib.format.open_memmap(path, mode="r")
        except Exception as error:  # numpy parses the header as Python, and passes on whatever that says
            raise ConverterError("The file is not a sound .npy", where=str(path), why=str(error), fix=fix) from error
        if array.dtype.kind not in "iu" or array.ndim != 2:
            why = f"It is {array.ndim}-D {array.dtype}"
            raise ConverterError("The array does not hold token ids", where=str(path), why=why, fix=fix)
        if array.size == 0:
            raise ConverterError("The array is empty", where=str(path), why=f"Its shape is {array.shape}", fix=fix)
        self._array, self._rows = array, max(1, SLOT_IDS // array.shape[1])
        super().__init__(str(path), -(-len(array) // self._rows))

    def read(self, slot: int) -> Iterator[Raw]:
        for row in self._array[slot * self._rows : (slot + 1) * self._rows]:
            yield Raw(np.array(row), ended=False)


def texts_of(rows: Iterable[Any], where: str, count: Callable[[int], None]) -> Iterator[Raw]:
    """The text of each row; those without are counted. Raises ConverterError for a row that has no field for it."""
    for row in rows:
        text = None if row is None else row.get(FIELD, "") if isinstance(row, dict) else row
        if row is not None and (not isinstance(row, dict) or FIELD not in row or not isinstance(text, (str, NoneType))):
            fields = ", ".join(f"'{name}' ({type(value).__name__})" for name, value in _fields(row))
            raise ConverterError(
                f"There is no text in a field '{FIELD}'",
                where=where,
                why=f"A row has {fields}" if fields else f"A row is no object: {str(row)[:80]!r}",
                fix=f"Rename the field that holds the text to '{FIELD}'",
            )
        if text is None or not text.strip():
            count(1)
        else:
            yield Raw(text)


def _fields(row: Any) -> list[tuple[str, Any]]:
    return list(row.items())[:12] if isinstance(row, dict) else []


def json_lines(lines: Iterable[str], where: str) -> Iterator[Any]:
    """The value of each line that is not blank; raises ConverterError for one that is no JSON."""
    for line in lines:
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                why = f"A line is no JSON: {error}. It begins with {line[:60]!r}"
                raise ConverterError("The text cannot be read", where=where, why=why) from error


def decoded(data: bytes, where: str, start: int = 0) -> str:
    """UTF-8 text; raises ConverterError for other bytes, the first of which is told as counted from `start`."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) and start == 0:
        raise ConverterError("The file is not UTF-8 text", where=where, why="It is UTF-16", fix="Convert it to UTF-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConverterError(
            "The file is not UTF-8 text",
            where=where,
            why=f"Byte {start + error.start} is 0x{error.object[error.start]:02x}: {error.reason}",
            fix="Convert it to UTF-8, or name it .npy or .bin if it holds token ids",
        ) from error
    if "\x00" in text:
        raise ConverterError("The file is not text", where=where, why="There are zero bytes in it")
    return text


def split_text(text: str, separator: str | None, starts: bool = True, ended: bool = True) -> Iterator[Raw]:
    """The documents of a text between separators; blank ones are none."""
    parts = text.split(separator) if separator else [text]
    for number, part in enumerate(parts):
        if part.strip():
            yield Raw(part, starts or number > 0, ended or number < len(parts) - 1)


def listed(texts: Text | Sequence[Text]) -> list[Text]:
    """One text or several."""
    return [texts] if isinstance(texts, (str, os.PathLike)) else list(texts)


def expand(texts: Sequence[Text]) -> list[tuple[Path | str, int | None]]:
    """The files of texts, and bytes of an id where the user tells them; a folder is all its files but hidden ones.

    Raises ConverterError for what is missing.
    """
    if not texts:
        raise ConverterError("No text was given", fix="Name a file, a folder, or a dataset as hub:owner/name")
    found: list[tuple[Path | str, int | None]] = []
    for text in texts:
        width = text.token_bytes if isinstance(text, TokenFile) else None
        named = [str(text)] if str(text).startswith(HUB_PREFIX) else _below(Path(text))
        found += [(each, width) for each in named]
    return found


def _below(path: Path) -> list[Path]:
    if path.is_file() or is_saved_dataset(path):
        return [path]
    if not path.is_dir():
        what = "It is no file: a pipe or a device" if path.exists() else "There is no such file or folder"
        raise ConverterError(what, where=str(path), fix="Name a file or a folder of texts")
    files = list(_files(path))
    if not files:
        raise ConverterError("The folder holds no files", where=str(path), why="Hidden ones are left out")
    return files


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder, in the order of their paths; links to folders are not followed."""
    for child in sorted(child for child in folder.iterdir() if not child.name.startswith(".")):
        if child.is_file() or is_saved_dataset(child):
            yield child
        elif child.is_dir() and not child.is_symlink():
            yield from _files(child)


def is_saved_dataset(path: Path) -> bool:
    """Whether `datasets` saved a dataset, or a few by split, into this folder."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
