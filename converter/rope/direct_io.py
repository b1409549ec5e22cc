"""Bytes between files: read through mappings, written past the page cache.

A copy of some gigabytes spends most of its time on memory for pages of the new file that nobody reads again. So a
new file is written with O_DIRECT where the file system has that, straight from the pages of the source
file: the kernel hands them to the disk, and they never pass through this process. What has to be changed
on the way goes through one buffer, allocated once, for a fresh page costs more than the copy into it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from converter.errors import CheckpointError

Bytes = npt.NDArray[np.uint8]

#: Where O_DIRECT wants places, sizes and addresses to be multiples of a block, this is one of every common disk's.
PAGE = max(4096, mmap.ALLOCATIONGRANULARITY)
#: Bytes that are mapped, or written, at once.
PIECE = 4 << 20
#: Writes under way at once: one alone leaves the disk idle between two.
_WRITES = 2
_DIRECT = getattr(os, "O_DIRECT", 0)
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


def mapped(handle: int, start: int, end: int) -> Bytes:
    """Bytes `start` to `end` of an open file, read only. They stay mapped as long as the array lives."""
    first = start - start % PAGE
    try:
        pages = mmap.mmap(handle, end - first, flags=mmap.MAP_SHARED | _POPULATE, prot=mmap.PROT_READ, offset=first)
    except ValueError as error:  # the end is behind the file's
        raise CheckpointError(
            "a file became shorter while it was read",
            why="something else writes to it",
            fix="Try again when that is done",
        ) from error
    return np.frombuffer(pages, np.uint8)[start - first :]


def will_need(path: Path, start: int, size: int) -> None:
    """Have the kernel read a part of a file into its cache, in its own time, where it can be asked to."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)


def write_at(handle: int, data: Bytes, offset: int) -> None:
    """Write all of `data` at a place of an open file."""
    left = data.data
    while left:
        written = os.pwrite(handle, left, offset)
        left, offset = left[written:], offset + written


def _open_past_the_cache(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)  # a file system without O_DIRECT


def aligned_buffer(size: int) -> Bytes:
    """Memory that begins at a page."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


class NewFile:
    """Context manager: a file of `size` bytes, written from the first to the last; `finish` puts it on the disk."""

    def __init__(self, path: Path, size: int) -> None:
        self._handle = _open_past_the_cache(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.truncate(self._handle, size)  # writes that do not make a file longer can run beside each other
        self._buffer = aligned_buffer(PIECE)
        self._filled = 0
        self._written = 0
        self._pool = ThreadPoolExecutor(_WRITES)
        self._running: deque[Future[None]] = deque()

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        os.close(self._handle)

    @property
    def position(self) -> int:
        """The place of the next byte."""
        return self._written + self._filled

    def room(self, size: int) -> Bytes:
        """The next bytes of the file, for the caller to fill at once."""
        if self._filled + size > len(self._buffer):
            self._flush()
        if self._filled + size > len(self._buffer):
            rest = self._buffer[: self._filled]
            self._buffer = aligned_buffer(self._filled + size)
            self._buffer[: self._filled] = rest
        self._filled += size
        return self._buffer[self._filled - size : self._filled]

    def copy(self, source: int, start: int, end: int) -> None:
        """The next bytes are those of another open file: whole pages without a copy, if they lie alike in both."""
        while start < end:
            alike = (self.position - start) % PAGE == 0
            if alike and start % PAGE == 0 and end - start >= PAGE:
                self._flush()
                size = min(PIECE, (end - start) // PAGE * PAGE)
                self._write(mapped(source, start, start + size))
            else:
                size = min(end - start, PAGE - start % PAGE if alike else PIECE // 2)
                self.room(size)[:] = mapped(source, start, start + size)
            start += size

    def finish(self) -> None:
        """Write what is left, which may be no whole page, and force everything to the disk."""
        self._flush()
        self._wait()
        self._leave_direct()
        write_at(self._handle, self._buffer[: self._filled], self._written)
        os.fsync(self._handle)

    def _flush(self) -> None:
        """Write the whole pages of the buffer."""
        whole = self._filled - self._filled % PAGE
        if whole:
            self._write(self._buffer[:whole])
            self._wait()
            self._filled -= whole
            self._buffer[: self._filled] = self._buffer[whole : whole + self._filled]

    def _write(self, data: Bytes) -> None:
        """Write in the background; `data` is in use until `_wait`, or until so many later writes."""
        if len(self._running) == _WRITES:
            self._running.popleft().result()
        self._running.append(self._pool.submit(self._write_at, data, self._written))
        self._written += len(data)

    def _wait(self) -> None:
        while self._running:
            self._running.popleft().result()

    def _write_at(self, data: Bytes, offset: int) -> None:
        try:
            write_at(self._handle, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._leave_direct()  # a disk of larger blocks
            write_at(self._handle, data, offset)

    def _leave_direct(self) -> None:
        fcntl.fcntl(self._handle, fcntl.F_SETFL, fcntl.fcntl(self._handle, fcntl.F_GETFL) & ~_DIRECT)


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Do `work` in a thread while the caller does something else; its error is raised when both are done."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work)
        yield
        running.result()
