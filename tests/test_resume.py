"""A conversion that is killed at any moment leaves nothing that looks finished, and resumes to the same bytes."""

import json
import subprocess
import sys
import time

import models
import pytest

from converter import convert
from converter.errors import ConverterError
from converter.files.writer import CheckpointWriter

OPTIONS = {"recipe": "gpt2-to-llama-naive", "max_shard_size": "20KB"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return models.save(models.gpt2(), tmp_path_factory.mktemp("model") / "source")


@pytest.fixture(scope="module")
def uninterrupted(source, text, tmp_path_factory):
    """The files of a run that nobody killed."""
    target = tmp_path_factory.mktemp("whole") / "out"
    convert(source, target, text=[text], **OPTIONS)
    return contents(target)


def contents(folder):
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


class Killed(BaseException):
    """Stands for SIGKILL: like an interrupt, it is caught by nobody on the way."""


@pytest.mark.parametrize("writes", [0, 1, 20, 50])
def test_resuming_after_a_kill_at_any_tensor_gives_the_uninterrupted_bytes(
    source, text, uninterrupted, tmp_path, monkeypatch, writes
):
    target = tmp_path / "killed" / "out"
    write, count = CheckpointWriter.write, 0

    def failing(self, name, tensor):
        nonlocal count
        if count == writes:
            raise Killed
        count += 1
        write(self, name, tensor)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointWriter, "write", failing)
        with pytest.raises(Killed):
            convert(source, target, text=[text], **OPTIONS)
    assert not target.exists()
    convert(source, target, text=[text], resume=True, **OPTIONS)
    assert contents(target) == uninterrupted


def test_a_real_sigkill_leaves_no_output_and_resumes(source, text, uninterrupted, tmp_path):
    target = tmp_path / "killed" / "out"
    command = [sys.executable, "-m", "converter", "convert", str(source), str(target), "--text", str(text), "--resume"]
    command += ["--recipe", OPTIONS["recipe"], "--max-shard-size", OPTIONS["max_shard_size"], "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    journal = target.parent / ".out.partial" / "work" / "walk" / "state.json"
    while not journal.exists() and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert not target.exists()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert contents(target) == uninterrupted


def test_an_unfinished_conversion_is_neither_overwritten_nor_mixed_with_another(source, text, tmp_path, monkeypatch):
    target = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointWriter, "finish", lambda self: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            convert(source, target, text=[text], **OPTIONS)
    with pytest.raises(ConverterError, match="unfinished run"):
        convert(source, target, text=[text], **OPTIONS)
    with pytest.raises(ConverterError, match=r"gelu_to_swiglu.units \(1 then, 2 now\)"):
        convert(source, target, text=[text], resume=True, overrides=["gelu_to_swiglu.units=2"], **OPTIONS)
    convert(source, target, text=[text], resume=True, **OPTIONS)
    report = json.loads((target / "conversion.json").read_text())
    assert report["recipe"] == "gpt2-to-llama-naive"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_error_of_the_input_leaves_nothing_behind(source, text, tmp_path):
    with pytest.raises(ConverterError):
        convert(source, tmp_path / "out", text=[tmp_path / "absent.txt"], **OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == []
