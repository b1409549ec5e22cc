"""Two processes on gloo make the run that one makes: data parallel and sharded, and one export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import heal_worker
import models
import pytest
from test_heal import StopAt, kill, same_weights, training_losses, weights

from converter.healing.run import heal

#: 20 steps of 5 sequences of 40 tokens: an odd number, so that one of two ranks has a row of padding.
SETTINGS = (
    *("heal.tokens=4000", "heal.context=40", "heal.sequences_per_step=5", "heal.rate=1e-3"),
    *("heal.evaluate_every=10", "heal.save_every=5", "heal.keep=9", "heal.clip=0"),
)
RECORDED = ("heal.teacher=recorded", "heal.top_k=16")
WORKER = Path(heal_worker.__file__)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Runs by name: what makes each differ from the plain one."""
    root = tmp_path_factory.mktemp("processes")
    model = models.llama(hidden_size=48, num_hidden_layers=3, tie_word_embeddings=True)  # as the teacher: stage one
    model.tie_weights()
    common = {
        "converted": str(models.save(model, root / "llama")),
        "teacher": str(models.save(models.gpt2(), root / "gpt2")),
        "text": [str(models.write_ids(root / "ids.npy"))],
    }

    def job(name, *overrides, **options):
        return {**common, "target": str(root / name), "overrides": [*SETTINGS, *overrides], **options}

    return job


@pytest.fixture(scope="module")
def one(jobs):
    """The runs of one process."""
    heal_worker.heal(jobs("one"))
    heal_worker.heal(jobs("one-sgd", "heal.rate=0.05", sgd=True))
    heal_worker.heal(jobs("one-staged", "heal.stage_one=0.5"))
    heal_worker.heal(jobs("one-recorded", *RECORDED))
    with pytest.raises(KeyboardInterrupt):
        heal(**jobs("resumed"), progress=StopAt(13, kill))


@pytest.fixture(scope="module")
def two(jobs, one, tmp_path_factory):
    """The same runs by two processes, in one launch."""
    described = [
        jobs("two"),
        jobs("two-sgd", "heal.rate=0.05", sgd=True),
        jobs("split", "heal.micro_batch=40"),
        jobs("sharded", sharded=True),
        jobs("sharded-split", "heal.micro_batch=40", sharded=True),
        jobs("staged", "heal.stage_one=0.5", "heal.teacher=sharded"),
        jobs("recorded", *RECORDED),
        jobs("resumed", resume=True),
    ]
    file = tmp_path_factory.mktemp("jobs") / "jobs.jsonl"
    file.write_text("".join(json.dumps(job) + "\n" for job in described))
    code, said = launch("torch.distributed.run", "--standalone", "--nproc-per-node", 2, WORKER, file)
    assert code == 0, said[-4000:]


def launch(*arguments, python=sys.executable, **environment):
    """Run a Python module with these arguments on one thread a process; its exit code and what it said."""
    command = [python, "-m", *map(str, arguments)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stderr


def folder(jobs, name):
    return Path(jobs(name)["target"])


def test_two_processes_make_the_weights_of_one_with_sgd(jobs, two):
    ours, theirs = (weights(folder(jobs, name)) for name in ("two-sgd", "one-sgd"))
    start = weights(Path(jobs("any")["converted"]))
    assert all((ours[name] - theirs[name]).abs().max() <= 1e-5 for name in theirs)
    assert max((theirs[name] - start[name]).abs().max() for name in theirs) > 1e-2


@pytest.mark.parametrize("name", ["two", "split", "sharded", "sharded-split", "resumed"])
def test_two_processes_make_the_losses_of_one_with_adamw(jobs, two, name):
    found, wanted = (training_losses(folder(jobs, each)) for each in (name, "one"))
    assert len(found) == 20
    assert found == pytest.approx(wanted, abs=1e-4)


def test_the_first_stage_and_a_sharded_teacher_are_the_same_on_two_processes(jobs, two):
    found, wanted = (training_losses(folder(jobs, name)) for name in ("staged", "one-staged"))
    assert found == pytest.approx(wanted, abs=1e-4)


def test_a_recorded_teacher_is_the_same_on_two_processes(jobs, two):
    found, wanted = (training_losses(folder(jobs, name)) for name in ("recorded", "one-recorded"))
    assert found == pytest.approx(wanted, abs=1e-4)
    assert found != pytest.approx(training_losses(folder(jobs, "one")), abs=1e-4)


def test_the_export_of_a_sharded_run_is_that_of_the_unsharded_one(jobs, two):
    ours, theirs = folder(jobs, "sharded"), folder(jobs, "two")
    assert same_weights(ours, theirs)
    assert "lm_head.weight" not in weights(ours)  # still tied
    assert (ours / "config.json").read_bytes() == (theirs / "config.json").read_bytes()


@pytest.mark.slow
def test_accelerate_launch_on_cpus_heals_and_refuses_to_go_on_unsharded(jobs, one, tmp_path):
    job = jobs("any")
    heal_it = ["-m", "converter", "heal", job["converted"], "--teacher", job["teacher"], "--text", *job["text"]]
    heal_it += [part for override in SETTINGS for part in ("--set", override)]
    launcher = ("accelerate.commands.launch", "--num_processes", 2, "--main_process_port", 0)
    code, said = launch(*launcher, "--cpu", *heal_it, tmp_path / "healed")
    assert code == 0, said[-4000:]
    assert training_losses(tmp_path / "healed") == pytest.approx(training_losses(folder(jobs, "one")), abs=1e-4)
    code, said = launch(*launcher, "--use_fsdp", "--fsdp_version", 2, *heal_it, tmp_path / "sharded")
    assert code != 0
    assert "the launch asks for FSDP" in said
    assert not (tmp_path / "sharded").exists()


@pytest.mark.gpu
def test_a_gpu_makes_the_losses_of_a_cpu(jobs, one):
    heal(**jobs("gpu", "heal.precision=float32"), device="cuda")
    assert training_losses(folder(jobs, "gpu")) == pytest.approx(training_losses(folder(jobs, "one")), rel=1e-3)
    heal(**jobs("gpu-bf16"), device="cuda")
    assert training_losses(folder(jobs, "gpu-bf16")) == pytest.approx(training_losses(folder(jobs, "one")), rel=0.05)
    heal(**jobs("gpu-offloaded", "heal.precision=float32", "heal.teacher=offloaded"), device="cuda")
    assert training_losses(folder(jobs, "gpu-offloaded")) == training_losses(folder(jobs, "gpu"))


@pytest.mark.gpu
def test_fsdp2_through_accelerate_makes_the_losses_of_one_process(jobs, one):
    """Needs two GPUs."""
    job = jobs("fsdp2", "heal.precision=float32", "heal.teacher=sharded", "heal.gradient_checkpointing=true")
    heal_it = ["-m", "converter", "heal", job["converted"], job["target"], "--teacher", job["teacher"]]
    heal_it += ["--text", *job["text"], *(part for override in job["overrides"] for part in ("--set", override))]
    fsdp = ("--use_fsdp", "--fsdp_version", 2, "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    code, said = launch("accelerate.commands.launch", "--num_processes", 2, *fsdp, *heal_it)
    assert code == 0, said[-4000:]
    assert training_losses(folder(jobs, "fsdp2")) == pytest.approx(training_losses(folder(jobs, "one")), rel=1e-3)
    assert "lm_head.weight" not in weights(folder(jobs, "fsdp2"))
