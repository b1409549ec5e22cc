"""Documents as one long array of token ids with the places where they begin and end, in memory or on a disk."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.errors import ConverterError
from converter.files.output import disk_errors
from converter.text.documents import Document, at_least, read
from converter.text.sources import Text, expand
from converter.text.tokens import ModelTokens
from converter.text.windows import Split

_IDS, _OFFSETS, _ENDED, _FACTS = "ids.bin", "offsets.npy", "ended.npy", "corpus.json"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents end to end: `ids` (tokens,) int32, and `offsets` (documents + 1,) int64, where each begins.

    Where `ended` (documents,) is true the document's end is real, and `end_of_text` is the token behind it.
    """

    ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    ended: npt.NDArray[np.bool_]
    end_of_text: int | None
    #: sha256 of all of it: a run is resumed on the very same tokens, or not at all.
    fingerprint: str
    #: Pieces that were read, in the order of reading: so many are the same text in other tokens.
    pieces: int = 0
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, documents: Sequence[Document], end_of_text: int | None = None, **facts: Any) -> Corpus:
        """The corpus of documents in memory."""
        ids = np.concatenate([document.ids for document in documents]).astype(np.int32)
        offsets = np.cumsum([0, *(len(document.ids) for document in documents)], dtype=np.int64)
        ended = np.array([document.ended for document in documents], dtype=np.bool_)
        digest = hashlib.sha256(ids.data)
        return cls(ids, offsets, ended, end_of_text, _fingerprint(digest, offsets, ended, end_of_text), **facts)

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return len(self.ids)

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.offsets) - 1

    def split(self) -> list[Document]:
        """The documents; their ids are views."""
        places = zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), self.ended.tolist(), strict=True)
        return [Document(str(number), self.ids[at:end], ended) for number, (at, end, ended) in enumerate(places)]


def load_corpus(
    texts: Sequence[Text], tokens: ModelTokens, *, max_tokens: int | None = None, max_pieces: int | None = None
) -> Corpus:
    """The documents of texts, all of them or up to the one that reaches `max_tokens`; see `documents.read`.

    With `max_pieces` another tokenizer reads the same text that gave so many pieces before.
    """
    by_tokens = at_least(max_tokens, least=0)
    reading = read(
        texts, tokens, by_tokens if max_pieces is None else lambda reading: len(reading.pieces) >= max_pieces
    )
    return Corpus.of(reading.documents, tokens.end_of_text, pieces=len(reading.pieces), notes=reading.notes)


def cached_split(
    texts: Sequence[Text], tokens: ModelTokens, decisive: Sequence[Any], cache: Path, make: Callable[[], Split]
) -> tuple[Corpus, Corpus, tuple[str, ...]]:
    """Both sides of what `make` reads, on the disk and mapped; read from there by a later call of the same.

    The same are files (path, size, time of change), tokenizer and `decisive` values. Where several processes share a
    disk, one should come first.
    """
    folder = cache / _key(texts, tokens, decisive)
    if not folder.exists():
        split = make()
        with disk_errors(cache):
            _write(split, tokens.end_of_text, folder)
    try:
        notes = tuple(json.loads((folder / _FACTS).read_text(encoding="utf-8"))["notes"])
        return _open(folder / "learnt"), _open(folder / "held_out"), notes
    except (OSError, ValueError, KeyError) as error:
        raise ConverterError(
            "The tokens in the cache are damaged", where=str(folder), why=str(error), fix="Remove this folder"
        ) from error


def _key(texts: Sequence[Text], tokens: ModelTokens, decisive: Sequence[Any]) -> str:
    """A name made of all that decides the ids."""
    files: list[Any] = []
    for source, width in expand(texts):
        files.append((str(source), width))
        for file in [] if isinstance(source, str) else _parts(source):
            files.append((str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns))
    reader = None
    if tokens.tokenizer is not None:  # it is asked for whole documents, whatever it cuts and pads by itself
        pipeline = json.loads(tokens.tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
        reader = (pipeline, tokens.tokenizer.eos_token)
    facts = [files, reader, tokens.size, tokens.opening, tokens.ends, decisive]
    return "tokens-" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _parts(source: Path) -> list[Path]:
    """The file, or the files of a folder that `datasets` saved."""
    return sorted(source.rglob("*")) if source.is_dir() else [source]


def _write(split: Split, end_of_text: int | None, folder: Path) -> None:
    """Write both sides into a cache folder that appears complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".", ignore_cleanup_errors=True) as name:
        partial = Path(name, folder.name)
        for side, documents in (("learnt", split.learnt), ("held_out", split.held_out)):
            (partial / side).mkdir(parents=True)
            _write_side(documents, end_of_text, partial / side)
        (partial / _FACTS).write_text(json.dumps({"notes": split.notes}), encoding="utf-8")
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first, with the same ids
                raise


def _write_side(documents: Sequence[Document], end_of_text: int | None, folder: Path) -> None:
    digest = hashlib.sha256()
    with (folder / _IDS).open("wb") as file:
        for document in documents:
            ids = np.ascontiguousarray(document.ids, dtype=np.int32)
            file.write(ids.data)
            digest.update(ids.data)
    offsets = np.cumsum([0, *(len(document.ids) for document in documents)], dtype=np.int64)
    ended = np.array([document.ended for document in documents], dtype=np.bool_)
    np.save(folder / _OFFSETS, offsets)
    np.save(folder / _ENDED, ended)
    fingerprint = _fingerprint(digest, offsets, ended, end_of_text)
    facts = {"tokens": int(offsets[-1]), "end_of_text": end_of_text, "fingerprint": fingerprint}
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _open(folder: Path) -> Corpus:
    """The corpus in a folder, its ids mapped."""
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    ids = np.memmap(folder / _IDS, dtype=np.int32, mode="r", shape=(facts["tokens"],))
    offsets, ended = np.load(folder / _OFFSETS), np.load(folder / _ENDED)
    return Corpus(ids, offsets, ended, facts["end_of_text"], facts["fingerprint"])


def _fingerprint(
    ids: Any, offsets: npt.NDArray[np.int64], ended: npt.NDArray[np.bool_], end_of_text: int | None
) -> str:
    """The digest of ids, completed by the rest."""
    for part in (offsets.data, ended.data, str(end_of_text).encode()):
        ids.update(part)
    return str(ids.hexdigest())
