"""Whatever stops a command after its last block or its last training step, `--resume` goes on and loses nothing."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import stopped

from converter.errors import ResourceError
from converter.files.json_text import to_json

#: Before each process is forked: the server does not find modules of the tests, and transformers loads late.
PRELOADED = [
    "converter.healing.upgrade",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama")),
    "transformers.generation.utils",
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped.prepare(tmp_path_factory.mktemp("inputs"))


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != "metrics.jsonl")  # it has speeds
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def uninterrupted(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each command writes when nothing stops it, and what it reports."""
    found: dict[str, tuple[dict[str, bytes], Any]] = {}

    def of(command: str) -> tuple[dict[str, bytes], Any]:
        if command not in found:
            folder = link(inputs, tmp_path_factory.mktemp(command))
            report = stopped.run(command, folder)
            found[command] = contents(folder / "out"), report
        return found[command]

    return of


def told(report: Any) -> str:
    """All of a report but speeds."""
    facts = {name: value for name, value in report.to_dict().items() if name not in ("speed", "tokens_per_second")}
    return to_json(facts)


def link(inputs: Path, folder: Path) -> Path:
    for each in inputs.iterdir():
        if each.name != "done":
            (folder / each.name).symlink_to(each)
    return folder


def fails(command: str, folder: Path, point: stopped.Point) -> None:
    with pytest.raises(ResourceError, match=r"the memory is full.*goes on with --resume"):
        stopped.run(command, folder, point, stopped.fail)


def is_interrupted(command: str, folder: Path, point: stopped.Point) -> None:
    with pytest.raises(KeyboardInterrupt):
        stopped.run(command, folder, point, stopped.interrupt)


def is_killed(command: str, folder: Path, point: stopped.Point) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=stopped.run, args=(command, folder, point, stopped.kill))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("stop", [fails, is_interrupted, is_killed], ids=lambda stop: stop.__name__)
@pytest.mark.parametrize("command", stopped.COMMANDS)
def test_a_command_that_is_stopped_before_and_after_each_of_its_last_steps_goes_on(
    command: str, stop: Any, inputs: Path, uninterrupted: Any, tmp_path: Path
) -> None:
    expected, report = uninterrupted(command)
    folder, saved = link(inputs, new(tmp_path / "run")), tmp_path / "saved"
    for point in stopped.points(command):
        committed = stopped.is_committed(command, point)
        if committed:
            stopped.put_back(saved, folder)
        stop(command, folder, point)
        if not committed:
            shutil.rmtree(saved, ignore_errors=True)
            shutil.copytree(folder / ".out.partial", saved)
        elif (folder / "out").exists():
            assert contents(folder / "out") == expected  # the rename was the end of it
            if (folder / ".out.partial").exists():
                assert told(stopped.run(command, folder)) == told(report)
            assert sorted(path.name for path in folder.iterdir() if "out" in path.name) == ["out"]
    stopped.put_back(saved, folder)
    stopped.run(command, folder)
    assert contents(folder / "out") == expected
    done = (folder / "done").read_text()
    assert (done.count("b"), done.count("s")) == (stopped.COMMANDS[command].blocks, stopped.COMMANDS[command].steps)


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder
