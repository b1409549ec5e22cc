"""Damage to any file: bits, lengths, and what lies under its name.

Each function changes the file in place and says what it did. Everything follows from the random generator.
"""

from __future__ import annotations

import gzip
import os
import random
import shutil
from pathlib import Path

_HTML = b"<!DOCTYPE html><html><head><title>404</title></head><body>Not found</body></html>"
_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


def flip(path: Path, rng: random.Random, start: int = 0, stop: int | None = None) -> str:
    """Some bits, more often near the beginning."""
    data = bytearray(path.read_bytes())
    stop = min(len(data), len(data) if stop is None else stop)
    if stop <= start:
        return overwrite(path, b"x", "one byte")
    if rng.random() < 0.5:
        stop = min(stop, start + 512)
    bits = [(rng.randrange(start, stop), rng.randrange(8)) for _ in range(rng.choice((1, 1, 2, 8)))]
    for at, bit in bits:
        data[at] ^= 1 << bit
    return overwrite(path, bytes(data), f"bits flipped at {bits}")


def truncate(path: Path, rng: random.Random) -> str:
    """A part of the file."""
    size = rng.randrange(path.stat().st_size + 1)
    return overwrite(path, path.read_bytes()[:size], f"cut to {size} bytes")


def splice(path: Path, rng: random.Random) -> str:
    """A piece doubled, removed, zeroed or replaced by random bytes."""
    data = path.read_bytes()
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    b = min(b, a + 4096)
    what, middle = rng.choice(
        (
            ("doubled", data[a:b] * 2),
            ("removed", b""),
            ("zeroed", bytes(b - a)),
            ("at random", rng.randbytes(b - a)),
            ("0xff", b"\xff" * (b - a)),
        )
    )
    return overwrite(path, data[:a] + middle + data[b:], f"bytes {a} to {b} {what}")


def whole(path: Path, rng: random.Random) -> str:
    """Another content altogether."""
    told, data = rng.choice(
        (
            ("empty", b""),
            ("HTML", _HTML),
            ("a git-lfs pointer", _POINTER),
            ("zeros", bytes(4096)),
            ("random bytes", rng.randbytes(1000)),
            ("gzip", gzip.compress(path.read_bytes(), mtime=0)),
            ("with 64 KB of zeros behind", path.read_bytes() + bytes(65536)),
            ("UTF-16", path.read_bytes().decode("latin-1").encode("utf-16")),
            ("two bytes", b"{}"),
        )
    )
    return overwrite(path, data, told)


def place(path: Path, rng: random.Random) -> str:
    """Something else under the file's name."""
    kind = rng.choice(("absent", "folder", "loop", "dangling", "outside", "zero", "pipe", "other"))
    others = sorted(file for file in path.parent.iterdir() if file.is_file() and file != path)
    content = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("nothing-there")
    elif kind == "outside":  # as the Hub's cache has it: the link is sound, and so is what it links to
        elsewhere = Path.cwd().parent / "outside" / path.name
        elsewhere.write_bytes(content)
        path.symlink_to(elsewhere)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "other" and others:
        shutil.copyfile(rng.choice(others), path)
    return f"in its place: {kind}"


def overwrite(path: Path, data: bytes, told: str) -> str:
    """The file with other bytes."""
    path.write_bytes(data)
    return told
