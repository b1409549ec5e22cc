"""What the commands show on the terminal: progress bars on stderr, tables on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

#: Width of what goes to a file or a pipe.
_WIDTH = 120


class Bars:
    """Progress bars, one a stage. A conversion counts bytes, an evaluation steps, a healing run tokens."""

    def __init__(self, bars: Progress, hidden: bool, of_bytes: bool) -> None:
        self._bars, self._hidden, self._of_bytes = bars, hidden, of_bytes
        self._task: Any = None
        self._name = ""
        self._done = self._total = 0

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._hidden:
            self._bars.console.print(text, highlight=False)

    def stage(self, name: str, total: int) -> None:
        """A stage of this length begins."""
        self._name, self._done, self._total = name, 0, total
        self._task = self._bars.add_task(name, total=total, figures="")

    def advance(self, amount: int) -> None:
        """So much of the stage is done."""
        self._done += amount
        self._bars.update(self._task, advance=amount, description=self._name, figures=self._figures())

    def detail(self, what: str, done: int, total: int) -> None:
        """Inside the stage something takes a while."""
        self._bars.update(self._task, description=f"{self._name}: {what}, {done} of {total}")
        if done == total:
            self.say(what)

    def begin(self, tokens: int, done: int) -> None:
        """A healing run over so many tokens begins, or goes on."""
        self._task = self._bars.add_task("heal", total=tokens, completed=done, figures="")

    def step(self, record: dict[str, float]) -> None:
        """A step of a healing run is over."""
        figures = [f"{name} {record[name]:.4f}" for name in ("loss", "kl") if name in record]
        figures.append(f"{record['tokens_per_second']:,.0f} tokens/s")
        self._bars.update(self._task, completed=record["tokens"], figures=", ".join(figures))

    def _figures(self) -> str:
        from rich.filesize import decimal

        parts = (decimal(each) if self._of_bytes else f"{each:,}" for each in (self._done, self._total))
        return "/".join(parts)


@contextmanager
def progress(hidden: bool, of_bytes: bool = True) -> Iterator[Bars]:
    """Bars where stderr is a terminal; without one, or `hidden`, only what is said, or nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
    terminal = sys.stderr.isatty()
    console = Console(stderr=True, width=None if terminal else _WIDTH)
    silent = hidden or not terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=silent, transient=True) as bars:
        yield Bars(bars, hidden, of_bytes)


def print_all(tables: Iterable[Any]) -> None:
    """Tables and lines on stdout."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    for table in tables:
        console.print(table)
