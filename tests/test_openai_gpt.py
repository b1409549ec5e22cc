"""openai_gpt: transformers' own function, its buffers, its tokenizer, and which recipes it may take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import TOLERANCE
from tokenizers import Tokenizer, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import Tensor
from transformers import OpenAIGPTTokenizer

from converter.conversion.recipe import Recipe
from converter.conversion.run import plan_conversion
from converter.errors import ConverterError, UnsupportedError
from converter.families.opened import SourceModel
from converter.files.tokenizer import load_tokenizer, same_ids, write_tokenizer
from converter.measure.models import load_transformers
from converter.spec import Activation

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "relu": {"afn": "relu"},
    "silu": {"afn": "silu"},
    "swish": {"afn": "swish"},
    "another eps": {"layer_norm_epsilon": 1e-2},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_computes_what_transformers_computes(variant: str, dtype: torch.dtype, tmp_path: Path, ids: Tensor) -> None:
    model = models.openai_gpt(**VARIANTS[variant])
    found = models.reference_logits(models.save(model, tmp_path), ids, dtype)
    assert models.relative(found, models.logits_of(model, ids, dtype)) <= TOLERANCE[dtype]


def test_its_gelu_is_the_tanh_form(tmp_path: Path, ids: Tensor) -> None:
    model = models.openai_gpt()
    source = SourceModel.open(models.save(model, tmp_path))
    assert source.spec.activation is Activation.GELU_TANH
    source.spec = source.spec.replace(activation=Activation.GELU_ERF)
    erf = models.run(lambda ref: source.read_block(ref, torch.float64), source.spec, ids)
    assert models.relative(erf, models.logits_of(model, ids, torch.float64)) > 1e-5


def test_norms_before_the_sublayers_would_show(tmp_path: Path, ids: Tensor) -> None:
    model = models.openai_gpt()
    source = SourceModel.open(models.save(model, tmp_path))
    assert not source.spec.pre_norm
    assert not source.spec.final_norm
    source.spec = source.spec.replace(pre_norm=True)
    pre = models.run(lambda ref: source.read_block(ref, torch.float32), source.spec, ids)
    assert models.relative(pre, models.logits_of(model, ids)) > 0.1


def test_the_published_files_have_no_prefix_and_carry_buffers(tmp_path: Path, ids: Tensor) -> None:
    model = models.openai_gpt()
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in models.tensors_of(model).items()}
    mask = torch.ones(models.CONTEXT, models.CONTEXT).tril()[None, None]
    tensors |= {f"h.{layer}.attn.bias": mask.clone() for layer in range(3)}
    tensors["position_ids"] = torch.arange(models.CONTEXT)
    old = {"n_ctx": 72, "n_special": 0, "predict_special_tokens": True}
    folder = models.write(tmp_path, models.config_of(model, **old), tensors)
    source = SourceModel.open(folder)
    source.check_contents()
    assert {drop.name for drop in source.dropped} == {"position_ids", *(f"h.{layer}.attn.bias" for layer in range(3))}
    assert models.relative(models.reference_logits(folder, ids), models.logits_of(model, ids)) <= 1e-5
    assert torch.equal(models.logits_of(load_transformers(source), ids), models.logits_of(model, ids))


def test_a_windowed_mask_is_refused(tmp_path: Path) -> None:
    tensors = models.tensors_of(model := models.openai_gpt())
    tensors["transformer.h.1.attn.bias"] = torch.ones(1, 1, models.CONTEXT, models.CONTEXT).tril().triu(-8)
    source = SourceModel.open(models.write(tmp_path, models.config_of(model), tensors))
    with pytest.raises(UnsupportedError, match="windowed"):
        source.check_contents()


def test_an_activation_that_is_not_its_own_is_refused(tmp_path: Path) -> None:
    folder = models.edit_config(models.save(models.openai_gpt(), tmp_path), afn="gelu_new")
    with pytest.raises(UnsupportedError, match="'afn' is 'gelu_new'"):
        SourceModel.open(folder)


# Recipes


def test_without_a_recipe_it_takes_its_own(tmp_path: Path) -> None:
    plan = plan_conversion(models.save(models.openai_gpt(), tmp_path))
    assert plan.recipe.name == "postln-to-llama"
    assert plan.target_spec.pre_norm


@pytest.mark.parametrize("recipe", ["gpt2-to-llama", "gpt2-to-llama-naive", "gpt2-to-mistral"])
def test_a_pre_ln_recipe_is_refused_and_names_the_right_one(recipe: str, tmp_path: Path) -> None:
    folder = models.save(models.openai_gpt(), tmp_path)
    with pytest.raises(ConverterError) as caught:
        plan_conversion(folder, recipe)
    assert "the norms stand after the sublayers (post-LN)" in str(caught.value)
    assert "The recipe for this checkpoint is 'postln-to-llama'" in str(caught.value)


def test_a_recipe_that_forgets_the_norms_is_told_the_op(tmp_path: Path) -> None:
    folder = models.save(models.openai_gpt(), tmp_path)
    with pytest.raises(UnsupportedError, match="its norms stand after the sublayers"):
        plan_conversion(folder, Recipe("r", "gpt2", ()))


# Its tokenizer: a BPE on lower-cased words that end in </w>

TEXTS = ("Hello there, World!", "a lower-cased naïve WORLD, the there and the other", "he won't 12,345")


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """vocab.json and merges.txt of a small vocabulary, as the published model has them."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=90, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    content = json.loads(tokenizer.to_str())["model"]
    folder = models.save(models.openai_gpt(), tmp_path / "source")
    (folder / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return folder


def test_its_tokenizer_is_written_with_the_same_ids(vocabulary: Path, tmp_path: Path) -> None:
    before = load_tokenizer(vocabulary)
    assert before is not None
    own = OpenAIGPTTokenizer.from_pretrained(vocabulary)
    for text in (*TEXTS, "Unseen: é 漢"):
        assert before(text)["input_ids"] == own(text)["input_ids"]
    assert before("HELLO")["input_ids"] == before("hello")["input_ids"]
    assert before.decode(before("hello world")["input_ids"]) == "hello world"
    assert write_tokenizer(vocabulary, tmp_path / "target") == ["tokenizer.json", "tokenizer_config.json"]
    after = load_tokenizer(tmp_path / "target")
    assert after is not None
    same_ids(before, after)
