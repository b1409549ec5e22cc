"""A folder that appears complete or not at all, and whose unfinished work is never lost.

Everything lies in a hidden sibling, `.<name>.partial`, until it is done:

    .<name>.partial/result    what becomes the target, by one rename
    .<name>.partial/work      what a run needs in order to go on: journals, snapshots, intermediate files

A kill at any moment leaves either no target, or the old one, or the new one. The rename is the commit: `work` without
`result` is what a finished run had no time to remove.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from converter.errors import CheckpointError, ConverterError, ResourceError
from converter.files.record import RECORD

#: A folder with one of these is a checkpoint, and may be replaced by another.
_MARKS = ("config.json", RECORD)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_RESULT, _WORK = "result", "work"
#: Longer values of a fingerprint are digests, which tell a reader nothing.
_SHORT = 60


class OutputFolder:
    """Context manager: write into `partial`, then `commit()` and `clear()`.

    `inputs` are all files and folders that the command reads: none of them may be touched by its output. With
    `resume` the work of an earlier run is taken over where there is some, which `resumed` tells; `finished` tells that
    it was complete but for the clean-up. An exception removes what is there, unless it was resumed or `keep` was
    called; an interrupt keeps it, as a kill would. Raises `ConverterError` before anything is written, where the
    target must not be touched.
    """

    def __init__(
        self,
        target: Path,
        overwrite: bool = False,
        resume: bool = False,
        *,
        inputs: Iterable[str | os.PathLike[str]] = (),
    ) -> None:
        self.target = target.resolve()  # through a link, so that the rename stays on one disk
        if not self.target.name:
            raise ConverterError("the output folder is the root", where=str(target), fix="Name a folder of its own.")
        self.root, self._replaced, self._removed = (
            self.target.with_name(f".{self.target.name}.{end}") for end in ("partial", "replaced", "removed")
        )
        self.partial, self.work = self.root / _RESULT, self.root / _WORK
        self._overwrite, self._resume, self._inputs = overwrite, resume, tuple(inputs)
        self._noted = self._kept = self.resumed = self._committed = False
        self.finished = resume and self.work.exists() and not self.partial.exists() and self.target.is_dir()
        self._made_parents: list[Path] = []

    def check(self) -> None:
        """Raise where the target must not be touched; nothing is written."""
        self._check_place()
        if not self.finished:
            self._check_target()
            self._check_partial()

    def __enter__(self) -> OutputFolder:
        self._check_place()
        with disk_errors(self.target.parent):
            if self._replaced.exists() and not self.target.exists():  # killed between the renames of a commit
                self._replaced.rename(self.target)
            shutil.rmtree(self._removed, ignore_errors=True)
            if not self.finished:
                self._begin()
        return self

    def _begin(self) -> None:
        """Take over an earlier run's work, or start without any."""
        self._check_target()
        self._check_partial()
        if self.root.exists() and not (self._resume and self.partial.exists()):
            self._remove()
        self._made_parents = [parent for parent in self.target.parents if not parent.exists()]
        self.resumed = self._kept = self.partial.exists()
        for file in self.root.rglob("*") if self.resumed else ():
            if file.is_symlink() or not (file.is_file() or file.is_dir()):
                raise damaged_work(file, ValueError("it is a link, a pipe or a device, and would be written through"))
        for folder in (self.partial, self.work):  # in this order: see `finished`
            folder.mkdir(parents=True, exist_ok=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        told = _told(error, self.partial) if error is not None else None
        refused = isinstance(told or error, ConverterError) and not isinstance(told or error, ResourceError)
        self._kept |= self._noted and error is not None and not refused
        interrupted = error is not None and not isinstance(error, Exception)
        if not (self._committed or self.finished or self._kept or interrupted):
            shutil.rmtree(self.root, ignore_errors=True)
            with suppress(OSError):
                for parent in self._made_parents:
                    parent.rmdir()
        if error is None:
            if self._committed or self.finished:
                self.clear()
            return
        kept = f"What is finished is kept in {self.root}: the same command goes on with --resume"
        if self._kept and isinstance(shown := told or error, ConverterError):
            shown.kept = kept
        elif self._kept and isinstance(error, KeyboardInterrupt):
            error.args = (kept,)
        if told is not None:
            raise told from error

    def keep(self, unless_refused: bool = False) -> None:
        """There is work that is worth resuming: no error removes it, or none but a refusal of the input.

        A refusal is a ConverterError: another input is another run, for which the work is of no use.
        """
        self._noted = True
        self._kept |= not unless_refused

    def claim(self, name: str, fingerprint: Mapping[str, Any]) -> None:
        """Note what makes two runs the same; raises ConverterError where the work that is there is of another run."""
        facts = json.loads(json.dumps(fingerprint))
        saved = self.recall(name)
        changed = [] if saved is None else [key for key in {**saved, **facts} if saved.get(key) != facts.get(key)]
        if changed and self.finished:  # by another run: its target stands, and this one starts by itself
            self.finished = False
            self._begin()
        elif changed:
            told = ", ".join(_difference(key, saved.get(key), facts.get(key)) for key in changed)
            raise ConverterError(
                f"the unfinished run is another one: it differs in {told}",
                where=str(self.root),
                fix="Repeat the command that was interrupted, or start again with --overwrite",
            )
        if not self.finished:
            self.note(name, facts)

    def note(self, name: str, value: Any) -> None:
        """Keep plain values for a run that goes on, replaced in one step."""
        with disk_errors(self.work):
            write_whole(self.work / f"{name}.json", value)

    def recall(self, name: str) -> Any:
        """What was noted under this name; None where nothing was."""
        path = self.work / f"{name}.json"
        return read_whole(path) if os.path.lexists(path) else None

    def check_space(self, nbytes: int) -> None:
        """Raise now if the disk cannot hold `nbytes`, what a resumed run wrote already included."""
        there = sum(file.lstat().st_blocks * 512 for file in self.root.rglob("*"))
        free = shutil.disk_usage(self.root).free
        if nbytes > free + there:
            raise ConverterError(
                f"the result needs {nbytes / 1e9:.2f} GB and {free / 1e9:.2f} GB are free",
                where=str(self.target.parent),
                fix="Free some space, or choose a folder on another disk.",
            )

    def commit(self) -> None:
        """Make what was written the target. What it replaces is put back if that fails."""
        self.keep()  # the work is done: whatever fails now must not cost it
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

    def clear(self) -> None:
        """Remove what the run went on from: the target is there."""
        if self.root.exists():
            self._remove()

    def _remove(self) -> None:
        """Remove all unfinished work: first its name, so that half of it is never taken for work."""
        shutil.rmtree(self._removed, ignore_errors=True)
        with disk_errors(self.root):
            self.root.rename(self._removed)
        shutil.rmtree(self._removed, ignore_errors=True)

    def _check_place(self) -> None:
        """The target is apart from all inputs and is not where we stand."""
        refuse_inputs((self.target, self.root, self._replaced, self._removed), self._inputs)
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
        if not self.root.exists():
            return
        if not self.root.is_dir() or {path.name for path in self.root.iterdir()} - {_RESULT, _WORK}:
            raise ConverterError(
                "the place for unfinished work has other things in it",
                where=str(self.root),
                fix="Move them away, or name another output folder.",
            )
        if self.partial.exists() and not (self._resume or self._overwrite):
            raise ConverterError(
                "an unfinished run is there",
                where=str(self.root),
                fix="Use --resume to go on, or --overwrite to start again.",
            )


def refuse_inputs(outputs: Iterable[Path], inputs: Iterable[str | os.PathLike[str]]) -> None:
    """Raise ConverterError where an output is an input, holds one or lies in one, links followed.

    What is no file or folder here, such as the name of a dataset on the Hub, is left out.
    """
    for given in inputs:
        if not (path := Path(given)).exists():
            continue
        whole = Path(os.path.realpath(path))
        linked = (
            {Path(os.path.realpath(link)) for link in whole.rglob("*") if link.is_symlink()}
            if whole.is_dir()
            else set()
        )
        for output in outputs:
            holds = [place for place in (whole, *linked) if output == place or output in place.parents]
            if holds or whole in output.parents:
                raise ConverterError(
                    f"the output folder and the input {given} are the same, or one holds the other",
                    where=str(output),
                    why=f"The input's files are in {holds[0]}" if holds and holds[0] != path else None,
                    fix="Choose a folder beside all inputs.",
                )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the system says while `path` is written into a `ConverterError`."""
    try:
        yield
    except OSError as error:
        raise _disk_error(error, path) from error


def _told(error: BaseException, path: Path) -> ResourceError | None:
    """A full disk and a full memory as an error that a user can do something about."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return _disk_error(error, path)
    words = str(error).lower()
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in words or "can't allocate memory" in words)
    ):
        what = "the memory is full"
        why = str(error).strip().splitlines()[0] if str(error).strip() else None
        return ResourceError(what, where=str(path), why=why, fix="Close other programs, or use a larger machine.")
    return None


def _difference(key: str, then: Any, now: Any) -> str:
    values = [str(value) for value in (then, now)]
    return key if max(map(len, values)) > _SHORT else f"{key} ({values[0]} then, {values[1]} now)"


def damaged_work(path: Path, error: BaseException) -> CheckpointError:
    """What is wrong where the work of an unfinished run cannot be read."""
    return CheckpointError(
        "the record of an unfinished run is damaged",
        where=str(path),
        why=(str(error).strip().splitlines() or [type(error).__name__])[0],
        fix="Start again with --overwrite",
    )


def write_whole(path: Path, value: Any) -> None:
    """Replace a small file of plain values in one step, forced to the disk: a kill leaves the old one or the new one.

    The sha256 of its values is in it: what a bad disk or another program changes there is not believed.
    """
    text = json.dumps(value)
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(f'{{"sha256": "{_sha256(text)}", "values": {text}}}\n', encoding="utf-8")
    fsync(fresh)
    fresh.replace(path)
    fsync(path.parent)


def read_whole(path: Path) -> Any:
    """What `write_whole` wrote; raises CheckpointError where it is anything else."""
    try:
        if not path.is_file():
            raise ValueError("it is no file")
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["sha256"] != _sha256(json.dumps(content["values"])):
            raise ValueError("its values are not those that were written")
        return content["values"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise damaged_work(path, error) from error


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _disk_error(error: OSError, path: Path) -> ResourceError:
    if error.errno in _FULL:
        what, fix = "the disk is full", "Free some space, or choose a folder on another disk."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        what, fix = "there is no permission to write here", "Choose a folder that you own."
    else:
        what, fix = f"writing failed: {error.strerror or error}", None
    return ResourceError(what, where=str(error.filename or path), fix=fix)


def fsync(path: Path) -> None:
    """Force a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
