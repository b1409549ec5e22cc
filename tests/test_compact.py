"""narrow_mlp: LLaMA's width, and the neurons that the others cannot stand in for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from walks import EXACT, source, walk

from converter.conversion.plan import make_plan
from converter.conversion.recipe import load_recipe
from converter.errors import UnsupportedError
from converter.ops.drop_final_norm_bias import DropFinalNormBias
from converter.ops.gelu_to_swiglu import GeluToSwiglu
from converter.ops.learned_positions_to_rope import LearnedPositionsToRope
from converter.ops.narrow_mlp import NarrowMLP, choose, compact_width

BEFORE = (*EXACT, DropFinalNormBias(), GeluToSwiglu())
ROPE = LearnedPositionsToRope()


def test_the_width_is_llamas() -> None:
    assert compact_width(4096, 256) == 11008
    assert compact_width(192, 256) == compact_width(192, 64) == 512
    # Three matrices of the new width have the parameters of two of the old one, within the rounding.
    for hidden in (192, 768, 1600):
        assert 0 <= 3 * hidden * compact_width(hidden, 64) - 8 * hidden * hidden < 3 * hidden * 64


def test_neurons_that_are_copies_or_constants_cost_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    independent = torch.randn(500, 6, generator=generator, dtype=torch.float64)
    x = torch.cat([independent, 2 * independent[:, :3] - independent[:, 3:]], dim=1)  # 9 neurons, of rank 6
    gram = x.T @ x / len(x) + 1e-9 * torch.eye(9, dtype=torch.float64)
    down = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    kept, narrow = choose(gram, down, 6)
    torch.testing.assert_close(x[:, kept] @ narrow.T, x @ down.T, rtol=1e-5, atol=1e-5)


def test_a_narrow_mlp_keeps_most_of_what_it_computed(tmp_path: Path) -> None:
    opened = source(tmp_path, n_inner=160)
    walked = walk(opened, *BEFORE, NarrowMLP(multiple_of=64), ROPE)
    assert walked.plan.target_spec.intermediate_size == 128
    assert walked.tensors["model.layers.0.mlp.gate_proj.weight"].shape == (128, 48)
    assert walked.tensors["model.layers.0.mlp.down_proj.weight"].shape == (48, 128)
    assert all(0 < error < 0.3 for error in walked.errors("narrow_mlp")["error of the MLP"])


def test_a_width_that_is_there_already_needs_nothing(tmp_path: Path) -> None:
    walked = walk(source(tmp_path, n_inner=64), *BEFORE, NarrowMLP(multiple_of=64), ROPE, rows=4)
    assert [step.needed for step in walked.plan.steps if step.op.name == "narrow_mlp"] == [False]
    assert walked.plan.target_spec.intermediate_size == 64


def test_a_plain_mlp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="not gated"):
        walk(source(tmp_path), *EXACT, NarrowMLP(), rows=4)


@pytest.mark.parametrize(
    ("recipe", "biases"),
    [("gpt2-to-llama-compact", set()), ("gpt2-to-mistral", set()), ("gpt2-to-qwen2", {"q", "k", "v"})],
)
def test_the_recipes_of_targets_with_few_biases_plan(recipe: str, biases: set[str], tmp_path: Path) -> None:
    plan = make_plan(
        source(tmp_path), load_recipe(recipe, ["narrow_mlp.multiple_of=16"] if "qwen2" not in recipe else [])
    )
    assert plan.target_spec.biases == biases
    assert not [name for name in plan.tensors if name.endswith(".bias")] or biases


def test_a_refit_swiglu_is_nearer_than_one_curve_for_all(tmp_path: Path) -> None:
    opened = source(tmp_path)
    blind = walk(opened, *EXACT, DropFinalNormBias(), GeluToSwiglu(), ROPE)
    seeing = walk(opened, *EXACT, DropFinalNormBias(), GeluToSwiglu(refit=True), ROPE)
    errors = [each.findings.own_errors[4][1:3] for each in (seeing, blind)]
    assert all(now < 0.7 * before for now, before in zip(*errors, strict=True))
    assert blind.plan.steps[4].op.calibrated is False
