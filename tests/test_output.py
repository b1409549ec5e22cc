"""The output folder: complete or not there, and never in the place of something else."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from converter.errors import CheckpointError, ConverterError
from converter.files.output import OutputFolder, read_whole, refuse_inputs, write_whole
from converter.files.safetensors import Layout, total_size
from converter.files.writer import CheckpointWriter


def make_checkpoint(folder: Path, content: str = "old") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(content)
    return folder


def convert(target: Path, overwrite: bool = False, resume: bool = False, inputs: Sequence[Path] = ()) -> None:
    with OutputFolder(target, overwrite, resume, inputs=inputs) as output:
        (output.partial / "config.json").write_text("new")
        output.commit()


def stop_half_way(target: Path, error: BaseException, *, keep: bool = False, resume: bool = False) -> None:
    with OutputFolder(target, resume=resume) as output:
        (output.partial / "half").touch()
        if keep:
            output.keep()
        raise error


def refusal(target: Path, **options: object) -> str:
    before = sorted(target.parent.rglob("*"))
    with pytest.raises(ConverterError) as caught:
        convert(target, **options)  # type: ignore[arg-type]
    assert sorted(target.parent.rglob("*")) == before
    return str(caught.value)


def content(target: Path) -> str:
    """What the target says; nothing else is beside it."""
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    return (target / "config.json").read_text()


def test_nothing_is_at_the_target_before_the_commit(tmp_path: Path) -> None:
    target = tmp_path / "models" / "out"
    with OutputFolder(target) as output:
        assert output.partial == tmp_path / "models" / ".out.partial" / "result"
        assert not target.exists()
        (output.partial / "config.json").write_text("new")
        output.commit()
    assert content(target) == "new"


def test_an_empty_target_is_fine(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert(tmp_path / "out")
    assert content(tmp_path / "out") == "new"


def test_a_checkpoint_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "out")
    message = refusal(target)
    assert str(target) in message
    assert "--overwrite" in message
    convert(target, overwrite=True)
    assert content(target) == "new"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    target = tmp_path / "home"
    target.mkdir()
    (target / "diary.txt").write_text("dear diary")
    message = refusal(target, overwrite=overwrite)
    assert str(target) in message
    assert "only a checkpoint is ever overwritten" in message


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("text")
    assert "the output is a file" in refusal(tmp_path / "out", overwrite=True)


@pytest.mark.parametrize("place", ["models/source", "models/source/out", "models", "models/.source.partial/../source"])
def test_the_target_is_apart_from_the_source(tmp_path: Path, place: str) -> None:
    source = make_checkpoint(tmp_path / "models" / "source")
    message = refusal(tmp_path / place, overwrite=True, inputs=[source])
    assert str(source) in message
    assert "the same, or one holds the other" in message


def test_a_link_to_the_source_is_the_source(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    (tmp_path / "link").symlink_to(source)
    assert "the same" in refusal(tmp_path / "link", overwrite=True, inputs=[source])


def test_the_source_is_not_taken_for_an_unfinished_conversion(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / ".out.partial")
    assert "the same" in refusal(tmp_path / "out", overwrite=True, inputs=[source])


def test_the_current_directory_is_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    assert "current directory" in refusal(tmp_path / "out")


def test_the_root_is_no_target() -> None:
    with pytest.raises(ConverterError, match="the root"):
        OutputFolder(Path("/"), overwrite=True)


def test_an_unfinished_conversion_is_resumed_or_started_again(tmp_path: Path) -> None:
    (tmp_path / ".out.partial" / "result").mkdir(parents=True)
    (tmp_path / ".out.partial" / "result" / "half").touch()
    message = refusal(tmp_path / "out")
    assert "unfinished run" in message
    assert "--resume to go on, or --overwrite to start again" in message
    with OutputFolder(tmp_path / "out", resume=True) as output:
        assert output.resumed
        assert (output.partial / "half").exists()
        output.keep()
    with OutputFolder(tmp_path / "out", overwrite=True) as output:
        assert not output.resumed
        assert not list(output.partial.iterdir())


def test_an_ordinary_error_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        stop_half_way(tmp_path / "new" / "out", RuntimeError())
    assert not list(tmp_path.iterdir())


def test_leaving_without_a_commit_leaves_nothing_behind(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("reason", ["asked", "interrupted", "resumed"])
def test_work_worth_resuming_is_kept(tmp_path: Path, reason: str) -> None:
    if reason == "resumed":
        (tmp_path / ".out.partial" / "result").mkdir(parents=True)
    error = KeyboardInterrupt() if reason == "interrupted" else RuntimeError()
    with pytest.raises(type(error)):
        stop_half_way(tmp_path / "out", error, keep=reason == "asked", resume=reason == "resumed")
    assert (tmp_path / ".out.partial" / "result" / "half").exists()
    assert not (tmp_path / "out").exists()


def test_a_failing_rename_restores_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_checkpoint(tmp_path / "out")
    rename = Path.rename

    def fail_once(self: Path, to: Path) -> Path:
        if self.name == "result":
            raise OSError(errno.EBUSY, "busy")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(ConverterError, match="writing failed: busy"):
        convert(target, overwrite=True)
    assert (target / "config.json").read_text() == "old"
    assert (tmp_path / ".out.partial" / "result" / "config.json").read_text() == "new"  # nothing of the work is lost
    monkeypatch.undo()
    convert(target, overwrite=True, resume=True)
    assert content(target) == "new"


def test_a_kill_between_the_two_renames_is_undone_by_the_next_run(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / ".out.replaced")
    (tmp_path / ".out.partial" / "result").mkdir(parents=True)
    with pytest.raises(ConverterError, match="holds a checkpoint"):
        convert(tmp_path / "out", resume=True)
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    convert(tmp_path / "out", overwrite=True, resume=True)
    assert content(tmp_path / "out") == "new"


def test_a_target_that_was_filled_meanwhile_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with OutputFolder(target, overwrite=True) as output:
        target.mkdir()
        (target / "diary.txt").write_text("dear diary")
        with pytest.raises(ConverterError, match="other things in it"):
            output.commit()
    assert (target / "diary.txt").exists()
    assert output.partial.exists()


# A full disk, no permission, a kill


def test_too_little_space_is_told_before_the_work(tmp_path: Path) -> None:
    with (
        pytest.raises(ConverterError, match=r"needs 1000000\.00 GB and .* GB are free"),
        OutputFolder(tmp_path / "out") as output,
    ):
        output.check_space(10**15)
    assert not list(tmp_path.iterdir())


def test_a_resumed_conversion_has_its_space_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout: dict[str, Layout] = {"w": ((1_000_000,), "float32")}
    usage = shutil.disk_usage(tmp_path)
    with OutputFolder(tmp_path / "out") as output:
        CheckpointWriter(output.partial, layout, 10**9)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
        output.check_space(total_size(layout))


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ConverterError, match="the disk is full") as caught:
        stop_half_way(tmp_path / "out", OSError(errno.ENOSPC, "No space left on device"))
    assert str(tmp_path / ".out.partial") in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(ConverterError, match="no permission to write here") as caught:
        convert(tmp_path / "out")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_killed_half_way_and_resumed(tmp_path: Path) -> None:
    tensors = {f"{name}.weight": torch.randn(3, 5) for name in "abcd"}
    torch.save(tensors, tmp_path / "tensors.bin")
    code = """
        import os, signal, sys
        from pathlib import Path
        import torch
        from converter.files.output import OutputFolder
        from converter.files.writer import CheckpointWriter

        folder = Path(sys.argv[1])
        tensors = torch.load(folder / "tensors.bin")
        with OutputFolder(folder / "out", resume=True) as output:
            done = (output.recall("written") if output.resumed else None) or {}
            layout = {name: ((3, 5), "float32") for name in tensors}
            writer = CheckpointWriter(output.partial, layout, 120, resume=True, already_written=done)
            for name in tensors:
                if name == "d.weight" and not output.resumed:
                    writer.sync()
                    output.note("written", writer.written)
                    os.kill(os.getpid(), signal.SIGKILL)
                elif name not in done and (output.resumed or name != "b.weight"):
                    writer.write(name, tensors[name])
            writer.finish()
            output.commit()
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.partial").is_dir()
    subprocess.run(command, check=True)
    assert not (tmp_path / ".out.partial").exists()
    found = {
        name: tensor for file in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_link_to_itself_in_an_input_is_no_obstacle(tmp_path):
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "loop").symlink_to("loop")
    refuse_inputs([tmp_path / "output"], [tmp_path / "input"])


@pytest.mark.parametrize(
    "damage", [lambda text: text.replace("1.5", "1.6"), lambda text: "[" * 10_000, lambda text: "{}"]
)
def test_the_work_of_an_unfinished_run_is_believed_only_as_it_was_written(damage, tmp_path):
    path = tmp_path / "state.json"
    write_whole(path, {"rate": 1.5, "names": ["\ud800", "é"], "nan": float("nan")})
    assert read_whole(path)["names"] == ["\ud800", "é"]
    path.write_text(damage(path.read_text()))
    with pytest.raises(CheckpointError, match="the record of an unfinished run is damaged"):
        read_whole(path)


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_nothing_is_written_through_what_took_the_place_of_a_file(kind: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    with OutputFolder(tmp_path / "out") as output:
        output.keep()
    place = output.partial / "model.safetensors"
    os.mkfifo(place) if kind == "pipe" else place.symlink_to(outside)
    with (
        pytest.raises(CheckpointError, match="a link, a pipe or a device"),
        OutputFolder(tmp_path / "out", resume=True),
    ):
        pass
    assert outside.read_text() == "mine"
