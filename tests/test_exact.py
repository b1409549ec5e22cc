"""Exact means exact for every fact of a model: an op represents a fact or refuses it, by itself and beside any other.

Each fact of `ModelSpec` is put into a small random model, alone and with every other one, and every op that calls
itself exact there is applied. What the model computes must stay the same, or `change` must have refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import models
import pytest
import torch
from models import TOLERANCE

from converter.blocks import EMBEDDINGS, HEAD, Block, BlockRef, block_shapes, blocks
from converter.errors import UnsupportedError
from converter.ops import Notes, Op, ops
from converter.ops.cut_for_ranks import CutForRanks
from converter.ops.drop_biases import DropBiases
from converter.ops.fold_final_norm_bias import FoldFinalNormBias
from converter.ops.gelu_to_swiglu import GeluToSwiglu
from converter.ops.group_kv_heads import GroupKVHeads
from converter.ops.learned_positions_to_rope import LearnedPositionsToRope
from converter.ops.narrow_mlp import NarrowMLP
from converter.ops.swap_rope_layout import SwapRopeLayout
from converter.spec import Activation, ModelSpec, Norm, Positions, QKNorm, RopeLayout, RopeSpec

GPT2 = ModelSpec(
    vocab_size=30,
    hidden_size=20,
    intermediate_size=28,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    context=32,
    norm=Norm.LAYERNORM,
    norm_eps=3e-4,
    activation=Activation.QUICK_GELU,
    gated_mlp=False,
    positions=Positions.LEARNED,
    attention_scales=(8**-0.5,) * 2,
    tied_head=False,
    norm_bias=True,
    final_norm_bias=True,
    biases=frozenset({"q", "k", "v", "o", "up", "down"}),
)
ROPE = RopeSpec(100.0, 8)
LLAMA = GPT2.replace(
    norm=Norm.RMSNORM,
    activation=Activation.SILU,
    gated_mlp=True,
    positions=Positions.ROPE,
    rope=ROPE,
    norm_bias=False,
    final_norm_bias=False,
    biases=frozenset(),
)
BASES = {"gpt2": GPT2, "llama": LLAMA}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


def rotated(**facts: Any) -> dict[str, Any]:
    return {"positions": Positions.ROPE, "rope": dataclasses.replace(ROPE, **facts)}


LEARNED = {"positions": Positions.LEARNED, "rope": None}
#: What may differ from the bases. A test below holds this to the fields of `ModelSpec`.
FACTS: dict[str, dict[str, Any]] = {
    "odd vocabulary": {"vocab_size": 31},
    "odd width": {"hidden_size": 21},
    "narrow MLP": {"intermediate_size": 13},
    "three layers": {"num_layers": 3, "attention_scales": (8**-0.5,) * 3},
    "two query heads": {"num_heads": 2, "num_kv_heads": 2},
    "grouped": {"num_kv_heads": 2},
    "narrow heads": {"head_dim": 4, "attention_scales": (0.5, 0.5), **LEARNED},
    "short context": {"context": 24, **LEARNED},
    "layernorm": {"norm": Norm.LAYERNORM},
    "rmsnorm": {"norm": Norm.RMSNORM},
    "large eps": {"norm_eps": 0.1},
    **{each.value: {"activation": each} for each in Activation},
    "gated": {"gated_mlp": True},
    "plain MLP": {"gated_mlp": False},
    "learned positions": LEARNED,
    "sinusoidal positions": {"positions": Positions.SINUSOIDAL, "rope": None},
    "rope": rotated(),
    "interleaved rope": rotated(layout=RopeLayout.INTERLEAVED),
    "partial rope": rotated(rotary_dim=4),
    "partial interleaved rope": rotated(rotary_dim=4, layout=RopeLayout.INTERLEAVED),
    "llama3 rope": rotated(scaling=LLAMA3),
    "yarn rope": rotated(scaling=YARN, layout=RopeLayout.INTERLEAVED),
    "rope not in layer 1": rotated(skipped_layers=(1,), layout=RopeLayout.INTERLEAVED),
    "scale of 1": {"attention_scales": (1.0, 1.0)},
    "scales by layer": {"attention_scales": (0.5, 0.125)},
    "tied": {"tied_head": True},
    "post-LN": {"pre_norm": False, "final_norm": False, "final_norm_bias": False},
    "post-LN and a final norm": {"pre_norm": False},
    "no final norm": {"final_norm": False, "final_norm_bias": False},
    "norm biases": {"norm_bias": True},
    "no norm biases": {"norm_bias": False},
    "final norm bias": {"final_norm_bias": True},
    "no final norm bias": {"final_norm_bias": False},
    "no biases": {"biases": frozenset()},
    "all biases": {"biases": frozenset({"q", "k", "v", "o", "up", "down"})},
    "biases of q, k and v": {"biases": frozenset({"q", "k", "v"})},
    "head bias": {"biases": frozenset({"head"})},
    "q norm per head": {"qk_norm": QKNorm.PER_HEAD},
    "q norm of all": {"qk_norm": QKNorm.FULL},
    "parallel residual": {"parallel_residual": True},
    "window": {"sliding_window": 5},
    "embedding norm": {"embedding_norm": True},
    "projected embeddings": {"embedding_size": 10},
    "residual scale": {"residual_scale": 1.7},
    "sandwich norm": {"sandwich_norm": True},
    "two ranks": {"ranks": 2},
}

#: Every op as it is, and with parameters that decide whether it changes anything.
OPS: list[Op] = [*(cls() for cls in ops().values()), SwapRopeLayout("interleaved"), GroupKVHeads(4), CutForRanks(2)]
#: Those that change something and call it exact; what a test finds of any other is that it leaves all as it is.
EXACT = {
    "cast",
    "cut_for_ranks",
    "fold_attention_scale",
    "gelu_to_swiglu",
    "layernorm_to_rmsnorm",
    "swap_rope_layout",
    "untie_head",
}


def specs() -> Iterator[tuple[str, ModelSpec]]:
    """Every base with every pair of facts; a fact beside itself is that fact alone."""
    pairs = [*combinations(FACTS, 2), *((name, name) for name in FACTS)]
    for base, (one, two) in ((base, pair) for base in BASES for pair in pairs):
        facts = FACTS[one] | FACTS[two]
        spec = BASES[base].replace(**facts)
        scales = (spec.attention_scales * 2)[: spec.num_layers]
        if "attention_scales" not in facts:
            scales = (spec.standard_attention_scale,) * spec.num_layers
        no_such_model = spec.parallel_residual and not spec.pre_norm
        if not no_such_model and (spec.rope is None or spec.rope.rotary_dim <= spec.head_dim):
            gated = "gate" if spec.gated_mlp and "up" in spec.biases else None
            biases = spec.biases | ({gated} if gated else set())
            yield f"{base}, {one}, {two}", spec.replace(attention_scales=scales, biases=frozenset(biases))


def random_model(spec: ModelSpec) -> dict[BlockRef, Block]:
    """Blocks with every parameter random, gains around 1."""
    generator = torch.Generator().manual_seed(0)

    def random(role: str, shape: tuple[int, ...]) -> torch.Tensor:
        gain = len(shape) == 1 and role.endswith("weight")
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.2) + float(gain)

    shapes = {ref: block_shapes(spec, ref) for ref in blocks(spec)}
    model = {ref: Block({role: random(role, shape) for role, shape in each.items()}) for ref, each in shapes.items()}
    if spec.tied_head and spec.embedding_size is None:
        model[HEAD]["head.weight"] = model[EMBEDDINGS]["embed.weight"]
    return model


def shapes_of(block: Block) -> dict[str, tuple[int, ...]]:
    return {role: tuple(tensor.shape) for role, tensor in block.items()}


@torch.no_grad()
def test_every_exact_op_represents_every_pair_of_facts_or_refuses() -> None:
    ids = torch.randint(30, (1, 24), generator=torch.Generator().manual_seed(1))
    faults, represented = [], set()
    for name, spec in specs():
        model = random_model(spec)
        wanted = models.run(model.__getitem__, spec, ids)
        for op in OPS:
            if op.needed(spec) and not op.exact(spec):
                continue
            try:
                after = op.change(spec)
            except UnsupportedError:
                continue
            result = {ref: op.apply(block, spec, Notes(ref), None) for ref, block in model.items()}
            represented |= {op.name} if op.needed(spec) else set()
            if any(shapes_of(block) != block_shapes(after, ref) for ref, block in result.items()):
                faults.append(f"{op.name}, {name}: other roles or shapes than its spec says")
                continue
            tied = after.tied_head and after.embedding_size is None
            if tied and not torch.equal(result[HEAD]["head.weight"], result[EMBEDDINGS]["embed.weight"]):
                faults.append(f"{op.name}, {name}: a tied head that is not the embedding")
            if stays_as_it_is(spec, model, after, result):
                continue
            error = models.relative(models.run(result.__getitem__, after, ids), wanted)
            if not error <= TOLERANCE[torch.float32]:
                faults.append(f"{op.name}, {name}: {error:.1e}")
    assert not faults, f"{len(faults)} faults, as\n" + "\n".join(faults[:40])
    assert represented == EXACT


def stays_as_it_is(
    spec: ModelSpec, model: dict[BlockRef, Block], after: ModelSpec, result: dict[BlockRef, Block]
) -> bool:
    """Whether the very same tensors are run in the very same way: storage alone may differ."""
    same = spec.replace(tied_head=False, ranks=1) == after.replace(tied_head=False, ranks=1)
    return same and all(result[ref][role] is tensor for ref, block in model.items() for role, tensor in block.items())


REFUSED = {
    "fold_attention_scale": set(),
    "untie_head": set(),
    "gelu_to_swiglu": {"gated"},
    "layernorm_to_rmsnorm": {
        "embedding norm",
        "no final norm",
        "post-LN",
        "post-LN and a final norm",
        "q norm of all",
        "q norm per head",
        "rmsnorm",
        "sandwich norm",
        "tied",
    },
}


@pytest.mark.parametrize("op", [op for op in OPS if op.name in REFUSED], ids=lambda op: op.name)
def test_an_exact_op_refuses_what_it_cannot_represent_and_nothing_else(op: Op) -> None:
    refused = set()
    for name, facts in FACTS.items():
        try:
            op.change(GPT2.replace(**facts))
        except UnsupportedError:
            refused.add(name)
    assert refused - {each.value for each in Activation} == REFUSED[op.name]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ModelSpec)])
def test_every_fact_of_a_spec_is_among_those_tried(field: str) -> None:
    assert any(field in facts for facts in FACTS.values())


# Lossy ops make no promise, but they refuse facts under which what they fit would be something else


@pytest.mark.parametrize("op", [DropBiases(), NarrowMLP(), GeluToSwiglu(refit=True), FoldFinalNormBias()])
@pytest.mark.parametrize(
    "facts",
    [{"pre_norm": False}, {"parallel_residual": True}, {"sandwich_norm": True}, {"residual_scale": 2.0}],
    ids=str,
)
def test_a_refit_needs_an_mlp_whose_output_is_just_added(op: Op, facts: dict[str, Any]) -> None:
    plain = GPT2.replace(gated_mlp=isinstance(op, NarrowMLP))
    op.change(plain)
    with pytest.raises(UnsupportedError, match=f"{op.name} does not fit"):
        op.change(plain.replace(**facts))


def test_the_bias_of_a_normed_k_is_no_noise() -> None:
    op, ref = LearnedPositionsToRope(), BlockRef("layer", 0)
    for qk_norm in (None, QKNorm.PER_HEAD):
        spec = GPT2.replace(qk_norm=qk_norm)
        bias = op.apply(random_model(spec)[ref], spec, Notes(ref), None)["k.bias"]
        assert bool(bias.any()) == (qk_norm is not None)
