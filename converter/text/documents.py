"""Text of any kind as one long array of token ids with document boundaries, tokenized once.

Plain text, `.npy` and `.bin` files are read by `converter.text.windows`; jsonl, parquet and datasets of the Hub
are streamed by `datasets`, so that neither a second copy nor all of the text has to fit anywhere. What
comes out is kept in a cache folder where one is given, under a name made of everything that decides it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from converter.errors import ConverterError
from converter.files.output import disk_errors
from converter.text.windows import check_ids, documents_from_strings, need_tokenizer, read_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: A dataset of the Hub is named `hub:owner/name`, `hub:owner/name/config`, either with `:split`.
HUB_PREFIX = "hub:"
Ids = npt.NDArray[np.int32]
#: A file or, by name, a dataset of the Hub.
Source = Path | str

#: Suffix of a file -> the builder of `datasets` that reads it. Other files are `converter.text.windows`'s.
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
#: Suffixes of compression, which `datasets` looks through.
_COMPRESSED = (".gz", ".zst")
#: The field of a row that holds its text.
_FIELD = "text"
#: Documents that are tokenized at once: enough for the tokenizer's threads.
_BATCH = 512
_IDS, _OFFSETS, _FACTS = "ids.bin", "offsets.npy", "corpus.json"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents end to end: `ids` (tokens,) int32, and `offsets` (documents + 1,) int64, where each begins."""

    ids: Ids
    offsets: npt.NDArray[np.int64]
    #: sha256 of ids and offsets: a run is resumed on the very same tokens, or not at all.
    fingerprint: str

    @classmethod
    def of(cls, documents: Sequence[npt.NDArray[Any]]) -> Corpus:
        """The corpus of documents in memory, each its token ids."""
        ids = np.concatenate(documents).astype(np.int32)
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        return cls(ids, offsets, hashlib.sha256(ids.tobytes() + offsets.tobytes()).hexdigest())

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return len(self.ids)

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.offsets) - 1


def load_corpus(
    texts: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerFast | None,
    *,
    vocab_size: int,
    end_of_text: int | None,
    cache: Path | None = None,
    max_tokens: int | None = None,
    max_documents: int | None = None,
) -> Corpus:
    """The documents of files, folders and datasets of the Hub, in the order given.

    A `.jsonl`, `.json` or `.parquet` holds a document a row, in its field `text`; other files are what
    `converter.text.windows.read_documents` makes of them. A folder stands for all files in it, at any depth, in the
    order of their paths; hidden ones are left out. Reading stops with the document that reaches `max_tokens`, or
    after `max_documents`.

    With `cache` the ids are kept in that folder and mapped, not loaded; a later call with the same files
    (path, size, time of change) and the same tokenizer reads them from there. Where several processes
    share a disk, one should come first.

    Raises ConverterError for what is missing, empty, damaged, has no text, or was tokenized for another model.
    """
    sources = [source for text in texts for source in _expand(text)]
    if not sources:
        raise ConverterError("No text was given", fix="Name a file, a folder, or a dataset as hub:owner/name")
    reading = (_read(source, tokenizer, vocab_size=vocab_size, end_of_text=end_of_text) for source in sources)
    documents = _up_to(max_tokens, islice(chain.from_iterable(reading), max_documents))
    if cache is None:
        return Corpus.of(list(documents))
    folder = cache / _key(sources, tokenizer, vocab_size, end_of_text, max_tokens, max_documents)
    if not folder.exists():
        with disk_errors(cache):
            _build(documents, folder)
    return _open(folder)


def _expand(text: str | Path) -> list[Source]:
    """The files of a folder; a file or a dataset of the Hub is itself."""
    if str(text).startswith(HUB_PREFIX):
        return [str(text)]
    path = Path(text)
    if not path.exists():
        raise ConverterError("There is no such file or folder", where=str(path))
    if path.is_file():
        return [path]
    files = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        raise ConverterError("The folder holds no files", where=str(path), why="Hidden ones are left out")
    return list(files)


def _up_to(max_tokens: int | None, documents: Iterable[Ids]) -> Iterator[Ids]:
    """The first documents, until there are `max_tokens`."""
    total = 0
    for ids in documents:
        yield ids
        total += len(ids)
        if max_tokens is not None and total >= max_tokens:
            return


def _read(
    source: Source, tokenizer: PreTrainedTokenizerFast | None, *, vocab_size: int, end_of_text: int | None
) -> Iterator[Ids]:
    """The token ids of each document of a file or of a dataset of the Hub."""
    if isinstance(source, Path) and _builder(source) is None:
        for document in read_documents([source], tokenizer, vocab_size=vocab_size, end_of_text=end_of_text):
            yield document.ids.astype(np.int32)
        return
    tokenizer = need_tokenizer(tokenizer, source)
    texts = (text for text in _rows(source) if text.strip())
    empty = True
    while batch := list(islice(texts, _BATCH)):
        named = {str(index): text for index, text in enumerate(batch)}
        for document in documents_from_strings(named, tokenizer, end_of_text):
            check_ids(document.ids, source, vocab_size)
            yield document.ids.astype(np.int32)
        empty = False
    if empty:
        raise ConverterError("There is no text in it", where=str(source), why=f"No row's '{_FIELD}' has any")


def _rows(source: Source) -> Iterator[str]:
    """The text of each row; raises ConverterError for what `datasets` cannot read and for rows without the field."""
    import datasets

    # It reports a damaged row twice: to a log, and by an exception, which we pass on.
    datasets.logging.set_verbosity(logging.CRITICAL)
    rows = iter(_streamed(source))
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # those of pyarrow, of fsspec and of a Hub client, by format and place
            raise ConverterError(
                "The dataset cannot be read",
                where=str(source),
                why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            ) from error
        if row is None:
            return
        text = row.get(_FIELD, "")
        if _FIELD not in row or not isinstance(text, (str, NoneType)):
            fields = ", ".join(f"'{name}' ({type(value).__name__})" for name, value in row.items())
            raise ConverterError(
                f"There is no text in a field '{_FIELD}'",
                where=str(source),
                why=f"A row has {fields}",
                fix=f"Rename the field that holds the text to '{_FIELD}'",
            )
        yield text or ""


def _streamed(source: Source) -> Iterator[dict[str, Any]]:
    """Rows of a file or of a dataset of the Hub, as `datasets` gives them."""
    from datasets import load_dataset

    if isinstance(source, Path):
        if source.stat().st_size == 0:  # datasets would raise a bare StopIteration
            return
        yield from load_dataset(_builder(source), data_files=str(source), split="train", streaming=True)
    else:
        name, _, split = source.removeprefix(HUB_PREFIX).partition(":")
        owner, _, rest = name.partition("/")
        short, _, config = rest.partition("/")
        yield from load_dataset(f"{owner}/{short}", config or None, split=split or "train", streaming=True)


def _builder(path: Path) -> str | None:
    return _BUILDERS.get((path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix)


def _key(sources: Sequence[Source], tokenizer: PreTrainedTokenizerFast | None, *decisive: int | None) -> str:
    """A name made of all that decides the ids."""
    files = [
        (str(source.resolve()), source.stat().st_size, source.stat().st_mtime_ns)
        if isinstance(source, Path)
        else source
        for source in sources
    ]
    reader = None
    if tokenizer is not None:  # it is asked for whole documents, whatever it cuts and pads by itself
        pipeline = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
        reader = (pipeline, tokenizer.eos_token)
    return "tokens-" + hashlib.sha256(json.dumps([files, reader, decisive]).encode()).hexdigest()[:16]


def _build(documents: Iterable[Ids], folder: Path) -> None:
    """Write the ids of documents into a cache folder that appears complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".", ignore_cleanup_errors=True) as name:
        partial = Path(name, folder.name)
        partial.mkdir()
        digest, lengths = hashlib.sha256(), [0]
        with (partial / _IDS).open("wb") as file:
            for ids in documents:
                file.write(ids.data)
                digest.update(ids.data)
                lengths.append(len(ids))
        offsets = np.cumsum(lengths, dtype=np.int64)
        digest.update(offsets.data)
        np.save(partial / _OFFSETS, offsets)
        facts = {"tokens": int(offsets[-1]), "documents": len(offsets) - 1, "fingerprint": digest.hexdigest()}
        (partial / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first, with the same ids
                raise


def _open(folder: Path) -> Corpus:
    """The corpus in a cache folder, its ids mapped."""
    try:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        ids = np.memmap(folder / _IDS, dtype=np.int32, mode="r", shape=(facts["tokens"],))
        offsets = np.load(folder / _OFFSETS)
        return Corpus(ids, offsets, facts["fingerprint"])
    except (OSError, ValueError, KeyError) as error:
        raise ConverterError(
            "The tokens in the cache are damaged", where=str(folder), why=str(error), fix="Remove this folder"
        ) from error
