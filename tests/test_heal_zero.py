"""Healing on DeepSpeed, by accelerate's own config, makes the run that one process makes. On CPUs, in an environment
that has DeepSpeed: `make slow` sets one up."""

from __future__ import annotations

import json
import os

import heal_worker
import pytest
from test_heal import training_losses, weights
from test_heal_processes import SETTINGS, WORKER, folder, jobs, launch  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow


def python():
    """The interpreter of an environment that has DeepSpeed."""
    path = os.environ.get("CONVERTER_ZERO_PYTHON")
    assert path, "CONVERTER_ZERO_PYTHON must name an interpreter with DeepSpeed: run `make slow`"
    return path


def zero(file, described, processes, **environment):
    """Run these jobs by so many processes of one launch."""
    file.write_text("".join(json.dumps(job) + "\n" for job in described))
    config = {"ACCELERATE_USE_DEEPSPEED": "true", **environment}
    command = ("torch.distributed.run", "--standalone", "--nproc-per-node", processes, WORKER, file)
    code, said = launch(*command, python=python(), **config)
    assert code == 0, said[-4000:]


@pytest.fixture(scope="module")
def one(jobs):  # noqa: F811
    """The runs of one process."""
    heal_worker.heal(jobs("one"))
    heal_worker.heal(jobs("one-sgd", "heal.rate=0.05", sgd=True))
    heal_worker.heal(jobs("one-clipped", "heal.rate=0.05", "heal.clip=0.1", sgd=True))
    heal_worker.heal(jobs("one-staged", "heal.stage_one=0.5"))
    heal_worker.heal(jobs("one-broken", broken=4))


STAGES = ("1", "2", "3")


@pytest.fixture(scope="module", params=[*STAGES, "3-offloaded"])
def stage(request, jobs, one, tmp_path_factory):  # noqa: F811
    """A stage of ZeRO, with all runs done on it."""
    name = request.param
    environment = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": name[0]}
    if "offloaded" in name:
        environment["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] = "cpu"
        environment["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"] = "cpu"
    described = [
        jobs(f"{name}-plain"),
        jobs(f"{name}-split", "heal.micro_batch=40", "heal.gradient_checkpointing=true", "heal.teacher=sharded"),
        jobs(f"{name}-staged", "heal.stage_one=0.5"),
        jobs(f"{name}-bf16", "heal.precision=bfloat16", angles=True),
        jobs(f"{name}-resumed", stop=13),
        jobs(f"{name}-resumed", resume=True),
        jobs(f"{name}-moved", stop=13),
        jobs(f"{name}-broken", broken=4),
    ]
    if "offloaded" not in name:  # where the optimizer is DeepSpeed's Adam, whatever was given
        described.append(jobs(f"{name}-sgd", "heal.rate=0.05", sgd=True))
        described.append(jobs(f"{name}-clipped", "heal.rate=0.05", "heal.clip=0.1", sgd=True))
    file = tmp_path_factory.mktemp("zero") / "jobs.jsonl"
    zero(file, described, 2, **environment)
    zero(file, [jobs(f"{name}-moved", resume=True)], 1, **environment | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"})
    return name


@pytest.mark.parametrize("stage", STAGES, indirect=True)
@pytest.mark.parametrize("run", ["sgd", "clipped"])
def test_the_weights_are_those_of_one_process_with_sgd(jobs, stage, run):  # noqa: F811
    ours, theirs = (weights(folder(jobs, f"{name}-{run}")) for name in (stage, "one"))
    start = weights(folder(jobs, "any").parent / "llama")
    assert ours.keys() == theirs.keys()
    assert all((ours[name] - theirs[name]).abs().max() <= 1e-5 for name in theirs)
    assert max((theirs[name] - start[name]).abs().max() for name in theirs) > 1e-3


@pytest.mark.parametrize("run", ["plain", "split", "resumed", "moved"])
def test_the_losses_are_those_of_one_process_with_adamw(jobs, stage, run):  # noqa: F811
    found, wanted = (training_losses(folder(jobs, name)) for name in (f"{stage}-{run}", "one"))
    assert len(found) == 20
    assert found == pytest.approx(wanted, abs=1e-4)


def test_the_first_stage_is_that_of_one_process(jobs, stage):  # noqa: F811
    """What it does not reach has no step to correct for behind it, but on ZeRO a group of parameters counts as one."""
    found, wanted = (training_losses(folder(jobs, f"{name}-staged")) for name in (stage, "one"))
    assert found[:11] == pytest.approx(wanted[:11], abs=1e-4)
    assert found[11:] == pytest.approx(wanted[11:], abs=0.05)


def test_bf16_is_near_fp32(jobs, stage):  # noqa: F811
    found, wanted = (training_losses(folder(jobs, name)) for name in (f"{stage}-bf16", "one"))
    assert found == pytest.approx(wanted, rel=0.02)
    assert found != pytest.approx(wanted, abs=1e-4)


def test_a_gradient_that_is_not_finite_is_left_out(jobs, stage):  # noqa: F811
    lines = (folder(jobs, f"{stage}-broken") / "metrics.jsonl").read_text().splitlines()
    assert [line["skipped"] for line in map(json.loads, lines) if "loss" in line][2:5] == [0, 1, 1]
    found, wanted = (training_losses(folder(jobs, f"{name}-broken")) for name in (stage, "one"))
    assert found[4:] == pytest.approx(wanted[4:], abs=1e-3)


def test_accelerate_launch_starts_it(jobs, one, tmp_path):  # noqa: F811
    job = jobs("any")
    heal_it = ["-m", "converter", "heal", job["converted"], "--teacher", job["teacher"], "--text", *job["text"]]
    heal_it += [part for override in SETTINGS for part in ("--set", override)]
    launcher = ("accelerate.commands.launch", "--num_processes", 2, "--main_process_port", 0, "--use_deepspeed")
    code, said = launch(*launcher, "--zero_stage", 3, *heal_it, tmp_path / "healed", python=python())
    assert code == 0, said[-4000:]
    assert training_losses(tmp_path / "healed") == pytest.approx(training_losses(folder(jobs, "one")), abs=1e-4)
    config, stage = tmp_path / "config.json", {"stage": 3, "reduce_bucket_size": "auto"}
    content = {"zero_optimization": stage, "bf16": {"enabled": "auto"}, "train_batch_size": "auto"}
    config.write_text(json.dumps(content))
    code, said = launch(*launcher, "--deepspeed_config_file", config, *heal_it, tmp_path / "by-file", python=python())
    assert code == 0, said[-4000:]
    assert training_losses(tmp_path / "by-file") == training_losses(tmp_path / "healed")
    config.write_text(json.dumps(content | {"optimizer": {"type": "AdamW"}}))
    code, said = launch(*launcher, "--deepspeed_config_file", config, *heal_it, tmp_path / "theirs", python=python())
    assert code != 0
    assert "the DeepSpeed config has its own optimizer" in said
    assert not (tmp_path / "theirs").exists()
