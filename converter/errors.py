"""Errors that a user can act on: what is wrong, where, why, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConverterError(Exception):
    """Bad usage or bad input. The command line shows it as one paragraph and exits with `exit_code`.

    `what` is a full sentence. `where` names the file, tensor or recipe line, `why` the reason and
    `fix` what the user can do next; each is optional.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what, self.where, self.why, self.fix = what, where, why, fix

    def __str__(self) -> str:
        parts = [f"{self.where}: {self.what}" if self.where else self.what, self.why, self.fix]
        sentences = (part if part.endswith((".", "?", "!")) else part + "." for part in parts if part)
        return " ".join(sentence[0].upper() + sentence[1:] if n else sentence for n, sentence in enumerate(sentences))


class CheckpointError(ConverterError):
    """A checkpoint's files are damaged, incomplete, contradictory or unsafe to read."""


class UnsupportedError(ConverterError):
    """The checkpoint is sound, but its architecture is not one that this step can represent."""


class RecipeError(ConverterError):
    """A recipe or a `--set` override is wrong."""


class VerificationError(ConverterError):
    """A conversion does not compute what it must."""

    exit_code = 1


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence that names the nearest known words, for use as `fix`."""
    words = sorted(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(words)}."
