"""What the commands show on the terminal: progress bars on stderr, tables on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

#: Width of what goes to a file or a pipe.
_WIDTH = 120
#: Characters of a text that are shown; the middle of a longer one is left out.
_LONGEST = 2000


def printable(text: str) -> str:
    """What stands in users' files, shown as it is: control characters, which could steer a terminal, are escaped."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 2 :]}"
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def plain_console(**options: Any) -> Console:
    """A console that prints every text as it is: names of users' files may look like rich's markup, "[old] gpt2"."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **options)


class Progress:
    """What a caller may show while something runs. This one shows nothing; `Bars` is the terminal's."""

    def say(self, text: str) -> None:
        """A line that should stay."""

    def stage(self, name: str, total: int, done: int = 0, unit: str = "bytes") -> None:
        """A stage of this length begins, or goes on from what is done."""

    def advance(self, amount: int, figures: Mapping[str, float] | None = None) -> None:
        """So much more of the stage is done; `figures` are those of the last training step."""

    def detail(self, what: str, done: int, total: int) -> None:
        """Inside the stage, something takes a while: what, how far it is, and how long it is."""


class Bars(Progress):
    """Progress bars, one a stage."""

    def __init__(self, bars: RichProgress, hidden: bool) -> None:
        self._bars, self._hidden = bars, hidden
        self._task: Any = None
        self._name = self._unit = ""
        self._done = self._total = 0

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._hidden:
            self._bars.console.print(printable(text))

    def stage(self, name: str, total: int, done: int = 0, unit: str = "bytes") -> None:
        """A new bar."""
        name = printable(name)
        self._name, self._done, self._total, self._unit = name, done, total, unit
        self._task = self._bars.add_task(name, total=total, completed=done, figures="")

    def advance(self, amount: int, figures: Mapping[str, float] | None = None) -> None:
        """Move the bar, with how far it is or with the figures of the step beside it."""
        self._done += amount
        shown = self._how_far() if figures is None else _of_a_step(figures)
        self._bars.update(self._task, completed=self._done, description=self._name, figures=shown)

    def detail(self, what: str, done: int, total: int) -> None:
        """The bar's name tells it, and a line stays when it is over."""
        self._bars.update(self._task, description=f"{self._name}: {what}, {done} of {total}")
        if done == total:
            self.say(what)

    def _how_far(self) -> str:
        from rich.filesize import decimal

        return "/".join(decimal(n) if self._unit == "bytes" else f"{n:,}" for n in (self._done, self._total))


def _of_a_step(figures: Mapping[str, float]) -> str:
    shown = [f"{name} {figures[name]:.4f}" for name in ("loss", "kl") if name in figures]
    return ", ".join([*shown, f"{figures['tokens_per_second']:,.0f} tokens/s"])


@contextmanager
def progress(hidden: bool) -> Iterator[Bars]:
    """Bars where stderr is a terminal; without one, or `hidden`, only what is said, or nothing."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    name, figures = (TextColumn(field, markup=False) for field in ("{task.description}", "{task.fields[figures]}"))
    columns = (name, BarColumn(), figures)
    terminal = sys.stderr.isatty()
    console = plain_console(stderr=True, width=None if terminal else _WIDTH)
    silent = hidden or not terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=silent, transient=True) as bars:
        yield Bars(bars, hidden)


def print_all(tables: Iterable[Any]) -> None:
    """Tables and lines on stdout."""
    console = plain_console(width=None if sys.stdout.isatty() else _WIDTH)
    for table in tables:
        console.print(table)
