"""A folder that appears complete or not at all.

Everything is written to a hidden sibling, `.<name>.partial`, and one rename makes it the target. A
kill at any moment leaves either no target, or the old one, or the new one.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from converter.errors import ConverterError

#: A folder with one of these is a checkpoint, and may be replaced by another.
_MARKS = ("config.json", "conversion.json")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class OutputFolder:
    """Context manager: write into `.partial`, then `commit()`.

    An exception removes the partial folder, unless it was resumed or `keep_partial` has been set
    because there is work in it worth resuming; an interrupt keeps it, as a kill would. With `resume` an
    earlier run's folder is taken over where there is one, which `resumed` tells. Raises
    `ConverterError` before anything is written, where the target must not be touched.
    """

    def __init__(
        self, target: Path, overwrite: bool = False, resume: bool = False, *, source: Path | None = None
    ) -> None:
        self.target = target.resolve()  # through a link, so that the rename stays on one disk
        if not self.target.name:
            raise ConverterError("the output folder is the root", where=str(target), fix="Name a folder of its own.")
        self.partial = self.target.with_name(f".{self.target.name}.partial")
        self.keep_partial = False
        self.resumed = False
        self._replaced = self.target.with_name(f".{self.target.name}.replaced")
        self._overwrite, self._resume = overwrite, resume
        self._source = source.resolve() if source else None
        self._made_parents: list[Path] = []
        self._committed = False

    def check(self) -> None:
        """Raise where the target must not be touched; nothing is written."""
        self._check_place()
        self._check_target()
        self._check_partial()

    def __enter__(self) -> OutputFolder:
        self._check_place()
        with disk_errors(self.target.parent):
            if self._replaced.exists() and not self.target.exists():  # killed between the renames of a commit
                self._replaced.rename(self.target)
            self._check_target()
            self._check_partial()
            if self.partial.exists() and not self._resume:
                shutil.rmtree(self.partial)
            self._made_parents = [parent for parent in self.target.parents if not parent.exists()]
            self.resumed = self.keep_partial = self.partial.exists()
            self.partial.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        interrupted = error is not None and not isinstance(error, Exception)
        if not (self._committed or self.keep_partial or interrupted):
            shutil.rmtree(self.partial, ignore_errors=True)
            with suppress(OSError):
                for parent in self._made_parents:
                    parent.rmdir()
        if isinstance(error, OSError) and error.errno in _FULL:
            raise _disk_error(error, self.partial) from error

    def check_space(self, nbytes: int) -> None:
        """Raise now if the disk cannot hold `nbytes`, what a resumed run wrote already included."""
        there = sum(file.stat().st_blocks * 512 for file in self.partial.rglob("*"))
        free = shutil.disk_usage(self.partial).free
        if nbytes > free + there:
            raise ConverterError(
                f"the result needs {nbytes / 1e9:.2f} GB and {free / 1e9:.2f} GB are free",
                where=str(self.target.parent),
                fix="Free some space, or choose a folder on another disk.",
            )

    def commit(self) -> None:
        """Make the partial folder the target. What it replaces is put back if that fails."""
        self.keep_partial = True  # the work is done: whatever fails now must not cost it
        with disk_errors(self.target):
            self._check_target()  # once more: the conversion may have taken hours
            for folder, _, files in os.walk(self.partial):
                for name in (*files, "."):
                    fsync(Path(folder, name))
            replaces = self.target.exists() and any(self.target.iterdir())
            if replaces:
                shutil.rmtree(self._replaced, ignore_errors=True)
                self.target.rename(self._replaced)
            try:
                self.partial.rename(self.target)
            except BaseException:
                if replaces:
                    self._replaced.rename(self.target)
                raise
            self._committed = True
            fsync(self.target.parent)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def _check_place(self) -> None:
        """The target is apart from the source and is not where we stand."""
        for own in (self.target, self.partial):
            if self._source and (own == self._source or own in self._source.parents or self._source in own.parents):
                raise ConverterError(
                    f"the output folder and the source {self._source} are the same, or one holds the other",
                    where=str(own),
                    fix="Choose a folder beside the source.",
                )
        here = Path.cwd()
        if self.target == here or self.target in here.parents:
            raise ConverterError(
                "the output folder is the current directory, or holds it, and cannot be exchanged as a whole",
                where=str(self.target),
                fix="Name a folder of its own.",
            )

    def _check_target(self) -> None:
        """The target is absent or empty, or a checkpoint that may be replaced."""
        if self.target.exists() and not self.target.is_dir():
            raise ConverterError("the output is a file", where=str(self.target), fix="Name a folder.")
        if not self.target.exists() or not any(self.target.iterdir()):
            return
        if not any((self.target / mark).is_file() for mark in _MARKS):
            raise ConverterError(
                "the output folder has other things in it",
                where=str(self.target),
                why=f"Without {' or '.join(_MARKS)} it is no checkpoint, and only a checkpoint is ever overwritten",
                fix="Name an empty or a new folder.",
            )
        if not self._overwrite:
            raise ConverterError(
                "the output folder holds a checkpoint",
                where=str(self.target),
                fix="Use --overwrite to replace it, or name another folder.",
            )

    def _check_partial(self) -> None:
        if self.partial.exists() and not (self._resume or self._overwrite):
            raise ConverterError(
                "an unfinished run is there",
                where=str(self.partial),
                fix="Use --resume to go on, or --overwrite to start again.",
            )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the system says while `path` is written into a `ConverterError`."""
    try:
        yield
    except OSError as error:
        raise _disk_error(error, path) from error


def _disk_error(error: OSError, path: Path) -> ConverterError:
    if error.errno in _FULL:
        what, fix = "the disk is full", "Free some space, or choose a folder on another disk."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        what, fix = "there is no permission to write here", "Choose a folder that you own."
    else:
        what, fix = f"writing failed: {error.strerror or error}", None
    return ConverterError(what, where=str(error.filename or path), fix=fix)


def fsync(path: Path) -> None:
    """Force a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
