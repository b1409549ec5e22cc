"""Damage to JSON, YAML and every form of text."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np

from fuzzing.files import overwrite
from fuzzing.values import damage_json, damage_lines


def as_json(path: Path, rng: random.Random) -> str:
    """A value, a name or the syntax."""
    text, told = damage_json(path.read_text(encoding="utf-8"), rng)
    return overwrite(path, text.encode("utf-8", "surrogatepass"), told)


def as_lines(path: Path, rng: random.Random) -> str:
    """Lines, and values in them."""
    text, told = damage_lines(path.read_text(encoding="utf-8"), rng)
    return overwrite(path, text.encode("utf-8", "surrogatepass"), told)


def as_json_lines(path: Path, rng: random.Random) -> str:
    """One row of jsonl."""
    rows = path.read_text(encoding="utf-8").splitlines()
    at = rng.randrange(len(rows))
    rows[at], told = damage_json(rows[at], rng)
    return overwrite(path, "\n".join(rows).encode("utf-8", "surrogatepass"), f"row {at + 1}: {told}")


def as_prose(path: Path, rng: random.Random) -> str:
    """Bytes that are no text, or text that is no text to learn from."""
    text = path.read_bytes()
    at = rng.randrange(len(text))
    return overwrite(
        path,
        *rng.choice(
            (
                (text[:at] + b"\xff\xfe\xc3\x28" + text[at:], f"no UTF-8 at {at}"),
                (text[:at] + b"\x00" * 9 + text[at:], f"zeros at {at}"),
                (b" \n\t\n" * 500, "white space"),
                (b"x" * 30_000, "one long word"),
                (text[:1], "one byte"),
                (b"\xef\xbb\xbf" + text, "byte order mark"),
                (text.replace(b" ", b"\xf0\x9f\x98\x80"), "emoji for spaces"),
                (text[:at] + b"<|endoftext|>" * 300 + text[at:], f"ends of text at {at}"),
            )
        ),
    )


def npy(path: Path, rng: random.Random) -> str:
    """Another array, or another header over the same data."""
    ids = np.load(path)
    if rng.random() < 0.35:
        header = f"{{'descr': '{rng.choice(('<i8', '<u2', '|O', '<U9', '<f4', '>i8', 'x', '<M8[s]'))}', "
        header += f"'fortran_order': {rng.choice(('False', 'True', '7'))}, "
        header += f"'shape': {rng.choice((ids.shape, (10**12,), (2**62, 8), (-1, 3), (), (0, 0), 'x', (10**7,)))}, }}\n"
        raw = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + ids.tobytes()
        return overwrite(path, raw, f"header {header.strip()}")
    told, array = rng.choice(
        (
            ("ids beyond the vocabulary", ids + 1000),
            ("negative ids", ids - 5),
            ("floats", ids / 3),
            ("NaN", ids * float("nan")),
            ("one row", ids[0]),
            ("one number", ids[0, 0]),
            ("3-D", ids[None]),
            ("nothing", ids[:0]),
            ("empty rows", ids[:, :0]),
            ("one column", ids[:, :1]),
            ("uint64 above all", ids.astype(np.uint64) + np.uint64(2**63)),
            ("bool", ids > 3),
            ("text", ids.astype(str)),
            ("objects", ids.astype(object)),
            ("complex", ids.astype(complex)),
            ("big-endian", ids.astype(">i4")),
            ("a field", np.zeros(4, [("a", "i4")])),
        )
    )
    np.save(path, array, allow_pickle=True)
    return told


def token_bin(path: Path, rng: random.Random) -> str:
    """Another width, ids that are none, or half an id."""
    ids = np.frombuffer(path.read_bytes(), np.uint16)
    return overwrite(
        path,
        *rng.choice(
            (
                (ids.astype(np.uint32).tobytes(), "uint32"),
                (ids.astype(np.int64).tobytes(), "int64"),
                (ids.tobytes()[:-1], "half an id less"),
                ((ids + 60000).tobytes(), "ids beyond the vocabulary"),
                (b"", "empty"),
                (ids[:1].tobytes(), "one id"),
                (bytes(2000), "zeros"),
                (ids.byteswap().tobytes(), "big-endian"),
            )
        ),
    )


def parquet(path: Path, rng: random.Random) -> str:
    """Other columns and types."""
    import pyarrow
    import pyarrow.parquet

    words = ["some text", "more of it"] * 20
    told, columns = rng.choice(
        (
            ("another name", {"body": words}),
            ("numbers", {"text": [1, 2] * 20}),
            ("nulls", {"text": [None] * 40}),
            ("bytes", {"text": [b"\xff\xfe", b"x"] * 20}),
            ("lists", {"text": [["a"], ["b", "c"]] * 20}),
            ("no rows", {"text": []}),
            ("ids beyond the vocabulary", {"input_ids": [[1, 2, 99999], [3]] * 20}),
            ("ids as floats", {"input_ids": [[1.5, 2.0], [3.0]] * 20}),
            ("empty ids", {"input_ids": [[], []] * 20}),
            ("two columns of text", {"text": words, "content": words}),
        )
    )
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return told
