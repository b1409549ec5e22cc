"""The walk: streams of every op prefix, damage by op, drift, and going on after a kill."""

import dataclasses

import models
import numpy as np
import pytest
import torch

from converter.blocks import Block
from converter.conversion.memory import expected_memory
from converter.conversion.report import StepReport, unexplained_drift
from converter.conversion.run import plan_conversion
from converter.conversion.streamed import compare_streamed
from converter.conversion.walk import Walk
from converter.families.opened import SourceModel
from converter.measure.metrics import Tally, batches, predictions
from converter.measure.models import load
from converter.measure.verify import compare
from converter.ops import Notes
from converter.text.windows import Windows

RECIPE = "gpt2-to-llama-naive"
FEW_STEPS = {RECIPE: [], "gpt2-to-llama": ["fit_blocks.steps=1"]}


@pytest.fixture
def plan(tmp_path):
    return plan_conversion(models.save(models.gpt2(), tmp_path / "source"), RECIPE)


def random_windows(vocab, count=3, length=48, short=20):
    ids = np.random.default_rng(1).integers(0, vocab, (count, length))
    lengths = np.full(count, length)
    lengths[-1] = short
    return Windows(ids, lengths)


def logits(plan, windows, prefix):
    """An independent conversion by the first ops only, run block by block with no streams at all."""
    steps = plan.steps[:prefix]

    def read(ref):
        block = plan.source.read_block(ref, torch.float32)
        for step in steps:
            block = step.op.apply(block, step.before, Notes(ref), None)
        return Block({role: tensor.float() for role, tensor in block.items()})

    return models.run(read, steps[-1].after if steps else plan.source.spec, torch.from_numpy(windows.ids))


def test_damage_of_every_prefix_equals_an_independent_conversion_by_that_prefix(plan):
    windows = random_windows(plan.source.spec.vocab_size)
    walk = Walk(plan, evaluation=windows)
    list(walk)
    source = logits(plan, windows, 0)
    rows, positions, targets = predictions(windows, slice(0, len(windows.ids)))
    for prefix in range(1, len(plan.steps) + 1):
        tally = Tally(windows.ids.shape[1])
        other = logits(plan, windows, prefix)
        tally.add(source[rows, positions], other[rows, positions], targets, positions)
        expected, found = tally.comparison(), walk.findings.comparisons[prefix - 1]
        assert found.total.kl == pytest.approx(expected.total.kl, abs=1e-6)
        assert found.total.loss == pytest.approx(expected.total.loss, abs=1e-6)
        assert [b.kl for b in found.buckets] == pytest.approx([b.kl for b in expected.buckets], abs=1e-6)
    assert walk.findings.comparisons[-1].total.kl > 0.01, "the lossy ops must show"


def test_a_walk_restored_after_any_block_ends_with_the_same_tensors_and_findings(plan):
    windows = random_windows(plan.source.spec.vocab_size)
    whole = Walk(plan, evaluation=windows)
    expected = [(ref, {name: tensor.clone() for name, tensor in tensors.items()}) for ref, tensors in whole]
    for stop in range(1, len(expected) + 1):
        first = Walk(plan, evaluation=windows)
        iterator = iter(first)
        for _ in range(stop):
            next(iterator)
        state, streams = first.state()
        second = Walk(plan, evaluation=windows)
        second.restore(state, {name: tensor.clone() for name, tensor in streams.items()})
        assert state["finished"] == stop
        for (ref, tensors), (other_ref, others) in zip(expected[stop:], second, strict=True):
            assert ref == other_ref
            assert all(torch.equal(tensors[name], others[name]) for name in tensors)
        assert second.findings.to_dict() == whole.findings.to_dict()


def test_streams_are_shared_until_an_op_changes_something(plan):
    walk = Walk(plan, evaluation=random_windows(plan.source.spec.vocab_size))
    next(iter(walk))
    states = walk._evaluation.states
    names = [step.op.name for step in plan.steps]
    centred = names.index("layernorm_to_rmsnorm") + 1
    assert states[centred - 1] is states[0]
    assert states[centred] is not states[0]


def test_padding_is_never_measured(plan):
    windows = random_windows(plan.source.spec.vocab_size)
    other = Windows(windows.ids.copy(), windows.lengths)
    other.ids[-1, windows.lengths[-1] :] = 1
    found = []
    for each in (windows, other):
        walk = Walk(plan, evaluation=each)
        list(walk)
        found.append(walk.findings.to_dict())
    assert found[0] == found[1]


def test_a_broken_exact_op_is_named_with_the_first_block_that_drifts(plan):
    broken = plan.steps[2]
    assert broken.op.name == "layernorm_to_rmsnorm"

    class Broken(type(broken.op)):
        def apply(self, block, spec, notes, calibration):
            block = super().apply(block, spec, notes, calibration)
            second = notes.ref.index == 1 and notes.ref.kind == "layer"
            return Block({**block, "v.weight": block["v.weight"] * 1.5}) if second else block

    steps = list(plan.steps)
    steps[2] = dataclasses.replace(broken, op=Broken())
    walk = Walk(dataclasses.replace(plan, steps=tuple(steps)), evaluation=random_windows(plan.source.spec.vocab_size))
    list(walk)
    reports = [
        StepReport(
            step.op.name,
            {},
            step.exact,
            step.needed,
            (),
            {},
            drift=tuple(walk.findings.drifts[i]),
            own_error=tuple(walk.findings.own_errors[i]),
        )
        for i, step in enumerate(steps)
    ]
    sentence = unexplained_drift(reports)
    assert sentence is not None
    assert "layernorm_to_rmsnorm" in sentence
    assert "layers.1" in sentence
    assert walk.findings.changes[2] > 1e-5


def test_batches_cover_all_windows_once():
    windows = Windows(np.zeros((7, 1500), dtype=np.int64), np.full(7, 1500))
    covered = [row for batch in batches(windows) for row in range(batch.start, batch.stop)]
    assert covered == list(range(7))


def test_an_exact_step_is_not_blamed_for_the_drift_of_lossy_ones_before_it():
    lossy = StepReport("a", {}, False, True, (), {}, drift=(0.5, 0.6), own_error=(0.5, 0.1))
    exact = dataclasses.replace(lossy, name="b", exact=True)
    assert unexplained_drift([lossy, exact]) is None
    worse = dataclasses.replace(exact, drift=(0.5, 0.7))
    assert "after b, layers.0" in (unexplained_drift([lossy, worse]) or "")


@pytest.mark.parametrize("recipe", [RECIPE, "gpt2-to-llama"])
def test_a_dry_run_says_how_large_the_activations_become(tmp_path, recipe):
    """With text that fills the recipe's budget, to the byte."""
    budget = ["verify.tokens=144", "calibration.tokens=216"]
    plan = plan_conversion(models.save(models.gpt2(), tmp_path / "source"), recipe, [*budget, *FEW_STEPS[recipe]])
    texts = [random_windows(plan.source.spec.vocab_size, count, 72, 72) for count in (3, 2)]
    walk = Walk(plan, *texts)
    list(walk)
    states = [state for _, streams in walk._streams() for state in streams.states.values()]
    held = {state.data_ptr(): state.numel() * state.itemsize for state in states}
    memory = expected_memory(plan)
    assert memory.streams == sum(held.values())
    assert memory.stream_files == 0
    assert memory.peak >= memory.streams + memory.weights


def test_a_comparison_block_by_block_is_that_of_whole_models(plan, tmp_path):
    windows = random_windows(plan.source.spec.vocab_size)
    other = SourceModel.open(models.save(models.llama(), tmp_path / "llama"))
    whole = compare(load(plan.source), load(other), windows)
    streamed = compare_streamed(plan.source, other, windows)
    assert streamed.total.kl == pytest.approx(whole.total.kl, rel=1e-4)
    assert streamed.total.loss == pytest.approx(whole.total.loss, rel=1e-4)
    assert [each.tokens for each in streamed.buckets] == [each.tokens for each in whole.buckets]
