"""opt: transformers' own function in every variant, its tables and projections, its files and recipes, ReLU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import TOLERANCE, Converted
from torch import Tensor
from walks import text as random_text

from converter.blocks import EMBEDDINGS, HEAD, BlockRef
from converter.conversion.recipe import Recipe, load_recipe
from converter.conversion.run import plan_conversion
from converter.conversion.walk import Walk
from converter.errors import CheckpointError, UnsupportedError
from converter.families.mapping import Ones, Skipped
from converter.families.opened import SourceModel
from converter.measure.models import load_transformers
from converter.ops.fold_attention_scale import FoldAttentionScale
from converter.ops.gelu_to_swiglu import GeluToSwiglu
from converter.ops.layernorm_to_rmsnorm import LayerNormToRMSNorm
from converter.ops.untie_head import UntieHead

PROJECTED = {"word_embed_proj_dim": 20}
POST_LN = {"do_layer_norm_before": False}
NO_GAINS = {"layer_norm_elementwise_affine": False}

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "projected": PROJECTED,
    "projected, untied": PROJECTED | {"tie_word_embeddings": False},
    "post-LN": POST_LN,
    "post-LN, projected": POST_LN | PROJECTED,
    "no final norm": {"_remove_final_layer_norm": True},
    "no biases": {"enable_bias": False},
    "norms without parameters": NO_GAINS,
    "as Galactica": NO_GAINS | {"enable_bias": False, "activation_function": "gelu"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_computes_what_transformers_computes(variant: str, dtype: torch.dtype, tmp_path: Path, ids: Tensor) -> None:
    model = models.opt(**VARIANTS[variant])
    found = models.reference_logits(models.save(model, tmp_path), ids, dtype)
    assert models.relative(found, models.logits_of(model, ids, dtype)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "post-LN" not in name and "no final" not in name])
def test_the_exact_steps_keep_it(variant: str, tmp_path: Path, ids: Tensor) -> None:
    model = models.opt(**VARIANTS[variant])
    source = SourceModel.open(models.save(model, tmp_path))
    converted = Converted(source, torch.float32).after(FoldAttentionScale(), UntieHead(), LayerNormToRMSNorm())
    assert models.relative(converted.logits(ids), models.logits_of(model, ids)) <= 1e-5


def test_positions_start_at_row_2(tmp_path: Path, ids: Tensor) -> None:
    model = models.opt()
    folder = models.save(model, tmp_path)
    table = model.model.decoder.embed_positions.weight
    assert len(table) == models.CONTEXT + 2
    read = SourceModel.open(folder).read_block(EMBEDDINGS, torch.float32)["positions.weight"]
    assert torch.equal(read, table[2:])
    with torch.no_grad():
        table[2:] = table[:-2].clone()
    assert models.relative(models.reference_logits(folder, ids), models.logits_of(model, ids)) > 0.1


def test_a_table_gets_its_skipped_rows_back_and_a_missing_gain_must_stay_one() -> None:
    table, skipped = torch.randn(5, 3), Skipped("table", "positions.weight", 2)
    [whole] = skipped.to_names(table)
    assert skipped.name_shapes({"positions.weight": (5, 3)}) == (whole.shape,)
    assert torch.equal(skipped.to_roles(whole)[0], table)
    ones = Ones("", "attn_norm.weight", 3)
    assert ones.to_names(*ones.to_roles()) == ()
    with pytest.raises(AssertionError, match="has become a gain"):
        ones.to_names(torch.tensor([1.0, 2.0, 1.0]))


def test_the_projections_are_multiplied_in(tmp_path: Path) -> None:
    model = models.opt(**PROJECTED)
    source = SourceModel.open(models.save(model, tmp_path))
    decoder = model.model.decoder
    embed, head = (source.read_block(ref, torch.float32) for ref in (EMBEDDINGS, HEAD))
    torch.testing.assert_close(embed["embed.weight"], decoder.embed_tokens.weight @ decoder.project_in.weight.T)
    torch.testing.assert_close(head["head.weight"], decoder.embed_tokens.weight @ decoder.project_out.weight)
    assert source.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_head_tied_behind_a_projection_is_not_the_embedding(tmp_path: Path) -> None:
    folder = models.save(models.opt(**PROJECTED, enable_bias=False, **NO_GAINS), tmp_path)
    assert SourceModel.open(folder).spec.tied_head
    with pytest.raises(UnsupportedError, match="tied behind a projection"):
        plan_conversion(folder, Recipe("r", "gpt2", ()))


@pytest.mark.parametrize("prefix", ["", "decoder.", "model.decoder.", "module.model.decoder."])
def test_files_with_more_or_less_of_a_prefix(prefix: str, tmp_path: Path, ids: Tensor) -> None:
    model = models.opt()
    renamed = {name.replace("model.decoder.", prefix): tensor for name, tensor in models.tensors_of(model).items()}
    folder = models.write(tmp_path, models.config_of(model), renamed)
    assert models.relative(models.reference_logits(folder, ids), models.logits_of(model, ids)) <= 1e-5
    assert torch.equal(models.logits_of(load_transformers(SourceModel.open(folder)), ids), models.logits_of(model, ids))


def test_sharded_files_of_both_kinds(tmp_path: Path, ids: Tensor) -> None:
    model = models.opt(**PROJECTED)
    model.save_pretrained(tmp_path / "safetensors", max_shard_size="40KB")
    assert (tmp_path / "safetensors" / "model.safetensors.index.json").exists()
    state = model.state_dict()  # with the tied head
    files = {name: f"pytorch_model-{'layers.1' in name:d}-of-2.bin" for name in state}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_text(json.dumps(models.config_of(model)))
    for file in set(files.values()):
        torch.save({name: t for name, t in state.items() if files[name] == file}, tmp_path / "bin" / file)
    (tmp_path / "bin" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    for kind in ("safetensors", "bin"):
        assert models.relative(models.reference_logits(tmp_path / kind, ids), models.logits_of(model, ids)) <= 1e-5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"learned_embeddings": False}, "'learned_embeddings' is False"),
        ({"scale_embeddings": True}, "'scale_embeddings' is True"),
    ],
    ids=str,
)
def test_fields_that_would_change_the_function_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = models.edit_config(models.save(models.opt(), tmp_path), **change)
    with pytest.raises(UnsupportedError) as caught:
        SourceModel.open(folder)
    assert words in str(caught.value)


def test_fields_of_real_configs_change_nothing(tmp_path: Path) -> None:
    real = {"activation_dropout": 0.0, "layerdrop": 0.0, "learned_embeddings": True, "scale_embeddings": False}
    SourceModel.open(models.edit_config(models.save(models.opt(), tmp_path), **real, prefix="</s>"))


def test_a_table_of_another_length_is_an_error(tmp_path: Path) -> None:
    folder = models.save(models.opt(), tmp_path, max_position_embeddings=models.CONTEXT + 2)
    with pytest.raises(CheckpointError, match=r"has shape \[74, 48\], and the config means \[76, 48\]"):
        SourceModel.open(folder)


# Recipes, by the placement of the norms


@pytest.mark.parametrize(("facts", "recipe"), [({}, "gpt2-to-llama"), (POST_LN, "postln-to-llama")])
def test_the_recipe_goes_by_the_norms(facts: dict[str, Any], recipe: str, tmp_path: Path) -> None:
    assert plan_conversion(models.save(models.opt(**facts), tmp_path)).recipe.name == recipe


@pytest.mark.parametrize(
    ("facts", "recipe", "right"),
    [({}, "postln-to-llama", "gpt2-to-llama"), (POST_LN, "gpt2-to-llama", "postln-to-llama")],
)
def test_the_other_recipe_is_refused_and_names_the_right_one(
    facts: dict[str, Any], recipe: str, right: str, tmp_path: Path
) -> None:
    folder = models.save(models.opt(**facts), tmp_path)
    with pytest.raises(UnsupportedError) as caught:
        plan_conversion(folder, recipe)
    assert f"recipe {right} does" in str(caught.value)


def test_a_model_without_a_final_norm_is_refused(tmp_path: Path) -> None:
    folder = models.save(models.opt(_remove_final_layer_norm=True), tmp_path)
    with pytest.raises(UnsupportedError, match="the model has no final norm, so the head would see the stream centred"):
        plan_conversion(folder)


# ReLU as SwiGLU


def test_a_relu_neuron_is_one_steep_unit(tmp_path: Path, ids: Tensor) -> None:
    model = models.opt()
    source = SourceModel.open(models.save(model, tmp_path))
    gated = Converted(source).after(GeluToSwiglu())
    assert models.relative(gated.logits(ids), models.logits_of(model, ids, torch.float64)) < 5e-3
    layer = BlockRef("layer", 1)
    assert torch.equal(gated.blocks[layer]["gate.weight"], 64 * source.read_block(layer, torch.float64)["up.weight"])
    assert gated.spec.intermediate_size == source.spec.intermediate_size


def test_the_slopes_of_gelu_are_not_for_relu(tmp_path: Path) -> None:
    plan = plan_conversion(models.save(models.opt(), tmp_path), load_recipe("gpt2-to-llama", ["fit_blocks.steps=0"]))
    walk = Walk(plan, random_text(8, seed=1), random_text(4, seed=2))
    list(walk)
    step = [each.op.name for each in plan.steps].index("gelu_to_swiglu")
    assert all(0 < error < 0.1 for error in walk.findings.errors[step]["of the neurons"].values())
    assert walk.findings.comparisons[step].total.kl < 5e-3
