"""Whatever stops a command after its last block or its last training step, `--resume` goes on and loses nothing."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
from pathlib import Path
from typing import Any

import models
import pytest
import stopped

from converter import convert, heal, upgrade
from converter.conversion.recipe import recipe_text
from converter.errors import CheckpointError, ConverterError, ResourceError
from converter.families.llama import Llama
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


# What is refused, before anything is written


@pytest.mark.parametrize("place", ["gpt2", "healable", ".", "gpt2/inside", "linked", "link"])
def test_no_input_is_an_output(place: str, inputs: Path, tmp_path: Path) -> None:
    """Of `heal` with a teacher and a recipe: an input itself, what holds it or lies in it, a link, a link's target."""
    folder = tmp_path / "here"
    shutil.copytree(inputs, folder, symlinks=True)
    (folder / "linked").mkdir()
    (folder / "gpt2" / "model.safetensors").rename(folder / "linked" / "model.safetensors")
    (folder / "gpt2" / "model.safetensors").symlink_to(folder / "linked" / "model.safetensors")
    (folder / "linked" / "config.json").write_text("{}")
    (folder / "link").symlink_to(folder / "gpt2")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConverterError, match=r"output folder and the input \S+ are the same, or one holds the other"):
        heal(
            folder / "healable",
            folder / place,
            teacher=folder / "gpt2",
            text=[folder / "ids.npy"],
            overrides=stopped.HEAL,
            overwrite=True,
        )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("given", ["source", "text", "recipe", "eval_text"])
@pytest.mark.parametrize("command", [convert, upgrade])
def test_no_input_of_a_conversion_is_its_output(command: Any, given: str, inputs: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "gpt2", tmp_path / "out"
    shutil.copytree(inputs / "gpt2", source)
    shutil.copytree(inputs / "gpt2", target)
    options: dict[str, Any] = {"text": inputs / "ids.npy", "recipe": stopped.NAIVE, given: target / "config.json"}
    if given == "recipe":
        options["recipe"] = str(target / "config.json")
        (target / "config.json").write_text(recipe_text(stopped.NAIVE)[0])
    source = target if given == "source" else source
    options.pop("source", None)
    with pytest.raises(ConverterError, match="the same, or one holds the other"):
        command(source, target, overwrite=True, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt2", "out"]


@pytest.mark.parametrize(
    ("point", "changed", "told"),
    [
        (stopped.Point(0, 0, False), {"recipe": "gpt2-to-llama"}, "recipe"),
        (
            stopped.Point(1, 0, False),
            {"overrides": (*stopped.HEAL, "gelu_to_swiglu.units=2")},
            r"units \(1 then, 2 now\)",
        ),
        (
            stopped.Point(1, 0, False),
            {"overrides": (*stopped.HEAL, "heal.rate=2e-3")},
            r"rate \(0.001 then, 0.002 now\)",
        ),
        (stopped.Point(1, 0, False), {"eval_text": "gpt2/other.npy"}, "held-out text"),
        (stopped.Point(1, 0, False), {"dtype": "bfloat16"}, r"dtype \(float32 then, bfloat16 now\)"),
    ],
)
def test_an_upgrade_goes_on_with_the_same_settings_only(
    point: stopped.Point, changed: dict[str, Any], told: str, inputs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(inputs, folder)
    models.write_ids(folder / "gpt2" / "other.npy", seed=7)
    fails("upgrade", folder, point)
    given: dict[str, Any] = {"text": [folder / "ids.npy"], "overrides": stopped.HEAL, "recipe": stopped.NAIVE}
    if "eval_text" in changed:
        changed = {"eval_text": [folder / changed["eval_text"]]}
    with pytest.raises(ConverterError, match=f"the unfinished run is another one: it differs in .*{told}"):
        upgrade(folder / "gpt2", folder / "out", resume=True, **{**given, **changed})
    assert not (folder / "out").exists()


def test_an_upgrade_goes_on_with_other_settings_that_change_nothing(inputs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(inputs, folder)
    fails("upgrade", folder, stopped.Point(1, 0, False))
    options: dict[str, Any] = {"text": [folder / "ids.npy"], "recipe": stopped.NAIVE, "resume": True}
    upgrade(folder / "gpt2", folder / "out", overrides=(*stopped.HEAL, "heal.micro_batch=40"), **options)
    assert "micro_batch: 40" in (folder / "out" / "recipe.yaml").read_text()


def test_an_upgrade_names_a_generation_config_that_is_not_sound_before_it_converts(
    inputs: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(inputs / "gpt2", source)
    (source / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": false}')
    with pytest.raises(CheckpointError, match=r"source/generation_config.json: the generation config is not sound"):
        upgrade(source, tmp_path / "out", text=[inputs / "ids.npy"], recipe=stopped.NAIVE)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [(["heal.kl=0"], "nothing to learn from"), (["heal.rope_theta=0.5"], "rope_theta"), (["heal.rate=nan"], "rate")],
)
def test_an_upgrade_refuses_settings_of_the_healing_before_it_converts(
    overrides: list[str], told: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("converter.healing.upgrade._convert", None)
    with pytest.raises(ConverterError, match=told):
        upgrade(inputs / "gpt2", tmp_path / "out", text=inputs / "ids.npy", recipe=stopped.NAIVE, overrides=overrides)
    with pytest.raises(ConverterError, match="cannot be healed as it is"):
        upgrade(inputs / "llama", tmp_path / "out", text=inputs / "ids.npy", recipe="hf-to-meta")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("field", "value"), [("rms_norm_eps", 1e-3), ("rope_parameters", {"rope_type": "yarn"})])
def test_the_config_to_be_written_is_read_back_before_any_work(
    field: str, value: Any, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Llama.write_config
    monkeypatch.setattr(Llama, "write_config", lambda self, spec: write(self, spec) | {field: value})
    with pytest.raises(ConverterError, match=r"the config.json to be written: "):
        convert(inputs / "gpt2", tmp_path / "out", text=inputs / "ids.npy", recipe=stopped.NAIVE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damaged", ["walk/state.json", "conversion.json", "walk/streams-4.safetensors"])
def test_a_damaged_record_of_a_run_is_told(damaged: str, inputs: Path, tmp_path: Path) -> None:
    folder = link(inputs, new(tmp_path / "run"))
    fails("convert", folder, stopped.Point(0, 0, False))
    file = folder / ".out.partial" / "work" / damaged
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"the record of an unfinished run is damaged.*--overwrite"):
        stopped.run("convert", folder)


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder
