"""Norms behind the sublayers: what the reference model runs, what a conversion refuses, and post_ln_to_pre_ln."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import Given
from torch import Tensor
from torch.nn.functional import layer_norm
from transformers import AutoModelForCausalLM
from transformers.models.ctrl.modeling_ctrl import positional_encoding
from walks import walk

from converter import reference
from converter.blocks import EMBEDDINGS, HEAD, Block, BlockRef, block_shapes
from converter.conversion.plan import make_plan
from converter.conversion.recipe import Recipe, load_recipe
from converter.conversion.run import convert
from converter.errors import UnsupportedError
from converter.families.opened import SourceModel
from converter.ops import Calibration, Notes, Op
from converter.ops.fit_blocks import FitBlocks
from converter.ops.learned_positions_to_rope import LearnedPositionsToRope
from converter.ops.post_ln_to_pre_ln import PostLNToPreLN
from converter.ops.untie_head import UntieHead
from converter.spec import ModelSpec, Positions

MOVE = PostLNToPreLN()
LAYER = BlockRef("layer", 0)


def opened(folder: Path, **facts: Any) -> SourceModel:
    """A jittered openai-gpt whose sublayers write little enough to leave something of what they are given."""
    model = models.openai_gpt(n_layer=2, **facts)
    with torch.no_grad():
        for block in model.transformer.h:
            for linear in (block.attn.c_proj, block.mlp.c_proj):
                linear.weight *= 0.3
    return SourceModel.open(models.save(model, folder))


def random_block(spec: ModelSpec, ref: BlockRef, seed: int = 0) -> Block:
    """Every role of a block, random in fp64; gains around 1."""
    generator = torch.Generator().manual_seed(seed)

    def values(role: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        return 0.2 * noise + float(role.endswith("norm.weight"))

    return Block({role: values(role, shape) for role, shape in block_shapes(spec, ref).items()})


# Facts that no shipped family has: the reference model runs them, and a conversion refuses or represents them


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    """A post-LN spec, untied."""
    return opened(tmp_path).spec.replace(tied_head=False)


@pytest.fixture
def states(spec: ModelSpec) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(2, 24, spec.hidden_size, generator=generator, dtype=torch.float64)


def normed(block: Block, norm: str, states: Tensor, eps: float) -> Tensor:
    return layer_norm(states, states.shape[-1:], block[f"{norm}.weight"], block[f"{norm}.bias"], eps)


def test_deepnorm_scales_what_passes_a_sublayer_by(spec: ModelSpec, states: Tensor) -> None:
    deep = spec.replace(residual_scale=2.5)
    block = random_block(deep, LAYER)
    after = normed(block, "attn_norm", 2.5 * states + reference.run_attention(block, deep, 0, states), spec.norm_eps)
    wanted = normed(block, "mlp_norm", 2.5 * after + reference.run_mlp(block, deep, after), spec.norm_eps)
    torch.testing.assert_close(reference.run_layer(block, deep, 0, states), wanted)
    assert models.relative(reference.run_layer(block, spec, 0, states), wanted) > 0.1


def test_sandwich_norms_stand_behind_the_sublayers_too(spec: ModelSpec, states: Tensor) -> None:
    sandwich = spec.replace(pre_norm=True, sandwich_norm=True)
    block, eps = random_block(sandwich, LAYER), spec.norm_eps
    read = normed(block, "attn_norm", states, eps)
    middle = states + normed(block, "attn_out_norm", reference.run_attention(block, sandwich, 0, read), eps)
    read = normed(block, "mlp_norm", middle, eps)
    wanted = middle + normed(block, "mlp_out_norm", reference.run_mlp(block, sandwich, read), eps)
    torch.testing.assert_close(reference.run_layer(block, sandwich, 0, states), wanted)


def test_an_embedding_norm_norms_tokens_and_positions_together(spec: ModelSpec, ids: Tensor) -> None:
    with_norm = spec.replace(embedding_norm=True)
    block = random_block(with_norm, EMBEDDINGS)
    bare = reference.run_embeddings(block, spec, ids)
    wanted = normed(block, "embed_norm", bare, spec.norm_eps)
    torch.testing.assert_close(reference.run_embeddings(block, with_norm, ids), wanted)


def test_sinusoidal_positions_are_those_of_ctrl(spec: ModelSpec, ids: Tensor) -> None:
    sines = spec.replace(positions=Positions.SINUSOIDAL)
    block = random_block(sines, EMBEDDINGS)
    assert set(block) == {"embed.weight"}
    wanted = positional_encoding(spec.context, spec.hidden_size, torch.float64)
    torch.testing.assert_close(reference.position_table(block, sines), wanted)
    states = reference.run_embeddings(block, sines, ids)
    torch.testing.assert_close(states, block["embed.weight"][ids] + wanted)
    rope = LearnedPositionsToRope()
    folded = rope.apply(block, sines, Notes(EMBEDDINGS), None)
    torch.testing.assert_close(folded["embed.weight"], block["embed.weight"] + wanted.mean(dim=0))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"pre_norm": False}, "its norms stand after the sublayers. Add post_ln_to_pre_ln to the recipe"),
        ({"final_norm": False}, "it has no final norm"),
        ({"embedding_norm": True}, "its embeddings are normed before the first layer"),
        ({"sandwich_norm": True}, "what its sublayers write is normed"),
        ({"residual_scale": 2.0}, "its residual stream is scaled by 2"),
        ({"parallel_residual": True}, "its attention and MLP are parallel"),
        ({"positions": Positions.SINUSOIDAL, "rope": None}, "its positions are sinusoidal"),
        ({"embedding_size": 8, "tied_head": True}, "its head is tied behind a projection"),
    ],
    ids=str,
)
@pytest.mark.parametrize("target", ["llama", "gpt2"])
def test_a_target_says_what_it_cannot_hold(facts: dict[str, Any], words: str, target: str, tmp_path: Path) -> None:
    make = models.llama if target == "llama" else models.gpt2
    folder = models.save(make(), tmp_path)
    source = SourceModel.open(folder)
    source.spec = source.spec.replace(**facts)
    with pytest.raises(UnsupportedError) as caught:
        make_plan(source, Recipe("r", target, ()))
    if target == "llama":
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"pre_norm": True}, "pre-LN). Leave it out, as recipe gpt2-to-llama does"),
        ({"final_norm": True}, "behind the last layer's norm stands another one"),
        ({"sandwich_norm": True}, "what the sublayers write is normed"),
        ({"tied_head": True}, "the head is tied to the embeddings, which are to be scaled. Put untie_head before it"),
    ],
    ids=str,
)
def test_the_op_says_what_it_does_not_fit(facts: dict[str, Any], words: str, spec: ModelSpec) -> None:
    with pytest.raises(UnsupportedError) as caught:
        MOVE.change(spec.replace(**facts))
    assert words in str(caught.value)


# The op


@dataclass(frozen=True)
class MovedOnly(Op):
    """The norms moved, and nothing scaled or refitted."""

    name = "moved_only"
    summary = "for comparison"
    calibrated = True

    def exact(self, spec: ModelSpec) -> bool:
        return False

    def change(self, spec: ModelSpec) -> ModelSpec:
        return MOVE.change(spec)

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        moved = MOVE.apply(block, spec, notes, calibration)
        return (
            moved
            if notes.ref.kind != "layer"
            else Block({**moved, **{r: t for r, t in block.items() if "norm" not in r}})
        )


def test_scaled_writers_and_a_refitted_down_keep_what_moved_norms_lose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(tmp_path)
    naive = walk(source, UntieHead(), MovedOnly(), target="gpt2").kl("moved_only")
    whole = walk(source, UntieHead(), MOVE, target="gpt2")
    monkeypatch.setattr("converter.ops.post_ln_to_pre_ln.refit_down", lambda block, *_: block)
    scaled = walk(source, UntieHead(), MOVE, target="gpt2").kl(MOVE.name)
    assert whole.kl(MOVE.name) < 0.7 * scaled
    assert scaled < 0.7 * naive
    errors = whole.errors(MOVE.name)
    assert all(0 < error < 0.5 for what in ("the MLP reads", "the next layer reads") for error in errors[what])
    assert 0 < errors["the attention reads"][0] < 0.5
    assert errors["the attention reads"][1] == 0


def test_every_norm_moves_before_what_reads_it(spec: ModelSpec, states: Tensor) -> None:
    with_norm = spec.replace(embedding_norm=True)
    source = {
        ref: random_block(with_norm, ref, seed) for seed, ref in enumerate((EMBEDDINGS, LAYER, BlockRef("layer", 1)))
    }
    given = Given(states, source)
    moved = {ref: MOVE.apply(block, with_norm, Notes(ref), given) for ref, block in source.items()}
    head = MOVE.apply(Block({"head.weight": states[0]}), with_norm, Notes(HEAD), given)
    assert set(moved[EMBEDDINGS]) == {"embed.weight", "positions.weight"}
    for kind in ("weight", "bias"):
        was = [source[ref][f"{norm}.{kind}"] for ref, norm in _NORMS]
        now = [moved[LAYER][f"attn_norm.{kind}"], moved[LAYER][f"mlp_norm.{kind}"]]
        now += [moved[BlockRef("layer", 1)][f"attn_norm.{kind}"], head[f"final_norm.{kind}"]]
        for position, place in enumerate((0, 1, 2, 4)):
            assert torch.equal(now[position], was[place])


def test_the_stream_is_brought_to_a_rms_of_one_and_nothing_else_changes(spec: ModelSpec, states: Tensor) -> None:
    block = random_block(spec, EMBEDDINGS)
    moved = MOVE.apply(block, spec, Notes(EMBEDDINGS), Given(states, {EMBEDDINGS: block}))
    factor = float(moved["embed.weight"][0, 0] / block["embed.weight"][0, 0])
    assert factor == 2.0 ** round(torch.tensor(factor).log2().item())
    assert all(torch.equal(moved[role], factor * table) for role, table in block.items())
    assert 2**-0.5 <= float(moved["embed.weight"].square().mean().sqrt()) <= 2**0.5
    # The first layer reads bare embeddings: what the scale is must be nothing to what it reads and writes.
    layer = random_block(spec, LAYER)
    after = []
    for scale in (1.0, 0.06):
        embeddings = Block({role: scale * table for role, table in block.items()})
        given = Given(states, {EMBEDDINGS: embeddings})
        table = MOVE.apply(embeddings, spec, Notes(EMBEDDINGS), given)["embed.weight"]
        stream = Given(scale * states * (table / embeddings["embed.weight"])[0, 0], given.blocks)
        notes = Notes(LAYER)
        result = MOVE.apply(layer, spec, notes, stream)
        gains = result["attn_norm.weight"]
        sizes = (scale * states).std(-1, correction=0)
        torch.testing.assert_close(gains, sizes.mean().expand(gains.shape))
        after.append(notes.errors["the attention reads"])
    assert after[0] == pytest.approx(after[1], rel=1e-3)


def test_sines_become_a_table(spec: ModelSpec, states: Tensor) -> None:
    sines = spec.replace(positions=Positions.SINUSOIDAL)
    block = random_block(sines, EMBEDDINGS)
    moved = MOVE.apply(block, sines, Notes(EMBEDDINGS), Given(states, {EMBEDDINGS: block}))
    ids = torch.arange(2 * 9).view(2, 9)
    factor = moved["embed.weight"][0, 0] / block["embed.weight"][0, 0]
    given = reference.run_embeddings(block, sines, ids)
    torch.testing.assert_close(reference.run_embeddings(moved, MOVE.change(sines), ids), factor * given)


_NORMS = (
    (EMBEDDINGS, "embed_norm"),
    (LAYER, "attn_norm"),
    (LAYER, "mlp_norm"),
    (BlockRef("layer", 1), "attn_norm"),
    (BlockRef("layer", 1), "mlp_norm"),
)


def test_deepnorm_goes_into_the_writers(spec: ModelSpec, states: Tensor) -> None:
    # What passes by outweighs what is added, so every sum is of nearly one size, and gains of 1 leave nothing over.
    deep = spec.replace(residual_scale=20.0, embedding_norm=True)
    source = {ref: random_block(deep, ref, seed) for seed, ref in enumerate((EMBEDDINGS, LAYER))}
    for block in source.values():
        block.update({role: torch.ones_like(gain) for role, gain in block.items() if role.endswith("norm.weight")})
    given = Given(states, source)
    notes = Notes(LAYER)
    moved = MOVE.apply(source[LAYER], deep, notes, given)
    assert MOVE.change(deep).residual_scale == 1
    assert notes.errors["the attention reads"] == 0
    assert notes.errors["the next layer reads"] < 0.02
    read = reference.run_layer(moved, MOVE.change(deep), 0, states)
    right = reference.run_layer(source[LAYER], deep, 0, normed(source[EMBEDDINGS], "embed_norm", states, deep.norm_eps))
    assert models.relative(normed(source[LAYER], "mlp_norm", read, deep.norm_eps), right) < 0.05
    plain = MOVE.apply(source[LAYER], deep.replace(residual_scale=1.0), Notes(LAYER), given)
    read = reference.run_layer(plain, MOVE.change(deep), 0, states)
    assert models.relative(normed(source[LAYER], "mlp_norm", read, deep.norm_eps), right) > 0.2


# What comes after it


def test_fitting_takes_back_what_is_left(tmp_path: Path) -> None:
    fit = FitBlocks(steps=80, rate=3e-3, sequences=4, passes=10)
    walked = walk(opened(tmp_path), UntieHead(), MovedOnly(), fit, target="gpt2")
    assert walked.kl("fit_blocks") < 0.3 * walked.kl("moved_only")
    errors = walked.errors("fit_blocks")
    assert all(after < 0.7 * before for before, after in zip(errors["before"], errors["after"], strict=True))


def test_the_steps_after_it_are_exact_where_they_say_so(tmp_path: Path) -> None:
    steps = load_recipe("postln-to-llama", ["fit_blocks.steps=0"]).steps
    walked = walk(opened(tmp_path), *steps, rows=16)
    step = [each.op.name for each in walked.plan.steps].index("layernorm_to_rmsnorm")
    assert walked.plan.steps[step].exact
    assert 0 < walked.findings.changes[step] <= 1e-5


@dataclass(frozen=True)
class Rescale(Op):
    """Multiply the stream of a pre-LN model, which its norms ignore."""

    factor: float

    name = "rescale"
    summary = "for tests"

    def exact(self, spec: ModelSpec) -> bool:
        return False

    def change(self, spec: ModelSpec) -> ModelSpec:
        return spec.replace(norm_eps=spec.norm_eps * self.factor**2)

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        writers = ("embed.weight", "positions.weight", "o.weight", "o.bias", "down.weight", "down.bias")
        return Block({role: self.factor * t if role in writers else t for role, t in block.items()})


def test_what_the_next_layer_reads_is_fitted_whatever_the_scale_of_the_stream(tmp_path: Path) -> None:
    source, fit = opened(tmp_path), FitBlocks(steps=1, rate=1e-9)
    errors = [
        walk(source, UntieHead(), MOVE, *between, fit, target="gpt2", rows=16).errors("fit_blocks")["before"]
        for between in ((), (Rescale(8.0),))
    ]
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)
    assert all(error < 0.1 for error in errors[0])


@pytest.mark.parametrize("recipe", ["postln-to-llama", "postln-to-llama-compact"])
@pytest.mark.parametrize("make", [models.openai_gpt, models.opt], ids=["openai_gpt", "opt"])
def test_the_recipes_foresee_every_tensor(recipe: str, make: Any, tmp_path: Path) -> None:
    facts = {"do_layer_norm_before": False, "word_embed_proj_dim": 20} if make is models.opt else {}
    folder = models.save(make(**facts), tmp_path)
    narrow = ["narrow_mlp.multiple_of=16"] if "compact" in recipe else []
    steps = load_recipe(recipe, ["fit_blocks.steps=1", *narrow]).steps
    walked = walk(SourceModel.open(folder), *steps, rows=16)
    assert {name: tuple(tensor.shape) for name, tensor in walked.tensors.items()} == {
        name: shape for name, (shape, _) in walked.plan.tensors.items()
    }
    assert bool(walked.plan.target_spec.biases) is ("compact" not in recipe)


def test_a_conversion_from_files_to_files(tmp_path: Path, text: Path, ids: Tensor) -> None:
    folder = opened(tmp_path / "source").checkpoint.path
    report = convert(folder, tmp_path / "llama", text=text, overrides=["fit_blocks.steps=4"], dtype="float32")
    assert report.recipe == "postln-to-llama"
    assert report.verification is not None
    assert report.verification.total.kl == pytest.approx(report.steps[-1].comparison.total.kl, rel=0.01)  # type: ignore[union-attr]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    assert loaded.config.model_type == "llama"
    assert models.relative(models.reference_logits(tmp_path / "llama", ids), models.logits_of(loaded, ids)) <= 1e-5
