"""Commands that are stopped before or after any of their last steps, as the code lists them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import models

from converter.conversion import finish as conversion
from converter.conversion import run as conversion_run
from converter.conversion.walk import Walk
from converter.healing import finish as healing
from converter.healing import run as healing_run
from converter.healing.loop import Loop
from converter.healing.upgrade import upgrade

HEAL = ("heal.tokens=320", "heal.context=40", "heal.sequences_per_step=4", "heal.evaluate_every=1", "heal.rate=1e-3")
STEPS = 2
NAIVE = "gpt2-to-llama-naive"

WALK = (conversion_run, "AFTER_THE_WALK", conversion.AFTER_THE_WALK)
TRAINING = (healing_run, "AFTER_THE_TRAINING", healing.AFTER_THE_TRAINING)


class Command(NamedTuple):
    """A command, the lists of its last steps, and how many blocks and training steps it does."""

    run: Callable[..., Any]
    lists: tuple[tuple[Any, str, tuple[Any, ...]], ...]
    blocks: int
    steps: int


def _convert(folder: Path, **options: Any) -> Any:
    return conversion_run.convert(
        folder / "gpt2", folder / "out", text=folder / "ids.npy", recipe=NAIVE, max_shard_size="20KB", **options
    )


def _to_meta(folder: Path, **options: Any) -> Any:
    return conversion_run.convert(
        folder / "llama", folder / "out", text=folder / "ids.npy", recipe="hf-to-meta", **options
    )


def _heal(folder: Path, **options: Any) -> Any:
    texts = {"text": [folder / "ids.npy"], "overrides": HEAL}
    return healing_run.heal(
        folder / "healable", folder / "out", teacher=folder / "gpt2", starts=["random"], **texts, **options
    )


def _upgrade(folder: Path, **options: Any) -> Any:
    texts = {"text": [folder / "ids.npy"], "overrides": HEAL}
    return upgrade(folder / "gpt2", folder / "out", recipe=NAIVE, **texts, **options)


COMMANDS = {
    "convert": Command(_convert, (WALK,), 5, 0),
    "to-meta": Command(_to_meta, (WALK,), 4, 0),
    "heal": Command(_heal, (TRAINING,), 0, 2 * STEPS),  # of the model and of its control
    "upgrade": Command(_upgrade, (WALK, TRAINING), 5, STEPS),
}


class Point(NamedTuple):
    """A step of one of a command's lists, and the moment before or after it."""

    place: int
    step: int
    after: bool


def points(command: str) -> list[Point]:
    """Every moment of a command's last steps."""
    lists = COMMANDS[command].lists
    return [
        Point(place, step, after)
        for place, (_, _, steps) in enumerate(lists)
        for step in range(len(steps))
        for after in (False, True)
    ]


def is_committed(command: str, point: Point) -> bool:
    """Whether the rename lies before a point."""
    names = [step.__name__ for step in COMMANDS[command].lists[point.place][2]]
    return (point.step, point.after) >= (names.index("commit"), True)


def prepare(folder: Path) -> Path:
    """The inputs of all commands."""
    models.save(models.gpt2(), folder / "gpt2")
    models.save(models.llama(hidden_size=64, head_dim=8), folder / "llama")
    models.save(models.llama(), folder / "healable")
    models.write_ids(folder / "ids.npy")
    return folder


def fail() -> None:
    """An error that nobody expects."""
    raise MemoryError


def interrupt() -> None:
    """Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def kill() -> None:
    """No warning at all."""
    os.kill(os.getpid(), signal.SIGKILL)


def run(command: str, folder: Path, point: Point | None = None, act: Callable[[], None] = fail) -> Any:
    """Run with --resume, to the point at which something happens; `folder/done` gets a letter a block or a step."""
    with _figures_are_quick(), _counted(folder / "done"), _stopped(command, point, act):
        return COMMANDS[command].run(folder, resume=True)


@contextmanager
def _stopped(command: str, point: Point | None, act: Callable[[], None]) -> Iterator[None]:
    if point is None:
        yield
        return
    module, name, steps = COMMANDS[command].lists[point.place]

    def stopping(work: Any) -> None:
        if point.after:
            steps[point.step](work)
        act()

    changed = (*steps[: point.step], stopping, *steps[point.step + 1 :])
    with mock.patch.object(module, name, changed):
        yield


@contextmanager
def _counted(log: Path) -> Iterator[None]:
    def counted(function: Any, letter: str) -> Any:
        def noted(*arguments: Any, **options: Any) -> Any:
            with log.open("a") as file:
                file.write(letter)
            return function(*arguments, **options)

        return noted

    with (
        mock.patch.object(Walk, "_convert", counted(Walk._convert, "b")),
        mock.patch.object(Loop, "step", counted(Loop.step, "s")),
    ):
        yield


@contextmanager
def _figures_are_quick() -> Iterator[None]:
    def draw(*arguments: Any) -> None:
        place = arguments[-1]
        (place if place.suffix else place.with_suffix(".png")).write_bytes(b"drawn")

    with (
        mock.patch("converter.conversion.finish.draw_figures", draw),
        mock.patch("converter.healing.records.draw_healing", draw),
    ):
        yield


def put_back(saved: Path, folder: Path) -> None:
    """Have a command's unfinished work as it was saved."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    shutil.rmtree(folder / ".out.partial", ignore_errors=True)
    shutil.copytree(saved, folder / ".out.partial", copy_function=shutil.copy2)
