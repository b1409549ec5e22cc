"""Texts that are read on from their beginning: compressed files, tables, datasets."""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from converter.errors import ConverterError
from converter.text.kinds import HEAD, head_of, kind_of, refuse_no_text
from converter.text.sources import FIELD, HUB_PREFIX, SLOT_BYTES, Raw, json_lines, split_text

#: Rows of a table that are read at once.
_BATCH = 512
#: Longest field of a CSV file.
_LONGEST = (1 << 31) - 1
#: The name of a compression is the end of a file's name.
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")


@contextlib.contextmanager
def readable(where: str) -> Iterator[None]:
    """What the libraries say about damaged data, as a ConverterError."""
    try:
        yield
    except ConverterError:
        raise
    except UnicodeDecodeError as error:
        why = f"A byte is 0x{error.object[error.start]:02x}: {error.reason}"
        raise ConverterError("The file is not UTF-8 text", where=where, why=why, fix="Convert it to UTF-8") from error
    except Exception as error:  # those of pyarrow, of fsspec, of the codecs and of a Hub client, by format and place
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConverterError("The text cannot be read", where=where, why=why) from error


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file, without the compression that the end of its name tells."""
    kind = path.suffix.lower()
    if kind == ".zst":
        import pyarrow

        return cast(IO[bytes], pyarrow.input_stream(str(path), compression="zstd"))
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast(IO[bytes], openers.get(kind, open)(path, "rb"))


@contextlib.contextmanager
def text_stream(path: Path) -> Iterator[io.TextIOWrapper]:
    """The UTF-8 text of a file; a byte order mark is left out. Raises ConverterError for what is no text."""
    with readable(str(path)):
        with opened(path) as stream:
            refuse_no_text(path, stream.read(HEAD) or b"\n")
        with opened(path) as stream, io.TextIOWrapper(cast(Any, stream), encoding="utf-8-sig", newline="") as text:
            yield text


def plain(path: Path, separator: str | None) -> Iterator[Raw]:
    """The documents of a compressed text; long ones in pieces."""
    starts, kept = True, ""
    with text_stream(path) as stream:
        while block := stream.read(SLOT_BYTES):
            kept += block
            cut, ended = _last_cut(kept, separator)
            if cut:
                yield from split_text(kept[:cut], separator, starts, ended)
                starts, kept = ended, kept[cut:]
    yield from split_text(kept, separator, starts)


def _last_cut(text: str, separator: str | None) -> tuple[int, bool]:
    """Where the last document, or a line of a long one, ends; and whether a document ends there."""
    if separator and (at := text.rfind(separator)) > 0:
        return at + len(separator), True
    if len(text) < 2 * SLOT_BYTES:
        return 0, False
    line = text.rfind("\n", SLOT_BYTES, len(text) - 64)  # a separator may be cut by the block's end
    return (line + 1 if line > 0 else len(text) - 64), False


def lines(path: Path) -> Iterator[Any]:
    """The values of compressed JSON lines."""
    with text_stream(path) as stream:
        yield from json_lines(stream, str(path))


def json_values(path: Path) -> Iterator[Any]:
    """The values of a list, or those that stand one behind another, read on as far as they are asked for."""
    decoder, kept, in_list, started = json.JSONDecoder(), "", False, False
    with text_stream(path) as stream:
        while True:
            block = stream.read(SLOT_BYTES)
            kept = (kept + block).lstrip(" \t\r\n," if started else " \t\r\n")
            if not started and kept:
                in_list, started = kept[0] == "[", True
                kept = kept[in_list:]
            while kept := kept.lstrip(" \t\r\n,"):
                if in_list and kept[0] == "]":
                    return
                try:
                    value, end = decoder.raw_decode(kept)
                except (ValueError, RecursionError) as error:
                    if not block or isinstance(error, RecursionError):
                        raise ConverterError("The text is no JSON", where=str(path), why=str(error)) from error
                    break  # it goes on in the next block
                if end == len(kept) and block and not isinstance(value, (dict, list, str)):
                    break  # a number may go on
                yield value
                kept = kept[end:]
            if not block:
                if in_list:
                    raise ConverterError("The text is no JSON", where=str(path), why="The list has no end")
                return


def table(path: Path, delimiter: str) -> Iterator[dict[str, Any]]:
    """The rows of a CSV or TSV file, whose first line names the fields."""
    csv.field_size_limit(_LONGEST)
    with text_stream(path) as stream:
        reader = csv.DictReader(stream, delimiter=delimiter)
        if FIELD not in (reader.fieldnames or ()):
            raise ConverterError(
                f"There is no column '{FIELD}'",
                where=str(path),
                why=f"Its first line names {', '.join(repr(name) for name in (reader.fieldnames or ())[:12])}",
                fix=f"Name the columns in the first line, that of the text '{FIELD}'",
            )
        for row in reader:
            yield {FIELD: row[FIELD]}


def parquet(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file, of which the text's column alone is read."""
    import pyarrow.parquet

    head_of(path)
    with readable(str(path)), pyarrow.parquet.ParquetFile(path) as file:
        columns = [FIELD] if FIELD in file.schema_arrow.names else None
        for batch in file.iter_batches(_BATCH, columns=columns):
            yield from batch.to_pylist()


def arrow(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of an arrow file, of either kind, mapped."""
    import pyarrow

    head = head_of(path)
    with readable(str(path)), pyarrow.memory_map(str(path)) as source:
        if kind_of(head) == "an arrow file":
            file = pyarrow.ipc.open_file(source)
            batches = (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            batches = iter(pyarrow.ipc.open_stream(source))
        yield from _arrow_rows(batches)


def _arrow_rows(batches: Iterator[Any]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        chosen = batch.select([FIELD]) if FIELD in batch.schema.names else batch
        for start in range(0, len(chosen), _BATCH):
            yield from chosen.slice(start, _BATCH).to_pylist()


def saved(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a folder that `datasets` saved; of several splits `train`."""
    import datasets

    with readable(str(path)):
        found = datasets.load_from_disk(str(path))
        if isinstance(found, datasets.DatasetDict):
            if "train" not in found and len(found) > 1:
                why = f"Its splits are {', '.join(found)}, and none of them is 'train'"
                raise ConverterError("Which split is meant is not known", where=str(path), why=why, fix="Name a folder")
            found = found["train"] if "train" in found else next(iter(found.values()))
        if FIELD in found.column_names:
            found = found.select_columns([FIELD])
        for row in found.with_format(None):
            yield dict(row)


def hub(name: str) -> Iterator[dict[str, Any]]:
    """The rows of a dataset of the Hub, as `datasets` streams them."""
    import logging

    import datasets

    datasets.logging.set_verbosity(logging.CRITICAL)  # it reports a damaged row to a log, and by an exception
    name, _, split = name.removeprefix(HUB_PREFIX).partition(":")
    owner, _, rest = name.partition("/")
    short, _, config = rest.partition("/")
    with readable(HUB_PREFIX + name):
        rows = datasets.load_dataset(f"{owner}/{short}", config or None, split=split or "train", streaming=True)
        for row in rows:
            yield dict(row)
