"""Errors that a user can act on: what is wrong, where, why, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: Characters of a part of a message; the middle of a longer one, which quotes the input, is left out.
_LONGEST = 800


def paragraph(*parts: str | None) -> str:
    """Parts as sentences on one line, each but the first with a capital; what the input puts in is made printable."""
    told = filter(None, (printable(part) for part in parts if part))
    sentences = (part if part.endswith((".", "?", "!")) else part + "." for part in told)
    return " ".join(sentence[0].upper() + sentence[1:] if n else sentence for n, sentence in enumerate(sentences))


def printable(text: str) -> str:
    """One line of a length that people read; control characters, which could steer a terminal, as Python escapes."""
    text = " ".join(text.split())
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 2 :]}"
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class ConverterError(Exception):
    """Bad usage or bad input. The command line shows it as one paragraph and exits with `exit_code`.

    `what` is a full sentence. `where` names the file, tensor, recipe line or option; without one the command line names
    the command. `why` is the reason and `fix` what the user can do next: one of them at least (tests/test_messages.py).
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what, self.where, self.why, self.fix = what, where, why, fix
        #: What is left of the work, and how to go on with it.
        self.kept: str | None = None

    def __str__(self) -> str:
        return paragraph(f"{self.where}: {self.what}" if self.where else self.what, self.why, self.fix, self.kept)


@contextmanager
def at(where: str) -> Iterator[None]:
    """Gives an error that is raised inside, and that does not say where it is, this place."""
    try:
        yield
    except ConverterError as error:
        error.where = error.where or where
        raise


class CheckpointError(ConverterError):
    """A checkpoint's files are damaged, incomplete, contradictory or unsafe to read.

    `tensor` names the tensor at fault, where it is one.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        tensor: str | None = None,
        why: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(what, where=where, why=why, fix=fix)
        self.tensor = tensor


#: Where the rules about a checkpoint bring what they find: `raise_fault`, or a list's `append`.
OnFault = Callable[[ConverterError], None]


def raise_fault(fault: ConverterError) -> None:
    """Stop at the first fault."""
    raise fault


@contextmanager
def reporting(on_fault: OnFault, path: Path) -> Iterator[None]:
    """Bring a fault that is raised inside to `on_fault`, and what the system says about reading `path`."""
    try:
        yield
    except CheckpointError as fault:
        on_fault(fault)
    except OSError as error:
        what = f"the file cannot be read: {error.strerror or error}"
        fix = "Check the path, its permissions and the disk"
        on_fault(CheckpointError(what, where=str(error.filename or path), fix=fix))


class UnfinishedSwapError(CheckpointError):
    """Rows are being moved in place, or were when a swap was stopped."""


class UnsupportedError(ConverterError):
    """The checkpoint is sound, but its architecture is not one that this step can represent."""


class RecipeError(ConverterError):
    """A recipe or a `--set` override is wrong."""


class ResourceError(ConverterError):
    """The machine is out of disk or memory, or the disk refuses: nothing is wrong with the input."""


class VerificationError(ConverterError):
    """A conversion does not compute what it must."""

    exit_code = 1


#: Known words that a message lists at most.
_LISTED = 12


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence that names the nearest known word, or some of them, for use as `fix`."""
    words = sorted(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    if near:
        return f"Did you mean '{near[0]}'?"
    more = f" and {len(words) - _LISTED} more" if len(words) > _LISTED else ""
    return f"Known: {', '.join(words[:_LISTED])}{more}."


def near_spelling(word: str, known: Iterable[str], letters: int = 2) -> str | None:
    """A sentence that names the known word which differs by one or two letters; None without such a word."""
    close = (each for each in known if abs(len(each) - len(word)) <= letters)
    distance, nearest = min(((_letters_apart(word, each), each) for each in close), default=(letters + 1, ""))
    return f"Did you mean '{nearest}'?" if distance <= letters else None


def _letters_apart(a: str, b: str) -> int:
    """Letters to put in, take out or replace to turn one word into the other (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y)))
    return row[-1]
