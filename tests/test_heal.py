"""Healing on one process: it learns, it stops and goes on to the same bits, and what it writes is sound."""

from __future__ import annotations

import importlib
import json
import logging
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
import torch
from accelerate.utils import DistributedType

from converter.conversion.recipe import Recipe, load_recipe, parse_recipe
from converter.conversion.settings import HealSettings
from converter.errors import CheckpointError, ConverterError, RecipeError, UnsupportedError
from converter.families.opened import SourceModel
from converter.files.output import read_whole, write_whole
from converter.healing.export import export_weights
from converter.healing.launch import check_launch
from converter.healing.loop import InterruptedRunError
from converter.healing.optimizer import parameter_groups, rate_at
from converter.healing.recorded import RecordedTeacher, _digests
from converter.healing.run import heal
from converter.healing.schedules import ramp, set_theta, theta_of
from converter.healing.student import Teacher
from converter.healing.trainee import Trainee
from converter.healing.zero import check_config, zero_plugin
from converter.losses import _REGISTRY
from converter.measure.models import load_plain
from converter.show.progress import Progress
from converter.show.tables import heal_tables

STEPS, TOKENS = 12, 160  # of 4 sequences of 40 tokens each
SHORT = (
    *("heal.tokens=1920", "heal.context=40", "heal.sequences_per_step=4", "heal.rate=3e-3"),
    *("heal.evaluate_every=4", "heal.save_every=3", "heal.keep=3"),
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return models.save(models.gpt2(), tmp_path_factory.mktemp("teacher") / "gpt2")


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    return models.save(models.llama(), tmp_path_factory.mktemp("converted") / "llama")


@pytest.fixture
def run(converted, teacher, text, tmp_path):
    """Heal the test model into a folder of its own: `run("name", "heal.x=y", ..., option=...)`."""

    def run(name, *overrides, **options):
        given = {"teacher": teacher, "text": [text]} | options
        return heal(given.pop("converted", converted), tmp_path / name, overrides=[*SHORT, *overrides], **given)

    return run


@pytest.fixture(scope="module")
def healed(converted, teacher, text, tmp_path_factory):
    """One finished run, and its report."""
    target = tmp_path_factory.mktemp("healed") / "model"
    return heal(converted, target, teacher=teacher, text=[text], overrides=SHORT)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = SourceModel.open(folder).checkpoint
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def same_weights(a: Path, b: Path) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def training_losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


class StopAt(Progress):
    """Does something when a step is over."""

    def __init__(self, step, act):
        self._step, self._act = step, act

    def stage(self, name, total, done=0, unit="bytes"):
        self.done = done

    def advance(self, amount, figures=None):
        if figures["step"] == self._step:
            self._act()


def kill():
    raise KeyboardInterrupt


def test_healing_brings_the_model_nearer_to_its_source(healed):
    kls = [each.kl for each in healed.evaluations]
    assert [each.step for each in healed.evaluations] == [0, 4, 8, 12]
    assert kls[-1] < 0.8 * kls[0]
    assert healed.after.total.kl == pytest.approx(healed.best.kl, rel=1e-4)
    assert healed.before.total.kl == pytest.approx(kls[0], rel=1e-4)


def test_the_output_is_a_plain_checkpoint_with_its_records(healed, converted):
    target = healed.target
    assert not (target.parent / f".{target.name}.partial").exists()
    load_plain(target)
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (target, converted))
    assert {key: config[key] for key in before if key not in ("dtype", "torch_dtype")} == {
        key: value for key, value in before.items() if key not in ("dtype", "torch_dtype")
    }
    assert len(training_losses(target)) == STEPS
    record = json.loads((target / "healing.json").read_text())
    assert record["best"]["losses"]["kl"] == healed.best.kl
    assert "## Healing" in (target / "README.md").read_text()


@pytest.mark.parametrize(("step", "saved"), [(1, 0), (5, 4), (8, 6), (9, 8), (11, 9)])
def test_a_run_that_was_killed_goes_on_to_the_same_losses_and_weights(run, healed, step, saved):
    with pytest.raises(KeyboardInterrupt):
        run("again", progress=StopAt(step, kill))
    watch = StopAt(0, kill)
    report = run("again", resume=True, progress=watch)
    assert watch.done == saved * TOKENS
    assert training_losses(report.target) == training_losses(healed.target)
    assert same_weights(report.target, healed.target)
    assert report.evaluations == healed.evaluations


def test_sigterm_saves_the_step_and_stops(run, healed, tmp_path):
    with pytest.raises(InterruptedRunError, match="after step 5 of 12") as error:
        run("again", progress=StopAt(4, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert error.value.exit_code == 143
    assert not (tmp_path / "again").exists()
    watch = StopAt(0, kill)
    report = run("again", resume=True, progress=watch)
    assert watch.done == 5 * TOKENS
    assert same_weights(report.target, healed.target)


def flip(file: Path) -> None:
    """One other bit, in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda snapshot: shutil.rmtree(snapshot / "optimizer"), "optimizer state is missing"),
        (lambda snapshot: next((snapshot / "model").glob("*.distcp")).unlink(), "model state is missing"),
        (lambda snapshot: (snapshot / "state.json").write_text("{"), "record of an unfinished run is damaged"),
        (
            lambda snapshot: (snapshot.parents[1] / "result" / "metrics.jsonl").write_text("[1]\n"),
            "record of an unfinished run is damaged",
        ),
        (lambda snapshot: flip(snapshot / "random-0.pt"), "random-0 state is missing or damaged"),
        (lambda snapshot: flip(next((snapshot / "model").glob("*.distcp"))), "model state is missing or damaged"),
        (lambda snapshot: flip(snapshot / "state.json"), "record of an unfinished run is damaged"),
    ],
)
def test_a_snapshot_without_all_its_parts_is_an_error_never_a_reset(run, tmp_path, damage, message):
    with pytest.raises(KeyboardInterrupt):
        run("again", progress=StopAt(7, kill))
    damage(tmp_path / ".again.partial" / "work" / "step-00000006")
    with pytest.raises(CheckpointError, match=message):
        run("again", resume=True)


def test_a_missing_part_of_a_snapshot_is_told_without_torch_s_traceback(tmp_path, caplog):
    model = torch.nn.Linear(2, 2)
    trainee = Trainee(SimpleNamespace(num_processes=1), None, model, torch.optim.AdamW(model.parameters()), 0.0)
    trainee.save(tmp_path)
    shutil.rmtree(tmp_path / "optimizer")
    with pytest.raises(CheckpointError, match="optimizer state is missing"):
        trainee.load(tmp_path)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_snapshot_under_another_name_than_its_own_is_none(run, healed, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run("again", progress=StopAt(7, kill))
    work = tmp_path / ".again.partial" / "work"
    (work / "step-00000006").rename(work / ".step-00000006.partial")  # as a kill during its writing leaves it
    watch = StopAt(0, kill)
    report = run("again", resume=True, progress=watch)
    assert watch.done == 4 * TOKENS
    assert same_weights(report.target, healed.target)


def test_a_resumed_run_must_be_the_same_run(run, converted, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run("again", progress=StopAt(7, kill))
    with pytest.raises(ConverterError, match=r"differs in rate \(0.003 then, 0.004 now\)"):
        run("again", "heal.rate=4e-3", resume=True)
    other = models.write_ids(tmp_path / "other.npy", seed=9)
    with pytest.raises(ConverterError, match="differs in text"):
        run("again", resume=True, text=[other])
    with pytest.raises(ConverterError, match="unfinished"):
        run("again")


def test_micro_batches_change_nothing(run, healed):
    for tokens in (40, 120):  # four times one row; three rows and one
        report = run(f"by-{tokens}", f"heal.micro_batch={tokens}")
        assert training_losses(report.target) == pytest.approx(training_losses(healed.target), rel=1e-4)


def test_gradient_checkpointing_and_an_offloaded_teacher_change_nothing(run, healed):
    report = run("checkpointed", "heal.gradient_checkpointing=true", "heal.teacher=offloaded")
    assert training_losses(report.target) == pytest.approx(training_losses(healed.target), rel=1e-5)
    with pytest.raises(ConverterError, match="nobody to share the teacher with"):
        run("alone", "heal.teacher=sharded")


class Asked:
    """Counts what a recorded teacher is asked, and stops the run at one of the questions."""

    def __init__(self, monkeypatch, last=None):
        self.digests, ask = [], RecordedTeacher._ask

        def counted(teacher, model, row):
            self.digests += _digests(row)
            if len(self.digests) == last:
                raise KeyboardInterrupt
            return ask(teacher, model, row)

        monkeypatch.setattr(RecordedTeacher, "_ask", counted)


def test_a_recorded_teacher_is_asked_once_and_says_the_same(run, healed, monkeypatch):
    asked = Asked(monkeypatch)
    everything = ("heal.teacher=recorded", "heal.top_k=1000000")  # more tokens than there are: nothing is left out
    with pytest.raises(KeyboardInterrupt):
        run("recorded", *everything, progress=StopAt(7, kill))
    rows = len(asked.digests)
    assert 0 < rows == len(set(asked.digests))
    report = run("recorded", *everything, resume=True)
    assert len(asked.digests) == rows
    assert training_losses(report.target) == pytest.approx(training_losses(healed.target), rel=1e-4)
    with pytest.raises(RecipeError, match="tokens only"):
        run("staged", "heal.teacher=recorded", "heal.stage_one=0.5")
    with pytest.raises(RecipeError, match="temperature must be 1"):
        run("warm", "heal.teacher=recorded", "heal.temperature=2")


def test_a_few_likeliest_tokens_teach_nearly_as_well(run, healed):
    few = run("few", "heal.teacher=recorded", "heal.top_k=8")
    assert few.best.kl < healed.best.kl  # less is known, so less can differ
    assert "1 x KL to the source's top 8, rate" in (few.target / "README.md").read_text()
    gained, all_gained = (each.before.total.kl - each.after.total.kl for each in (few, healed))
    assert gained > 0.5 * all_gained


def test_what_was_recorded_before_a_kill_is_kept(run, monkeypatch):
    monkeypatch.setattr("converter.healing.recorded._FILE", 1)
    asked = Asked(monkeypatch, last=20)
    with pytest.raises(KeyboardInterrupt):
        run("recorded", "heal.teacher=recorded")
    run("recorded", "heal.teacher=recorded", resume=True)
    assert len(asked.digests) == len(set(asked.digests)) + 1


def test_a_damaged_record_is_asked_for_again(run, tmp_path, monkeypatch):
    whole = run("whole", "heal.teacher=recorded", "heal.top_k=8")
    with pytest.raises(KeyboardInterrupt):
        run("again", "heal.teacher=recorded", "heal.top_k=8", progress=StopAt(7, kill))
    (record,) = tmp_path.glob(".again.partial/work/teacher-*/*.safetensors")
    content = bytearray(record.read_bytes())
    content[-50] ^= 64
    record.write_bytes(content)
    asked = Asked(monkeypatch)
    report = run("again", "heal.teacher=recorded", "heal.top_k=8", resume=True)
    assert asked.digests
    assert same_weights(report.target, whole.target)


def test_the_best_evaluation_is_what_is_written(run):
    report = run("wild", "heal.rate=0.3", "heal.warmup=0.9", "heal.schedule=1-sqrt", "heal.evaluate_every=2")
    assert report.best.step < STEPS
    assert report.best.kl == min(each.kl for each in report.evaluations[1:])
    assert report.after.total.kl == pytest.approx(report.best.kl, rel=1e-4)


def test_a_run_stops_at_its_target(run, healed):
    target = healed.evaluations[1].kl
    report = run("early", f"heal.target={target + 1e-4}")
    assert report.steps == 4
    assert report.best == healed.evaluations[1]


def test_cross_entropy_alone_needs_no_teacher(run):
    report = run("alone", "heal.kl=0", "heal.ce=1", teacher=None)
    assert report.evaluations[0].kl is None
    assert report.after is None
    assert report.best.loss < report.evaluations[0].loss


def test_one_more_loss_is_one_file(run, tmp_path, monkeypatch):
    """That of docs/plug-ins.md: its weight, parameter, metrics, evaluations and report follow from it."""
    page = (Path(__file__).parents[1] / "docs/plug-ins.md").read_text(encoding="utf-8")
    (tmp_path / "certainty.py").write_text(re.search(r"```python\n# certainty\.py\n(.*?)```", page, re.DOTALL)[1])
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("certainty")
    try:
        short = ("heal.tokens=320", "heal.evaluate_every=1")
        report = run("more", *short, "heal.certainty=0.5", "heal.scale=3")
        assert (report.settings["certainty"], report.settings["scale"]) == (0.5, 3.0)
        lines = [json.loads(line) for line in (report.target / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]
        assert len(steps) == 2
        assert all(step["loss"] == pytest.approx(step["kl"] + 0.5 * step["certainty"]) for step in steps)
        held_out = [line["held_out_certainty"] for line in lines if "held_out_certainty" in line]
        assert held_out == [each.losses["certainty"] for each in report.evaluations]
        assert held_out[2] < held_out[0] < 0
        assert "1 x KL to the source + 0.5 x certainty" in (report.target / "README.md").read_text()
        assert json.loads((report.target / "healing.json").read_text())["best"]["losses"]["certainty"] == held_out[2]
        assert "certainty" in [column.header for column in heal_tables(report)[0].columns]
        recipe = Recipe("mine", "llama", (), heal=HealSettings().replace(certainty=1.0))
        assert parse_recipe(recipe.to_yaml(), "here").heal.losses["certainty"].weight == 1.0
        with pytest.raises(RecipeError, match=r"heal.certainty is -1.0, and a weight must"):
            run("never", "heal.certainty=-1")
    finally:
        del _REGISTRY["certainty"]
    with pytest.raises(RecipeError, match="unknown parameter 'certainty'"):
        run("never", "heal.certainty=0.5")


def test_the_first_stage_fits_the_states_of_each_layer(run, tmp_path):
    student = models.save(models.llama(hidden_size=48, num_hidden_layers=3), tmp_path / "as-wide-and-deep")
    report = run("staged", "heal.stage_one=0.5", converted=student)
    lines = [json.loads(line) for line in (report.target / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert steps[5]["loss"] < steps[0]["loss"]
    assert "kl" not in steps[5]
    assert "kl" in steps[6]


def test_autocast_to_bf16_keeps_fp32_weights(run, healed):
    report = run("half", "heal.precision=bfloat16")
    assert all(tensor.dtype == torch.float32 for tensor in weights(report.target).values())
    assert report.best.kl == pytest.approx(healed.best.kl, rel=0.05)
    assert report.best.kl != healed.best.kl


def test_a_teacher_in_bf16_keeps_its_angles(run, tmp_path, monkeypatch):
    """Its frequencies, rounded with its weights, would be .4 % off: from position 800 on by a whole radian."""
    seen = []
    ask = Teacher.__call__
    monkeypatch.setattr(Teacher, "__call__", lambda self, *inputs: seen.append(self.model) or ask(self, *inputs))
    teacher = models.llama(seed=3)
    run("rotary", "heal.precision=bfloat16", teacher=models.save(teacher, tmp_path / "teacher"))
    assert {parameter.dtype for parameter in seen[0].parameters()} == {torch.bfloat16}
    assert torch.equal(seen[0].model.rotary_emb.inv_freq, teacher.model.rotary_emb.inv_freq)


def test_a_tied_head_stays_tied(run, tmp_path):
    model = models.llama(tie_word_embeddings=True)
    model.tie_weights()
    report = run("tied", converted=models.save(model, tmp_path / "tied-llama"))
    written = SourceModel.open(report.target)
    assert written.spec.tied_head
    assert "lm_head.weight" not in written.checkpoint.tensors
    loaded = load_plain(report.target)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_raised_theta_and_a_longer_context_are_in_both_schemas_of_the_config(run):
    report = run("long", "heal.rope_theta=5e5", "heal.context=100")
    config = json.loads((report.target / "config.json").read_text())
    assert config["max_position_embeddings"] == 100
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5
    assert theta_of(load_plain(report.target)) == 5e5


LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 18}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONG |= {"original_max_position_embeddings": 32}


def scaled(folder, scaling):
    """A LLaMA of 72 positions whose config has this scaling in the new schema alone."""
    model = models.llama(rope_parameters={"rope_theta": 1e4, **scaling})
    return models.save(model, folder, rope_theta=None, rope_scaling=None)


@pytest.mark.parametrize(
    ("scaling", "override", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "heal.context=100", "a context of 100 .* of rope_type dynamic"),
        (LONG, "heal.context=100", "a context of 100 .* of rope_type longrope"),
        (YARN, "heal.context=100", "YaRN has factor 4.0 and .* max_position_embeddings is 100"),
        *((kind, "heal.rope_theta=1e6", "scaled already .*theta 10000") for kind in (LINEAR, LLAMA3, YARN)),
        ({}, "heal.rope_theta=.nan", "rope_theta is nan, and a number must be finite"),
        ({}, "heal.rope_theta=.inf", "a number must be finite"),
        ({}, "heal.rope_theta=0.5", "rope_theta must be more than 1"),
    ],
)
def test_a_rotation_that_would_not_be_the_trained_one_is_refused(run, tmp_path, scaling, override, message):
    student = scaled(tmp_path / "scaled", scaling)
    with pytest.raises(ConverterError, match=message):
        run("never", override, converted=student)
    assert not list(tmp_path.glob("*never*"))


@pytest.mark.parametrize("scaling", [LINEAR, LLAMA3, LONG | {"factor": 2.0}])
def test_a_longer_context_is_trained_written_and_compared_with_one_rotation(run, tmp_path, scaling):
    report = run("long", "heal.context=100", converted=scaled(tmp_path / "scaled", scaling))
    config = json.loads((report.target / "config.json").read_text())
    assert config["max_position_embeddings"] == 100
    assert config["rope_scaling"] == scaling
    assert config["rope_parameters"] == {**scaling, "rope_theta": 1e4}
    assert config["rope_theta"] == 1e4


def test_learned_positions_have_no_more_than_their_table(run, teacher, tmp_path):
    with pytest.raises(UnsupportedError, match="a gpt2 has a vector for each of 72 positions"):
        run("never", "heal.context=100", converted=teacher)
    report = run("shorter", "heal.context=32", "heal.tokens=320", converted=teacher)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (teacher, report.target))
    assert after["n_positions"] == before["n_positions"] == 72
    assert "max_position_embeddings" not in after


def test_a_pad_token_of_the_text_learns_like_any_other(run, tmp_path):
    """eos opens every document, and most fine-tunes pad with it: transformers gives such a row no gradient."""
    ids = {"bos_token_id": None, "eos_token_id": 3, "pad_token_id": 3}
    model = models.llama()
    student = models.save(model, tmp_path / "padded", **ids)
    (student / "generation_config.json").write_text(json.dumps(ids | {"eos_token_id": [3, 5, 7]}))
    report = run("out", converted=student)
    row = "model.embed_tokens.weight"
    moved = (weights(report.target)[row] - weights(student)[row]).abs().amax(1)
    assert moved[3] > 0.1 * moved.median()
    config, generation = (
        json.loads((report.target / name).read_text()) for name in ("config.json", "generation_config.json")
    )
    assert (config["eos_token_id"], config["pad_token_id"]) == (3, None)
    assert (generation["eos_token_id"], generation["pad_token_id"]) == ([3, 5, 7], 3)
    assert load_plain(report.target).get_input_embeddings().padding_idx is None


def test_weights_too_large_for_float16_are_counted_and_refused_before_the_first_step(run, tmp_path):
    model = models.llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[0, :2] = 7e4
    with pytest.raises(UnsupportedError, match=r"2 of \d+ values of model.embed_tokens.weight overflow in float16"):
        run("never", converted=models.save(model, tmp_path / "large"), dtype="float16")
    with pytest.raises(UnsupportedError, match=r"1 of 3 values of w overflow in float16.*largest is 7e\+04"):
        export_weights(lambda name: torch.tensor([1.0, 7e4, -2.0]), {"w": ((3,), "float16")}, tmp_path, 1 << 30)


def test_theta_rises_in_even_steps_of_its_logarithm():
    thetas = [ramp(1e4, 1e6, step, 3) for step in range(5)]
    assert thetas == pytest.approx([1e4 * 10**0.5, 1e5, 1e4 * 10**1.5, 1e6, 1e6])


def test_setting_theta_gives_the_logits_of_a_model_built_with_it(ids):
    raised, built = models.llama(), models.llama(rope_parameters={"rope_type": "default", "rope_theta": 3e5})
    before = models.logits_of(raised, ids)
    set_theta(raised, 3e5)
    assert torch.equal(models.logits_of(raised, ids), models.logits_of(built, ids))
    assert models.relative(before, models.logits_of(built, ids)) > 0.01
    with pytest.raises(UnsupportedError, match="no rotary positions"):
        set_theta(models.gpt2(), 1e6)


def test_a_ramp_ends_before_anything_counts_as_best(run):
    report = run("ramped", "heal.rope_theta=1e6", "heal.theta_ramp=1")
    assert report.best.step == STEPS  # the last step is at the final theta, whatever the ramp
    assert theta_of(load_plain(report.target)) == 1e6


def test_gradients_that_are_not_finite_are_skipped_and_counted(run, monkeypatch):
    from converter.healing.student import Student

    forward, calls = Student.forward, []

    def broken(self, *inputs):
        found = forward(self, *inputs)
        calls.append(self.training and torch.is_grad_enabled())
        return found._replace(total=found.total * math.nan) if calls.count(True) == 2 and calls[-1] else found

    monkeypatch.setattr(Student, "forward", broken)
    report = run("skipped")
    assert report.skipped == 1
    assert all(torch.isfinite(tensor).all() for tensor in weights(report.target).values())

    monkeypatch.setattr(
        Student, "forward", lambda *inputs: (lambda f: f._replace(total=f.total * math.nan))(forward(*inputs))
    )
    with pytest.raises(ConverterError, match="10 steps in a row were not finite"):
        run("hopeless")


def test_a_generation_config_that_cannot_be_saved_is_found_before_training(run, converted, tmp_path):
    copy = shutil.copytree(converted, tmp_path / "copy")
    (copy / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.5}))
    with pytest.raises(CheckpointError, match="generation config is not sound"):
        run("never", converted=copy)


def test_what_cannot_work_is_refused_before_anything_is_written(run, converted, tmp_path):
    with pytest.raises(ConverterError, match="no teacher"):
        run("never", teacher=None)
    with pytest.raises(ConverterError, match="no text to learn from"):
        run("never", text=[])
    with pytest.raises(ConverterError, match="weights of all losses are 0"):
        run("never", "heal.kl=0")
    with pytest.raises(UnsupportedError, match="the converted model has 2 of 40, the teacher 3 of 48"):
        run("never", "heal.stage_one=0.5")
    with pytest.raises(UnsupportedError, match="61 and 67 tokens"):
        run("never", teacher=models.save(models.gpt2(vocab_size=67), tmp_path / "other"))
    with pytest.raises(RecipeError, match=r"heal.warmup is 2.0, and warmup must be a share"):
        run("never", "heal.warmup=2")
    with pytest.raises(ConverterError, match="Unsupported logging"):
        run("never", log_with=["no-such-tracker"])
    assert not list(tmp_path.glob("*never*"))


def test_a_launch_that_ends_up_alone_or_unsharded_is_an_error(monkeypatch):
    check_launch(DistributedType.NO, 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_launch(DistributedType.MULTI_CPU, 4)
    with pytest.raises(ConverterError, match="launch has 4 processes, and this one found no other"):
        check_launch(DistributedType.NO, 1)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    check_launch(DistributedType.FSDP, 4)
    with pytest.raises(ConverterError, match="asks for FSDP"):
        check_launch(DistributedType.MULTI_CPU, 4)


def test_a_run_does_not_go_on_with_the_snapshots_of_deepspeed(run, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run("begun", progress=StopAt(7, kill))
    for state in (tmp_path / ".begun.partial" / "work").glob("step-*/state.json"):
        content = read_whole(state)
        assert content["trainee"] == "torch"
        write_whole(state, content | {"trainee": "DeepSpeed"})
    with pytest.raises(ConverterError, match="was trained by DeepSpeed, and this launch trains by torch"):
        run("begun", resume=True)


@pytest.fixture
def deepspeed_config(tmp_path, monkeypatch):
    """Has accelerate find a DeepSpeed config: `deepspeed_config(text)`. DeepSpeed itself is not needed to read one."""
    monkeypatch.setattr("accelerate.utils.is_deepspeed_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "config.json"))
    return (tmp_path / "config.json").write_text


STAGE_3 = {"stage": 3, "reduce_bucket_size": "auto"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([1, 2], "accelerate cannot use this DeepSpeed config"),
        ("x", "accelerate cannot use this DeepSpeed config"),
        ({}, "accelerate cannot use this DeepSpeed config.*Please specify the ZeRO optimization config"),
        ({"zero_optimization": []}, "ZeRO 1, 2 and 3|cannot use"),
        ({"zero_optimization": None}, "ZeRO 1, 2 and 3|cannot use"),
        ({"zero_optimization": {"stage": 0}}, "healing runs on ZeRO 1, 2 and 3.*has 0"),
        ({"zero_optimization": {"stage": "3"}}, "healing runs on ZeRO 1, 2 and 3.*has '3'"),
        ({"zero_optimization": STAGE_3, "optimizer": {"type": "Adam"}}, "its own optimizer.*heal.rate"),
        ({"zero_optimization": STAGE_3, "optimizer": "AdamW", "scheduler": {}}, "its own optimizer and scheduler"),
        ({"zero_optimization": STAGE_3, "fp16": {"enabled": 1}}, "its own fp16.*heal.precision"),
        ({"zero_optimization": STAGE_3, "fp16": {}}, "its own fp16"),
        ({"zero_optimization": STAGE_3, "tensor_parallel": {"autotp_size": 2}}, "its own tensor_parallel"),
        ({"zero_optimization": {**STAGE_3, "offload_param": {"device": "nvme"}}}, "there is no nvme_path"),
    ],
)
def test_a_deepspeed_config_that_healing_cannot_run_on_is_refused(deepspeed_config, config, message):
    deepspeed_config(json.dumps(config))
    with pytest.raises(ConverterError, match=message):
        check_config()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}},
        {"fp16": {"enabled": False}, "optimizer": None, "scheduler": "auto", "tensor_parallel": {"autotp_size": 1}},
        {"gradient_clipping": 5, "gradient_accumulation_steps": 8, "train_micro_batch_size_per_gpu": 4},
    ],
)
def test_what_healing_says_holds_in_a_deepspeed_config(deepspeed_config, more):
    deepspeed_config(json.dumps({"zero_optimization": STAGE_3, **more}))
    config = zero_plugin(HealSettings(clip=0.5), bfloat16=True).deepspeed_config
    assert not {"optimizer", "scheduler", "fp16", "tensor_parallel"} & config.keys()
    assert (config["gradient_clipping"], config["gradient_accumulation_steps"]) == (0.5, 1)
    assert config["bf16"]["enabled"] is True
    assert config["zero_optimization"]["stage"] == 3


def test_deepspeed_has_to_be_installed_and_launched(monkeypatch):
    monkeypatch.setattr("accelerate.utils.is_deepspeed_available", lambda: False)
    with pytest.raises(ConverterError, match="DeepSpeed is not installed"):
        check_config()
    monkeypatch.setattr("accelerate.utils.is_deepspeed_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConverterError, match="no launcher has started this process"):
        check_config()


def test_the_rate_rises_then_falls_to_what_is_left_of_it():
    settings = HealSettings(rate=1.0, warmup=0.2, final_rate=0.1)
    rates = [rate_at(step, 10, settings) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rate_at(10, 10, settings) == pytest.approx(0.1)
    assert rate_at(6, 10, HealSettings(rate=1.0, warmup=0.2, schedule="1-sqrt")) == pytest.approx(1 - math.sqrt(0.5))


def test_norms_and_biases_do_not_decay_and_q_and_k_have_their_own_rate(converted, teacher):
    settings = HealSettings(rate_q_k=3.0, rate_norms=4.0, rate_mlp=0.5, weight_decay=0.1)

    def groups(folder, model):
        source = SourceModel.open(folder)
        roles = {source.family.full_name(bare): roles for bare, roles in source.used.items()}
        names = {parameter: name for name, parameter in model.named_parameters()}
        return {
            names[parameter]: (group["scale"], group["weight_decay"])
            for group in parameter_groups(model, roles, settings)
            for parameter in group["params"]
        }

    llama = groups(converted, models.llama())
    assert llama["model.layers.1.self_attn.k_proj.weight"] == (3.0, 0.1)
    assert llama["model.layers.1.self_attn.v_proj.weight"] == (1.0, 0.1)
    assert llama["model.layers.0.mlp.gate_proj.weight"] == (0.5, 0.1)
    assert llama["model.norm.weight"] == llama["model.layers.0.input_layernorm.weight"] == (4.0, 0.0)
    assert llama["lm_head.weight"] == llama["model.embed_tokens.weight"] == (1.0, 0.1)
    gpt2 = groups(teacher, models.gpt2())
    assert gpt2["transformer.h.0.attn.c_attn.weight"] == (1.0, 0.1)  # q, k and v in one
    assert gpt2["transformer.h.0.mlp.c_fc.bias"] == (0.5, 0.0)


def test_a_recipe_holds_the_settings_and_counts_read_like_64k(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ntarget: llama\nsteps: []\nheal: {tokens: 64k, ce: 0.5, rate: 2e-4}\n")
    recipe = load_recipe(str(file), ["heal.tokens=1.5M"])
    assert recipe.heal == HealSettings(tokens=1_500_000, rate=2e-4).replace(ce=0.5)
    file.write_text(recipe.to_yaml())
    assert load_recipe(str(file)).heal == recipe.heal


@pytest.mark.slow
def test_a_run_killed_at_twenty_random_moments_always_goes_on_to_the_same_weights(
    run, converted, teacher, text, tmp_path
):
    longer = "heal.tokens=64000"
    whole = run("whole", longer)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["converter.healing.run"])
    given = {"teacher": teacher, "text": [text], "overrides": [*SHORT, longer, "heal.save_every=1"], "resume": True}
    moments, steps = random.Random(0), [0]
    for _ in range(20):
        process = context.Process(target=heal, args=(converted, tmp_path / "again"), kwargs=given)
        process.start()
        while newest(tmp_path) <= steps[-1] and process.exitcode is None:
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.2))
        assert process.exitcode is None  # still at work: the kill hits
        process.kill()
        process.join()
        steps.append(newest(tmp_path))
    report = heal(converted, tmp_path / "again", **given)
    assert same_weights(report.target, whole.target)
    assert training_losses(report.target) == training_losses(whole.target)


def newest(folder):
    """The step of the newest snapshot of an unfinished run."""
    return max((int(path.name[5:]) for path in folder.glob(".again.partial/work/step-*")), default=0)
