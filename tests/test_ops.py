"""Ops: exact ones keep the function to rounding, lossy ones do their stated damage, and the naive ways would show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import TOLERANCE, Converted, Given
from torch import Tensor

from converter.blocks import EMBEDDINGS, HEAD, Block, BlockRef, blocks
from converter.conversion.plan import make_plan
from converter.conversion.recipe import Recipe, load_recipe
from converter.conversion.walk import Walk
from converter.errors import UnsupportedError
from converter.families.opened import SourceModel
from converter.ops import Notes, Op, ops
from converter.ops.cast import Cast
from converter.ops.fold_attention_scale import FoldAttentionScale
from converter.ops.fold_final_norm_bias import FoldFinalNormBias
from converter.ops.gelu_to_swiglu import GeluToSwiglu
from converter.ops.layernorm_to_rmsnorm import LayerNormToRMSNorm
from converter.ops.learned_positions_to_rope import LearnedPositionsToRope
from converter.ops.untie_head import UntieHead
from converter.reference import run_final_norm, run_mlp
from converter.spec import Norm, Positions

FOLD, UNTIE, RMSNORM = FoldAttentionScale(), UntieHead(), LayerNormToRMSNorm()


def opened(folder: Path, **facts: Any) -> SourceModel:
    return SourceModel.open(models.save(models.gpt2(**facts), folder))


@pytest.fixture
def source(tmp_path: Path) -> SourceModel:
    """Tied, scaled by layer: every exact op has something to do."""
    return opened(tmp_path, scale_attn_by_inverse_layer_idx=True)


def head_states(model: Converted, ids: Tensor) -> Given:
    """What enters the head on some ids, (N, D)."""
    head = model.blocks[HEAD]["head.weight"]
    as_it_is = Block({"head.weight": torch.eye(head.shape[1], dtype=head.dtype)})
    spec = model.spec.replace(final_norm=False)
    states = models.run(lambda ref: as_it_is if ref == HEAD else model.blocks[ref], spec, ids)
    return Given(states)


def kl(source: Tensor, other: Tensor) -> float:
    """Nats per token."""
    p, q = source.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


# Exact ops

EXACT: dict[str, tuple[dict[str, Any], tuple[Op, ...]]] = {
    "nothing to fold": ({}, (FOLD,)),
    "scale by layer": ({"scale_attn_by_inverse_layer_idx": True}, (FOLD,)),
    "no scale": ({"scale_attn_weights": False}, (FOLD,)),
    "untie": ({}, (UNTIE,)),
    "nothing to untie": ({"tie_word_embeddings": False}, (UNTIE,)),
    "rmsnorm": ({"tie_word_embeddings": False}, (RMSNORM,)),
    "swiglu of silu": ({"activation_function": "silu"}, (GeluToSwiglu(),)),
    "swiglu of quick_gelu": ({"activation_function": "quick_gelu"}, (GeluToSwiglu(),)),
    "all": (
        {"scale_attn_by_inverse_layer_idx": True, "activation_function": "quick_gelu"},
        (FOLD, UNTIE, RMSNORM, GeluToSwiglu()),
    ),
    "all, in another order": (
        {"scale_attn_weights": False, "activation_function": "silu"},
        (GeluToSwiglu(), UNTIE, RMSNORM, FOLD),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", EXACT)
def test_exact_ops_keep_what_transformers_computes(case: str, dtype: torch.dtype, tmp_path: Path, ids: Tensor) -> None:
    facts, steps = EXACT[case]
    model = models.gpt2(**facts)
    source = SourceModel.open(models.save(model, tmp_path))
    converted = Converted(source, dtype).after(*steps)
    assert all(step.exact(source.spec) for step in steps)
    assert models.relative(converted.logits(ids), models.logits_of(model, ids, dtype)) <= TOLERANCE[dtype]


def test_an_exact_op_is_called_exact_and_a_lossy_one_lossy(source: SourceModel) -> None:
    spec = source.spec
    assert [op.exact(spec) for op in (FOLD, UNTIE, RMSNORM, Cast("float32"))] == [True] * 4
    lossy = (FoldFinalNormBias(), GeluToSwiglu(), LearnedPositionsToRope(), Cast("bfloat16"), Cast("float16"))
    assert [op.exact(spec) for op in lossy] == [False] * 5


def test_no_op_changes_a_tensor_in_place(source: SourceModel, ids: Tensor) -> None:
    model = Converted(source)
    before = {ref: {role: tensor.clone() for role, tensor in block.items()} for ref, block in model.blocks.items()}
    originals = dict(model.blocks)
    model.after(FOLD, UNTIE, RMSNORM)
    model.after(FoldFinalNormBias(), calibration=head_states(model, ids))
    model.after(GeluToSwiglu(3), LearnedPositionsToRope(), Cast("float16"))
    for ref, block in originals.items():
        assert block.keys() == before[ref].keys()
        assert all(torch.equal(block[role], before[ref][role]) for role in block)


def uncentred(model: Converted) -> Converted:
    """LayerNorm to RMSNorm with the biases folded and nothing centred."""
    original = dict(model.blocks)
    model.after(RMSNORM)
    model.blocks[EMBEDDINGS] = original[EMBEDDINGS]
    for ref, block in model.blocks.items():
        writers = ("o.weight", "o.bias", "down.weight", "down.bias")
        model.blocks[ref] = Block({role: original[ref][role] if role in writers else t for role, t in block.items()})
    return model


def norm_biases_forgotten(model: Converted) -> Converted:
    for ref, block in model.blocks.items():
        model.blocks[ref] = Block(
            {r: t * 0 if r in ("attn_norm.bias", "mlp_norm.bias") else t for r, t in block.items()}
        )
    return model.after(RMSNORM)


def write_bias_not_centred(model: Converted) -> Converted:
    original = dict(model.blocks)
    model.after(RMSNORM)
    for ref in blocks(model.spec):
        if ref.kind == "layer":
            model.blocks[ref] = Block({**model.blocks[ref], "down.bias": original[ref]["down.bias"]})
    return model


def head_centred_with_the_embedding(model: Converted) -> Converted:
    model.after(RMSNORM)
    model.blocks[HEAD] = Block({**model.blocks[HEAD], "head.weight": model.blocks[EMBEDDINGS]["embed.weight"]})
    return model


def eps_of_llama(model: Converted) -> Converted:
    model.after(RMSNORM)
    model.spec = model.spec.replace(norm_eps=1e-6)
    return model


def scale_only_in_the_weight(model: Converted) -> Converted:
    original = dict(model.blocks)
    model.after(FOLD)
    for ref in blocks(model.spec):
        if ref.kind == "layer":
            model.blocks[ref] = Block({**model.blocks[ref], "q.bias": original[ref]["q.bias"]})
    return model


@pytest.mark.parametrize(
    ("naive", "least"),
    [
        (uncentred, 0.02),
        (norm_biases_forgotten, 0.1),
        (write_bias_not_centred, 1e-3),
        (head_centred_with_the_embedding, 0.02),
        (eps_of_llama, 1e-5),
        (scale_only_in_the_weight, 0.05),
    ],
)
def test_a_naive_way_would_show(naive: Any, least: float, source: SourceModel, ids: Tensor) -> None:
    wanted = Converted(source).logits(ids)
    assert models.relative(naive(Converted(source).after(UNTIE)).logits(ids), wanted) > least


# Final norm bias


def test_the_final_norm_bias_is_folded_by_what_the_head_reads(source: SourceModel) -> None:
    fitted, held_out = models.random_ids(40, seed=2), models.random_ids(20, seed=3)

    def ready() -> Converted:
        return Converted(source, torch.float32).after(FOLD, UNTIE, RMSNORM)

    states = head_states(ready(), fitted)

    def damage(ids: Tensor, calibration: Given | None = states, **parameters: Any) -> float:
        folded = ready().after(FoldFinalNormBias(**parameters), calibration=calibration)
        assert "final_norm.bias" not in folded.blocks[HEAD]
        return kl(ready().logits(ids), folded.logits(ids))

    dropped = damage(held_out, None)
    assert dropped > 0.05
    assert damage(held_out) < dropped / 100
    assert damage(fitted) < damage(fitted, iterations=0)  # Newton's method beats the least squares it starts from


def test_a_state_of_constant_projection_is_folded_exactly(source: SourceModel, ids: Tensor) -> None:
    # Where some v.h is 1 on every state, W + (W b) v^T is the bias itself.
    head = Converted(source).after(UNTIE, RMSNORM).blocks[HEAD]
    spec = source.spec.replace(tied_head=False, norm=Norm.RMSNORM)
    states = torch.randn(500, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    states[:, 0] = 0
    states[:, 0] = states.square().sum(-1).sqrt()  # a constant share of the norm
    spec = spec.replace(norm_eps=1e-12)
    folded = FoldFinalNormBias(ridge=1e-12).apply(head, spec, Notes(HEAD), Given(states[None]))
    normed = run_final_norm(folded, spec.replace(final_norm_bias=False), states)
    wanted = (normed + head["final_norm.bias"]) @ head["head.weight"].T
    assert models.relative(normed @ folded["head.weight"].T, wanted) < 1e-6


# GELU to SwiGLU


def mlp_error(source: SourceModel, units: int, x: Tensor) -> tuple[float, float]:
    """Largest error of a layer's MLP on normed states, and the bound on it for an error of 1 in the activation."""
    ref = BlockRef("layer", 1)
    before, after = Converted(source), Converted(source).after(GeluToSwiglu(units))
    error = run_mlp(after.blocks[ref], after.spec, x) - run_mlp(before.blocks[ref], before.spec, x)
    return float(error.abs().max()), float(before.blocks[ref]["down.weight"].abs().sum(-1).max())


@pytest.mark.parametrize(
    ("activation", "units", "largest"),
    [
        ("gelu_new", 1, 1.70e-2),
        ("gelu_new", 2, 7.6e-3),
        ("gelu_new", 3, 3.1e-4),
        ("gelu", 1, 1.66e-2),
        ("gelu", 2, 7.2e-3),
        ("gelu", 3, 2.9e-4),
        ("relu", 1, 4.4e-3),
        ("quick_gelu", 1, 1e-13),
        ("silu", 1, 1e-13),
    ],
)
def test_the_damage_to_an_mlp_is_within_the_error_of_its_fit(
    activation: str, units: int, largest: float, tmp_path: Path
) -> None:
    x = torch.randn(500, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    error, bound = mlp_error(opened(tmp_path, activation_function=activation), units, x)
    assert error <= largest * bound
    if largest > 1e-6:
        assert error > largest * bound / 100


def test_more_units_a_neuron_do_less_damage(source: SourceModel, ids: Tensor) -> None:
    wanted = Converted(source).logits(ids)
    damage = [kl(wanted, Converted(source).after(GeluToSwiglu(units)).logits(ids)) for units in (1, 2, 3)]
    assert damage[0] < 6e-3
    assert damage[1] < damage[0] / 2
    assert damage[2] < damage[1] / 100
    assert damage[2] < 1e-5


def test_the_fit_of_another_gelu_would_show(tmp_path: Path, ids: Tensor) -> None:
    # The two GELUs differ by 4.7e-4 at most; the fit with three units is finer than that.
    damage = {}
    for name in ("gelu", "gelu_new"):
        source = opened(tmp_path / name, activation_function=name)
        damage[name] = Converted(source).after(GeluToSwiglu(3)).logits(ids)
    wanted = Converted(SourceModel.open(tmp_path / "gelu")).logits(ids)
    assert kl(wanted, damage["gelu"]) < kl(wanted, damage["gelu_new"]) / 1.5


# Learned positions to RoPE


def test_the_k_bias_does_nothing_before_rope(source: SourceModel, ids: Tensor) -> None:
    wanted = Converted(source).logits(ids)

    def without(role: str) -> Tensor:
        model = Converted(source)
        for ref, block in model.blocks.items():
            model.blocks[ref] = Block({name: t * 0 if name == role else t for name, t in block.items()})
        return model.logits(ids)

    assert models.relative(without("k.bias"), wanted) <= 1e-10
    assert models.relative(without("q.bias"), wanted) > 1e-2


def test_rope_keeps_the_mean_position_and_clears_the_k_bias(source: SourceModel, ids: Tensor) -> None:
    before = Converted(source).after(FOLD, UNTIE, RMSNORM)
    blocks_before = dict(before.blocks)
    after = before.after(LearnedPositionsToRope(theta=500.0))
    positions = blocks_before[EMBEDDINGS]["positions.weight"]
    shift = after.blocks[EMBEDDINGS]["embed.weight"] - blocks_before[EMBEDDINGS]["embed.weight"]
    assert (shift - positions.mean(0)).abs().max() <= 1e-12
    assert "positions.weight" not in after.blocks[EMBEDDINGS]
    for ref, block in after.blocks.items():
        changed = {role for role in block if not torch.equal(block[role], blocks_before[ref][role])}
        assert changed == {"layer": {"k.bias"}, "head": set(), "embeddings": {"embed.weight"}}[ref.kind]
        assert not block.get("k.bias", torch.zeros(1)).any()
    (lost,) = after.notes[EMBEDDINGS].dropped
    assert lost.norm == pytest.approx(float((positions - positions.mean(0)).norm()), rel=1e-6)
    assert after.spec.positions is Positions.ROPE
    assert after.spec.rope is not None
    assert (after.spec.rope.theta, after.spec.rope.rotary_dim) == (500.0, 16)
    assert models.relative(after.logits(ids)[:, 5:], Converted(source).logits(ids)[:, 5:]) > 1e-2


# Biases


def test_seven_biases_a_layer_and_every_dropped_one_reported(source: SourceModel, ids: Tensor) -> None:
    model = Converted(source).after(FOLD, UNTIE, RMSNORM)
    wanted = {
        **{f"layers.{layer}.k.bias": model.blocks[BlockRef("layer", layer)]["k.bias"] for layer in range(3)},
        "head.final_norm.bias": model.blocks[HEAD]["final_norm.bias"],
    }
    model.after(FoldFinalNormBias(), calibration=head_states(model, ids))
    model.after(GeluToSwiglu(2), LearnedPositionsToRope())
    for ref in blocks(model.spec):
        biases = {role for role in model.blocks[ref] if role.endswith(".bias")}
        assert biases == (
            {f"{part}.bias" for part in ("q", "k", "v", "o", "gate", "up", "down")} if ref.kind == "layer" else set()
        )
    dropped = {drop.name: drop.norm for notes in model.notes.values() for drop in notes.dropped if "bias" in drop.name}
    assert dropped == {name: pytest.approx(float(bias.norm()), rel=1e-9) for name, bias in wanted.items()}


# Cast


def test_a_cast_counts_what_underflows_and_refuses_what_overflows() -> None:
    notes = Notes(BlockRef("layer", 2), origins={"up.weight": "h.2.mlp.c_fc.weight"})
    small = Block({"up.weight": torch.tensor([1.0, 1e-9, -1e-9, 0.0]), "down.weight": torch.tensor([1e-9])})
    result = Cast("float16").apply(small, None, notes, None)  # type: ignore[arg-type]
    assert result["up.weight"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert result["up.weight"].dtype == torch.float16
    assert notes.facts == {"underflowed": 3}
    large = Block({"up.weight": torch.tensor([7e4, -7e4, 6e4])})
    with pytest.raises(UnsupportedError) as caught:
        Cast("float16").apply(large, None, notes, None)  # type: ignore[arg-type]
    assert "2 of 3 values of layers.2.up.weight (from h.2.mlp.c_fc.weight) overflow in float16" in str(caught.value)
    assert "largest is 7e+04" in str(caught.value)
    assert Cast("bfloat16").apply(large, None, notes, None)["up.weight"].isfinite().all()  # type: ignore[arg-type]


# What does not fit


@pytest.mark.parametrize(
    ("op", "facts", "words"),
    [
        (RMSNORM, {"tied_head": True}, "the head is tied to the embeddings, which are to be centred. Put untie_head"),
        (RMSNORM, {"norm": Norm.RMSNORM}, "has RMSNorm already, and centring would change it"),
        (RMSNORM, {"pre_norm": False}, "(post-LN). Put post_ln_to_pre_ln before it, as recipe postln-to-llama does"),
        (GeluToSwiglu(), {"gated_mlp": True}, "the MLP is gated already"),
        (
            FoldFinalNormBias(),
            {"tied_head": True},
            "the head is tied to the embeddings, and is to change. Put untie_head",
        ),
        (LearnedPositionsToRope(), {"tied_head": True}, "to take the mean position. Put untie_head before it"),
        (LearnedPositionsToRope(), {"positions": Positions.ROPE}, "the model adds no positions to its embeddings"),
        (LearnedPositionsToRope(), {"head_dim": 15}, "an even head_dim, and it is 15"),
    ],
)
def test_an_op_that_does_not_fit_says_why(op: Op, facts: dict[str, Any], words: str, source: SourceModel) -> None:
    spec = source.spec.replace(**{"tied_head": False, **facts})
    with pytest.raises(UnsupportedError) as caught:
        op.change(spec)
    assert str(caught.value).startswith(f"{op.name} does not fit: ")
    assert words in str(caught.value)


def test_units_without_a_fit_name_those_that_have_one(tmp_path: Path) -> None:
    spec = opened(tmp_path, activation_function="relu").spec
    with pytest.raises(UnsupportedError, match=r"no fit of relu with 2 units a neuron\. Set units to 1"):
        GeluToSwiglu(2).change(spec)


# Plans on meta tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("units", [1, 2, 3])
def test_a_dry_run_foresees_every_tensor(units: int, dtype: Any, source: SourceModel) -> None:
    plan = make_plan(source, load_recipe("gpt2-to-llama", [f"gelu_to_swiglu.units={units}"]), dtype)
    found = {name: tensor for _, tensors in Walk(plan) for name, tensor in tensors.items()}
    assert {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in found.items()} == plan.tensors
    assert plan.target_spec.intermediate_size == 80 * units
    assert plan.output_bytes == sum(tensor.nbytes for tensor in found.values())
    assert len(plan.tensors) == 3 + 3 * (7 + 7 + 2)


def test_a_group_of_biases_is_filled_with_zeros(tmp_path: Path, ids: Tensor) -> None:
    # A LLaMA has all of q, k, v, o's biases or none.
    source = SourceModel.open(models.save(models.llama(attention_bias=True), tmp_path))
    source.spec = source.spec.replace(biases=frozenset({"q"}))
    plan = make_plan(source, Recipe("r", "llama", ()))
    found = {name: tensor for _, tensors in Walk(plan) for name, tensor in tensors.items()}
    assert found.keys() == plan.tensors.keys()
    biases = {name: bool(tensor.any()) for name, tensor in found.items() if name.endswith(".bias")}
    assert biases == {
        f"model.layers.{layer}.self_attn.{part}_proj.bias": part == "q" for layer in range(2) for part in "qkvo"
    }


def test_every_op_says_what_it_is() -> None:
    for name, cls in ops().items():
        assert cls.name == name
        assert cls.summary
