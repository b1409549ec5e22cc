"""fit_blocks: layers come nearer to the source's, by seed, and not at all with no steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import models
import pytest
import torch
from walks import EXACT, source, walk

from converter.blocks import Block, BlockRef
from converter.conversion.recipe import load_recipe
from converter.errors import RecipeError
from converter.families.opened import SourceModel
from converter.ops import Calibration, Notes, Op
from converter.ops.drop_final_norm_bias import DropFinalNormBias
from converter.ops.fit_blocks import FitBlocks, _Metric, _reading, _schedule, _selections
from converter.ops.gelu_to_swiglu import GeluToSwiglu
from converter.ops.learned_positions_to_rope import LearnedPositionsToRope
from converter.spec import ModelSpec

BEFORE = (*EXACT, DropFinalNormBias(), GeluToSwiglu(), LearnedPositionsToRope())


@dataclass(frozen=True)
class Damage(Op):
    """Weaken every MLP."""

    name = "damage"
    summary = "for tests"

    def exact(self, spec: ModelSpec) -> bool:
        return False

    def change(self, spec: ModelSpec) -> ModelSpec:
        return spec

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        return Block({**block, "down.weight": 0.7 * block["down.weight"]}) if notes.ref.kind == "layer" else block


def test_fitting_takes_damage_back(tmp_path: Path) -> None:
    opened = SourceModel.open(models.save(models.llama(), tmp_path))
    walked = walk(opened, Damage(), FitBlocks(steps=80, rate=1e-2, sequences=4, passes=10))
    assert walked.kl("fit_blocks") < 0.3 * walked.kl("damage")
    errors = walked.errors("fit_blocks")
    assert len(errors["before"]) == len(errors["after"]) == 2
    assert all(after < 0.7 * before for before, after in zip(errors["before"], errors["after"], strict=True))


def test_lost_positions_leave_an_error_that_falls(tmp_path: Path) -> None:
    errors = walk(source(tmp_path), *BEFORE, FitBlocks(steps=20, sequences=2)).errors("fit_blocks")
    assert all(after < before for before, after in zip(errors["before"], errors["after"], strict=True))


def test_no_steps_change_nothing(tmp_path: Path) -> None:
    opened = source(tmp_path)
    unfitted, zero = walk(opened, *BEFORE, rows=4), walk(opened, *BEFORE, FitBlocks(steps=0), rows=4)
    assert not zero.plan.steps[-2].needed
    assert all(torch.equal(tensor, zero.tensors[name]) for name, tensor in unfitted.tensors.items())


def test_a_seed_gives_the_same_bytes_and_another_one_others(tmp_path: Path) -> None:
    opened = source(tmp_path)
    first, again, other = (walk(opened, *BEFORE, FitBlocks(steps=3, seed=seed), rows=8).tensors for seed in (5, 5, 6))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_micro_batches_add_up_to_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = source(tmp_path)
    fit = FitBlocks(steps=2, sequences=4)
    whole = walk(opened, *BEFORE, fit, rows=8).tensors
    monkeypatch.setattr("converter.ops.fit_blocks.MICRO_BATCH", 72)
    parts = walk(opened, *BEFORE, fit, rows=8).tensors
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-3, atol=1e-4)


def test_the_metric_turns_large_errors_down_and_what_is_read_up() -> None:
    size = 6
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    covariance = root.T @ root
    torch.testing.assert_close(_Metric(None)(covariance), _Metric(torch.eye(size, dtype=torch.float64))(covariance))
    torch.testing.assert_close(_Metric(None)(7 * covariance), _Metric(None)(covariance))
    large, vectors = torch.linalg.eigh(covariance)
    weights = (vectors.T @ _Metric(None)(covariance) @ vectors).diagonal()
    torch.testing.assert_close(weights, 1 / (1 + large / large.mean()))
    # Read n times as strongly, a direction weighs the more, and e L under the plain metric is the same as e under R's.
    reading = torch.diag(torch.tensor([9.0, 1, 1, 1, 1, 1], dtype=torch.float64))
    factor = reading.sqrt()
    read = factor @ covariance @ factor
    torch.testing.assert_close(_Metric(reading)(covariance), factor @ _Metric(None)(read) @ factor)


def test_what_the_next_attention_reads_counts_where_the_norms_were_moved(tmp_path: Path) -> None:
    opened = SourceModel.open(models.save(models.openai_gpt(n_layer=2), tmp_path))
    refs = [BlockRef("layer", layer) for layer in range(2)]
    blocks = {ref: opened.read_block(ref, torch.float32) for ref in refs}
    given = models.Given(torch.zeros(1, 4, opened.spec.hidden_size), blocks)
    assert _reading(opened.spec, 0, given) is None
    given.moved_norms = True
    assert _reading(opened.spec, 1, given) is None
    reading = _reading(opened.spec, 0, given)
    assert reading is not None
    state = torch.randn(opened.spec.hidden_size, generator=torch.Generator().manual_seed(1))
    block = blocks[refs[1]]
    squares = [(block[f"{part}.weight"] @ state).square().sum() for part in "qkv"]
    norms = sum(block[f"{part}.weight"].square().sum() for part in "qkv")
    wanted = state.square().sum() + torch.stack(squares).sum() * opened.spec.hidden_size / norms
    torch.testing.assert_close(state @ reading @ state, wanted)


def test_little_text_means_few_steps(tmp_path: Path) -> None:
    opened = source(tmp_path)
    few = walk(opened, *BEFORE, FitBlocks(steps=4), rows=2).tensors
    many = walk(opened, *BEFORE, FitBlocks(steps=100), rows=2).tensors
    assert all(torch.equal(tensor, many[name]) for name, tensor in few.items())


def test_every_window_is_seen_before_one_is_seen_again() -> None:
    rows = torch.cat(list(_selections(count=6, sequences=2, steps=6, seed=0, layer=0))).tolist()
    assert sorted(rows[:6]) == sorted(rows[6:]) == list(range(6))
    assert torch.cat(list(_selections(6, 2, 6, seed=0, layer=1))).tolist() != rows
    assert [len(each) for each in _selections(count=3, sequences=8, steps=2, seed=0, layer=0)] == [3, 3]


def test_the_rate_warms_up_and_falls_to_nothing() -> None:
    rates = [_schedule(step, 200) for step in range(200)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) > 0.98
    assert rates[-1] < 1e-3


@pytest.mark.parametrize("override", ["fit_blocks.rate=0", "fit_blocks.rate=.nan", "fit_blocks.sequences=0"])
def test_a_rate_and_a_batch_of_nothing_are_refused(override: str) -> None:
    with pytest.raises(RecipeError):
        load_recipe("gpt2-to-llama", [override])


def test_streams_on_disk_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = source(tmp_path)
    in_memory = walk(opened, *BEFORE, FitBlocks(steps=2), rows=4).tensors
    monkeypatch.setattr("converter.conversion.streams.IN_MEMORY", 1000)
    on_disk = walk(opened, *BEFORE, FitBlocks(steps=2), rows=4).tensors
    assert all(torch.equal(tensor, on_disk[name]) for name, tensor in in_memory.items())
