"""group_kv_heads: what heads share is kept, all of it where they are alike, and what cannot be grouped is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import Converted, Given
from torch import Tensor
from transformers import AutoModelForCausalLM
from walks import EXACT, source, walk

import converter
from converter.blocks import Block, BlockRef
from converter.conversion.recipe import parse_recipe
from converter.errors import RecipeError, UnsupportedError
from converter.ops import Notes
from converter.ops.drop_final_norm_bias import DropFinalNormBias
from converter.ops.gelu_to_swiglu import GeluToSwiglu
from converter.ops.group_kv_heads import GroupKVHeads, share
from converter.ops.learned_positions_to_rope import LearnedPositionsToRope
from converter.reference import run_attention, run_norm
from converter.spec import ModelSpec, QKNorm

LAYER = BlockRef("layer", 1)
FACTS = {"n_head": 6, "n_embd": 96}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attention(block: Block, spec: ModelSpec, states: Tensor) -> Tensor:
    return run_attention(block, spec, LAYER.index, run_norm(block, "attn_norm", spec, states))


def alike(block: Block, spec: ModelSpec, groups: int) -> Block:
    """The layer with the keys and values of each group made equal, but for a random basis of every head."""
    size = spec.num_kv_heads // groups
    changed = {}
    for part in ("k", "v"):
        weight = block[f"{part}.weight"].view(groups, size, spec.head_dim, -1)
        bases = random(groups, size, spec.head_dim, spec.head_dim, seed=3)
        changed[f"{part}.weight"] = (bases @ weight[:, :1]).reshape(-1, spec.hidden_size)
        bias = block[f"{part}.bias"].view(groups, size, spec.head_dim, 1)
        changed[f"{part}.bias"] = (bases @ bias[:, :1]).flatten()
    return Block({**block, **changed})


def mean_pooled(block: Block, spec: ModelSpec, groups: int) -> Block:
    """What grouping without alignment does (Ainslie et al. 2023)."""

    def pool(tensor: Tensor) -> Tensor:
        return tensor.reshape(groups, -1, spec.head_dim, *tensor.shape[1:]).mean(dim=1).flatten(0, 1)

    return Block({role: pool(t) if role.startswith(("k.", "v.")) else t for role, t in block.items()})


@pytest.mark.parametrize(("heads", "groups"), [(6, 1), (6, 2), (6, 3), (2, 1)])
def test_heads_that_are_equal_up_to_their_bases_are_merged_exactly(heads: int, groups: int, tmp_path: Path) -> None:
    model = Converted(source(tmp_path, **FACTS))
    spec, states = model.spec.replace(num_kv_heads=heads), random(12, 40, 96)
    some = {role: t[: heads * 16] for role, t in model.blocks[LAYER].items() if role.startswith(("k.", "v."))}
    block = alike(Block({**model.blocks[LAYER], **some}), spec, groups)
    op, notes = GroupKVHeads(groups), Notes(LAYER)
    grouped = op.apply(block, spec, notes, Given(states))
    held_out = random(2, 40, 96, seed=1)
    wanted, after = attention(block, spec, held_out), op.change(spec)
    assert grouped["k.weight"].shape == grouped["v.weight"].shape == (groups * 16, 96)
    assert models.relative(attention(grouped, after, held_out), wanted) <= 1e-10
    assert models.relative(attention(mean_pooled(block, spec, groups), after, held_out), wanted) > 0.1
    assert all(error < 1e-6 for error in notes.errors.values())


def test_no_other_rows_leave_less() -> None:
    heads, forms = random(500, 3, 4), random(3, 6, 4, seed=1)
    importance = forms.mT @ forms
    rows = heads.flatten(1)
    pooling, back, lost = share(rows.T @ rows / len(rows), importance)

    def cost(approximation: Tensor) -> float:
        error = heads - approximation
        return float(torch.einsum("nha,hab,nhb->", error, importance, error))

    def shared(pooling: Tensor) -> Tensor:
        """The heads by their regression on pooled rows."""
        x = rows @ pooling.T
        return (x @ torch.linalg.lstsq(x, rows).solution).view_as(heads)

    least = cost(shared(pooling))
    assert least == pytest.approx(float(lost) * cost(heads * 0), rel=1e-9)
    assert cost(torch.einsum("hab,nb->nha", back, rows @ pooling.T)) == pytest.approx(least, rel=1e-9)
    for seed in range(5):
        assert least < cost(shared(pooling + 0.05 * random(4, 12, seed=seed)))


def test_on_a_walk_shared_heads_keep_far_more_than_their_mean(tmp_path: Path) -> None:
    opened = source(tmp_path, **FACTS)

    def kl(op: Any) -> float:
        return walk(opened, *EXACT, DropFinalNormBias(), GeluToSwiglu(), op, LearnedPositionsToRope()).kl(op.name)

    class MeanPooled(GroupKVHeads):
        name = "mean_pooled"

        def apply(self, block: Block, spec: ModelSpec, notes: Notes, *given: Any) -> Block:
            return mean_pooled(block, spec, self.kv_heads) if notes.ref.kind == "layer" else block

    assert kl(GroupKVHeads(3)) < kl(MeanPooled(3)) / 3


def test_a_grouped_model_loads_with_the_figures_of_the_walk(tmp_path: Path, text: Path) -> None:
    steps = "[untie_head, layernorm_to_rmsnorm, drop_final_norm_bias, gelu_to_swiglu, group_kv_heads: {kv_heads: 3}, "
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"name: r\ntarget: llama\nsteps: {steps}learned_positions_to_rope]\n")
    model = models.save(models.gpt2(**FACTS), tmp_path / "gpt2")
    report = converter.convert(model, tmp_path / "out", recipe=str(recipe), text=[text])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.num_key_value_heads == 3
    assert loaded.model.layers[0].self_attn.k_proj.weight.shape == (48, 96)
    assert report.verification is not None
    measured = report.steps[-1].comparison
    assert measured is not None
    assert report.verification.total.kl == pytest.approx(measured.total.kl, rel=1e-2)


def test_as_many_heads_as_there_are_need_nothing(tmp_path: Path) -> None:
    spec = source(tmp_path).spec
    assert not GroupKVHeads(3).needed(spec)
    assert GroupKVHeads(3).change(spec) == spec


@pytest.mark.parametrize(
    ("heads", "facts", "words"),
    [
        (5, {"num_kv_heads": 12}, r"12 key-value heads do not fall into 5 groups .* Set kv_heads to 1 or 2 or 3 or 4"),
        (6, {}, r"3 key-value heads do not fall into 6 groups .* Set kv_heads to 1 or 3"),
        (1, {"qk_norm": QKNorm.PER_HEAD}, "a norm commutes with no change of basis"),
    ],
)
def test_a_model_that_cannot_be_grouped_is_refused(heads: int, facts: Any, words: str, tmp_path: Path) -> None:
    spec = source(tmp_path).spec
    with pytest.raises(UnsupportedError, match=words):
        GroupKVHeads(heads).change(spec.replace(**facts))


def test_rotated_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"keys are rotated.*Put it before learned_positions_to_rope"):
        walk(source(tmp_path), *EXACT, LearnedPositionsToRope(), GroupKVHeads(), rows=4)


def test_no_heads_at_all_are_refused() -> None:
    with pytest.raises(RecipeError, match="1 or more"):
        parse_recipe("{name: r, target: llama, steps: [group_kv_heads: {kv_heads: 0}]}", "r.yaml")
