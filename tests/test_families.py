"""Source families: what they compute is what transformers' own class computes, and all else is refused in words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import TOLERANCE, VOCAB
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from converter.errors import CheckpointError, ConverterError, UnsupportedError
from converter.families.fields import ACTIVATIONS
from converter.families.opened import SourceModel
from converter.measure.models import load_transformers
from converter.spec import Activation


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    return models.gpt2()


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return models.llama()


@pytest.fixture
def llama_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers runs RMSNorm and RoPE's angles in fp32 whatever the dtype, which shows as 1e-6; here in fp64."""

    def rotary(self: LlamaRotaryEmbedding, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self.inv_freq.double()
        table = torch.cat([angles, angles], dim=-1)
        return table.cos().to(x.dtype), table.sin().to(x.dtype)

    def norm(self: LlamaRMSNorm, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", rotary)
    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)


def refusal(folder: Path, kind: type[ConverterError] = ConverterError) -> str:
    with pytest.raises(kind) as caught:
        SourceModel.open(folder).check_contents()
    return str(caught.value)


def renamed(tensors: dict[str, Tensor], **names: str | None) -> dict[str, Tensor]:
    """With some tensors under other names; None leaves one out. Names are written with `__` for the dot."""
    changes = {old.replace("__", "."): new for old, new in names.items()}
    found = {changes.get(name, name): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in found.items() if name is not None}


# The function is transformers' own

GPT2_VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "scale by layer": {"scale_attn_by_inverse_layer_idx": True},
    "no scale": {"scale_attn_weights": False},
    "scale by layer only": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
    "upcast attention": {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
    "four times as wide": {"n_inner": None},
    **{f"activation {name}": {"activation_function": name} for name in ACTIVATIONS},
}

LLAMA_VARIANTS: dict[str, dict[str, Any]] = {
    "8/2": {},
    "9/3": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 45},
    "6/2": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 42},
    "tied": {"tie_word_embeddings": True},
    "attention biases": {"attention_bias": True},
    "MLP biases": {"mlp_bias": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "hidden_act": {"hidden_act": "gelu_new"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("variant", GPT2_VARIANTS)
def test_a_gpt2_computes_what_transformers_computes(
    variant: str, dtype: torch.dtype, tmp_path: Path, ids: Tensor
) -> None:
    model = models.gpt2(**GPT2_VARIANTS[variant])
    found = models.reference_logits(models.save(model, tmp_path), ids, dtype)
    assert models.relative(found, models.logits_of(model, ids, dtype)) <= TOLERANCE[dtype]


@pytest.mark.usefixtures("llama_in_fp64")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("variant", LLAMA_VARIANTS)
def test_a_llama_computes_what_transformers_computes(
    variant: str, dtype: torch.dtype, tmp_path: Path, ids: Tensor
) -> None:
    model = models.llama(**LLAMA_VARIANTS[variant])
    found = models.reference_logits(models.save(model, tmp_path), ids, dtype)
    assert models.relative(found, models.logits_of(model, ids, dtype)) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("facts", "least"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, 0.1),
        ({"scale_attn_weights": False}, 0.1),
        ({"activation_function": "gelu"}, 1e-5),
        ({"activation_function": "relu"}, 1e-2),
        ({"layer_norm_epsilon": 1e-5}, 1e-5),
    ],
    ids=str,
)
def test_a_config_field_that_was_ignored_would_show(
    facts: dict[str, Any], least: float, gpt2: GPT2LMHeadModel, tmp_path: Path, ids: Tensor
) -> None:
    ignored = models.reference_logits(models.save(gpt2, tmp_path), ids)
    assert models.relative(ignored, models.logits_of(models.gpt2(**facts), ids)) > least


def test_the_gelus_by_their_many_names() -> None:
    assert ACTIVATIONS["gelu_new"] is ACTIVATIONS["gelu_pytorch_tanh"] is Activation.GELU_TANH
    assert ACTIVATIONS["gelu"] is ACTIVATIONS["gelu_python"] is Activation.GELU_ERF


# Names and containers


def wrapped_inside(name: str) -> str:
    """A wrapper around the blocks and one around the attention, as activation checkpointing leaves them."""
    return name.replace("transformer.h.", "transformer._orig_mod.h.").replace(".attn.", ".module.attn.")


NAMES = {
    "module": lambda name: f"module.{name}",
    "_orig_mod": lambda name: f"_orig_mod.{name}",
    "module, then _orig_mod": lambda name: f"module._orig_mod.{name}",
    "_orig_mod, then module": lambda name: f"_orig_mod.module.{name}",
    "inside the path": wrapped_inside,
    "no prefix": lambda name: name.removeprefix("transformer."),
    "no prefix, but a wrapper": lambda name: f"module.{name.removeprefix('transformer.')}",
}


@pytest.mark.parametrize("names", NAMES)
def test_wrapped_and_prefixless_names_are_the_same_model(names: str, tmp_path: Path, ids: Tensor) -> None:
    model = models.gpt2(tie_word_embeddings=False)
    clean = models.save(model, tmp_path / "clean")
    tensors = {NAMES[names](name): tensor for name, tensor in models.tensors_of(model).items()}
    folder = models.write(tmp_path / "renamed", models.config_of(model), tensors)
    assert torch.equal(models.reference_logits(folder, ids), models.reference_logits(clean, ids))
    # transformers by itself would leave these weights random.
    assert torch.equal(models.logits_of(load_transformers(SourceModel.open(folder)), ids), models.logits_of(model, ids))


def test_a_model_without_a_head_saved_by_transformers(gpt2: GPT2LMHeadModel, tmp_path: Path, ids: Tensor) -> None:
    gpt2.float().transformer.save_pretrained(tmp_path)
    assert models.relative(models.reference_logits(tmp_path, ids), models.logits_of(gpt2, ids)) <= 1e-5


@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
def test_checkpoints_saved_by_transformers(shard_size: str, gpt2: GPT2LMHeadModel, tmp_path: Path, ids: Tensor) -> None:
    gpt2.float().save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() is (shard_size == "40KB")
    assert models.relative(models.reference_logits(tmp_path, ids), models.logits_of(gpt2, ids)) <= 1e-5


@pytest.mark.parametrize("shards", [1, 2])
def test_pickled_checkpoints(shards: int, gpt2: GPT2LMHeadModel, tmp_path: Path, ids: Tensor) -> None:
    state = gpt2.float().state_dict()  # with the tied head, which shares the embedding's storage
    (tmp_path / "config.json").write_text(json.dumps(models.config_of(gpt2)))
    if shards == 1:
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        files = {name: f"pytorch_model-{'h.2' in name or 'lm' in name:d}-of-2.bin" for name in state}
        for file in set(files.values()):
            torch.save({name: tensor for name, tensor in state.items() if files[name] == file}, tmp_path / file)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    assert models.relative(models.reference_logits(tmp_path, ids), models.logits_of(gpt2, ids)) <= 1e-5
    assert [drop.name for drop in SourceModel.open(tmp_path).dropped] == ["lm_head.weight"]


@pytest.mark.parametrize("other", ["wte.weight", "module.transformer.wte.weight", "transformer._orig_mod.wte.weight"])
def test_two_names_of_one_tensor_are_an_error(other: str, gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    tensors = models.tensors_of(gpt2)
    tensors[other] = tensors["transformer.wte.weight"].clone()
    message = refusal(models.write(tmp_path, models.config_of(gpt2), tensors), CheckpointError)
    assert f"'{other}'" in message
    assert "'transformer.wte.weight'" in message


# Accounts: every tensor and every field is used, dropped with a reason, or an error


def test_an_unknown_tensor_is_an_error(gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    tensors = models.tensors_of(gpt2) | {"transformer.h.0.attn.rotary.weight": torch.zeros(4, 8)}
    message = refusal(models.write(tmp_path, models.config_of(gpt2), tensors), UnsupportedError)
    assert "'transformer.h.0.attn.rotary.weight' [4, 8] is unknown to family 'gpt2'" in message
    assert "would change the model" in message


def test_a_message_does_not_list_every_tensor(gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    tensors = models.tensors_of(gpt2) | {"XYZ": torch.zeros(4)}
    message = refusal(models.write(tmp_path, models.config_of(gpt2), tensors), UnsupportedError)
    assert "and 28 more" in message
    assert len(message) < 700


def test_a_doubled_prefix_is_not_stripped_twice(gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    tensors = {
        name.replace("transformer.", "transformer.transformer."): t for name, t in models.tensors_of(gpt2).items()
    }
    message = refusal(models.write(tmp_path, models.config_of(gpt2), tensors), CheckpointError)
    assert "'wte.weight' is missing" in message
    assert "Did you mean 'transformer.wte.weight'?" in message


def test_missing_tensors_are_an_error(gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    gone = {"transformer__h__1__attn__c_attn__bias": None, "transformer__ln_f__bias": None}
    message = refusal(models.write(tmp_path, models.config_of(gpt2), renamed(models.tensors_of(gpt2), **gone)))
    assert "'h.1.attn.c_attn.bias' is missing (and 1 more, up to 'ln_f.bias')" in message


def test_a_wrong_shape_is_an_error_that_names_both(gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    message = refusal(models.save(gpt2, tmp_path, vocab_size=VOCAB + 3))
    assert f"'transformer.wte.weight' has shape [{VOCAB}, 48], and the config means [{VOCAB + 3}, 48]" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": 8}, "'sliding_window' = 8 is unknown to this family, a field of afmoe"),
        ({"is_causal": False, "layer_types": ["full_attention", "sliding_attention"]}, "also unknown: layer_types"),
        ({"is_causal": False}, "Transformers' GPT2LMHeadModel reads it"),
        ({"hidden_size": 64}, "'n_embd' is 48 and 'hidden_size' is 64"),
        ({"n_head": "3"}, "'n_head' is '3', not of type int"),
        ({"n_head": 3.0}, "'n_head' is 3.0, not of type int"),
        ({"n_layer": 0}, "'n_layer' is 0, and must be at least 1"),
        ({"n_head": 5}, "n_embd = 48 is not a multiple of n_head = 5"),
        ({"scale_attn_weights": 1}, "'scale_attn_weights' is 1, not of type bool"),
        ({"layer_norm_epsilon": 0.0}, "'layer_norm_epsilon' is 0.0"),
        ({"layer_norm_epsilon": float("nan")}, "'layer_norm_epsilon' is nan"),
        ({"activation_function": "gelu_nww"}, "Did you mean 'gelu_new'?"),
        ({"activation_function": "mish"}, "'activation_function' is 'mish', which no conversion knows"),
        ({"eos_token_id": "0"}, "'eos_token_id' is '0', not a token id"),
        ({"add_cross_attention": True}, "'add_cross_attention' is True"),
        ({"quantization_config": {"bits": 4}}, "an unquantised, decoder-only checkpoint"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not a family that we know"),
        ({"model_type": ..., "architectures": ["MyGPT"]}, "no model_type. Its architectures are ['MyGPT']"),
        ({"model_type": ..., "architectures": ...}, "the config has no model_type"),
        ({"dtype": "float16", "torch_dtype": "float32"}, "dtype 'float16' and torch_dtype 'float32'"),
    ],
    ids=str,
)
def test_a_config_field_that_may_change_the_function_is_an_error(
    changes: dict[str, Any], words: str, gpt2: GPT2LMHeadModel, tmp_path: Path
) -> None:
    message = refusal(models.edit_config(models.save(gpt2, tmp_path), **changes))
    assert message.startswith(str(tmp_path / "config.json"))
    assert words in message


def test_fields_of_real_configs_that_change_nothing_are_ignored_with_a_reason(
    gpt2: GPT2LMHeadModel, tmp_path: Path, ids: Tensor
) -> None:
    # From the configs of gpt2-medium, gpt2-xl and distilgpt2.
    old = {"n_ctx": 72, "n_special": 0, "predict_special_tokens": True, "output_past": True, "_num_labels": 1}
    folder = models.save(gpt2, tmp_path, **old)
    accounts = SourceModel.open(folder).config_accounts
    assert all(accounts[key] not in ("", "read") for key in old)
    assert models.relative(models.reference_logits(folder, ids), models.logits_of(gpt2, ids)) <= 1e-5


@pytest.mark.parametrize("names", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype")])
@pytest.mark.parametrize("value", ["float32", "torch.float32"])
def test_either_name_of_the_dtype_is_read(
    names: tuple[str, ...], value: str, gpt2: GPT2LMHeadModel, tmp_path: Path
) -> None:
    source = SourceModel.open(models.save(gpt2, tmp_path, **{"dtype": ..., **dict.fromkeys(names, value)}))
    assert all(source.config_accounts[name] == "read" for name in names)


@pytest.mark.parametrize(
    ("stated", "wanted"),
    [
        ({"bos_token_id": None, "eos_token_id": 3, "pad_token_id": 4}, (None, 3, 4)),
        ({"bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": -1}, (None, None, None)),
        ({"bos_token_id": 60, "eos_token_id": [2, 61], "pad_token_id": 61}, (60, [2], None)),
        ({"bos_token_id": ..., "eos_token_id": ..., "pad_token_id": ...}, (None, None, None)),
    ],
    ids=["null stays null", "defaults of a larger vocabulary", "off by one", "absent"],
)
def test_a_special_token_without_an_embedding_is_none(
    stated: dict[str, Any], wanted: tuple[Any, ...], gpt2: GPT2LMHeadModel, tmp_path: Path
) -> None:
    source = SourceModel.open(models.save(gpt2, tmp_path, **stated))
    assert tuple(source.token_ids().values()) == wanted
    for key, value in stated.items():
        if value is not ... and source.token_ids()[key] != value:
            assert source.config_accounts[key] == f"{value} has no embedding in a vocabulary of 61"


def test_absent_special_tokens_are_those_of_generation_config_or_of_the_class(
    gpt2: GPT2LMHeadModel, tmp_path: Path
) -> None:
    absent = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), ...)
    folder = models.save(gpt2, tmp_path / "gpt2", **absent)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert list(SourceModel.open(folder).token_ids().values()) == [None, [5, 6], None]
    folder = models.save(models.llama(), tmp_path / "llama", **absent)
    assert list(SourceModel.open(folder).token_ids().values()) == [1, 2, None]


@pytest.mark.parametrize(
    ("bos", "eos", "opening"), [(60, 3, 60), (None, 3, 3), (None, [7, 3], 7), ([4, 5], 3, 4), (None, None, None)]
)
def test_bos_opens_a_document_and_eos_where_there_is_no_bos(bos, eos, opening, gpt2, tmp_path: Path) -> None:
    source = SourceModel.open(models.save(gpt2, tmp_path, bos_token_id=bos, eos_token_id=eos))
    assert source.opening == opening


def test_the_tokenizer_is_loaded_once_and_late(gpt2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path] = []
    monkeypatch.setattr("converter.families.opened.load_tokenizer", lambda folder: loaded.append(folder))
    source = SourceModel.open(models.save(gpt2, tmp_path))
    assert loaded == []
    assert source.tokenizer is source.tokenizer is None
    assert loaded == [tmp_path]


# Buffers


def buffers(mask: Tensor) -> dict[str, Tensor]:
    layers = [f"transformer.h.{layer}.attn" for layer in range(3)]
    return {f"{name}.bias": mask.clone() for name in layers} | {
        f"{name}.masked_bias": torch.tensor(-1e4) for name in layers
    }


def triangle(dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.ones(72, 72).tril().to(dtype)[None, None]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32], ids=str)
def test_causal_masks_are_dropped_beside_real_biases(
    dtype: torch.dtype, gpt2: GPT2LMHeadModel, tmp_path: Path, ids: Tensor
) -> None:
    tensors = models.tensors_of(gpt2) | buffers(triangle(dtype))
    folder = models.write(tmp_path, models.config_of(gpt2), tensors)
    source = SourceModel.open(folder)
    source.check_contents()
    assert {drop.name for drop in source.dropped} == set(buffers(triangle()))
    assert {drop.reason for drop in source.dropped} == {"causal mask buffer", "mask fill value"}
    assert models.relative(models.reference_logits(folder, ids), models.logits_of(gpt2, ids)) <= 1e-5


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("attn.bias", triangle().triu(-8), "windowed"),
        ("attn.bias", torch.ones_like(triangle()), "not the plain causal triangle"),
        ("attn.bias", torch.ones(48), "[48]"),
        ("attn.bias", triangle()[:, :, :40], "[1, 1, 40, 72]"),
        ("attn.masked_bias", torch.ones(48), "[48]"),
    ],
    ids=["window", "full", "1-D", "not square", "fill value of many values"],
)
def test_a_buffer_that_carries_something_is_refused(
    name: str, content: Tensor, words: str, gpt2: GPT2LMHeadModel, tmp_path: Path
) -> None:
    tensors = models.tensors_of(gpt2) | {f"transformer.h.1.{name}": content}
    message = refusal(models.write(tmp_path, models.config_of(gpt2), tensors), UnsupportedError)
    assert f"'transformer.h.1.{name}' is not a" in message
    assert words in message


# Ties: decided from the tensors


@pytest.mark.parametrize("make", [models.gpt2, models.llama])
@pytest.mark.parametrize(
    ("flag", "head", "tied"),
    [
        (True, "absent", True),
        (True, "equal", True),
        (True, "different", False),
        (False, "equal", False),
        (False, "different", False),
    ],
)
def test_ties_are_decided_from_the_tensors(
    make: Any, flag: bool, head: str, tied: bool, tmp_path: Path, ids: Tensor
) -> None:
    model = make(tie_word_embeddings=False)
    if head != "different":
        model.lm_head.weight.data = model.get_input_embeddings().weight.data.clone()
    tensors = models.tensors_of(model)
    if head == "absent":
        del tensors["lm_head.weight"]
    folder = models.write(tmp_path, models.config_of(model, tie_word_embeddings=flag), tensors)
    source = SourceModel.open(folder)
    assert source.spec.tied_head is tied
    assert models.relative(models.reference_logits(folder, ids), models.logits_of(model, ids)) <= 1e-5
    # transformers, left alone, would overwrite a trained head where the flag says that it is tied.
    assert torch.equal(models.logits_of(load_transformers(source), ids), models.logits_of(model, ids))


@pytest.mark.parametrize("make", [models.gpt2, models.llama])
def test_a_missing_head_is_never_made_up(make: Any, tmp_path: Path) -> None:
    model = make(tie_word_embeddings=False)
    tensors = renamed(models.tensors_of(model), lm_head__weight=None)
    message = refusal(models.write(tmp_path, models.config_of(model), tensors), CheckpointError)
    assert "tie_word_embeddings = false" in message
    assert "no tensor 'lm_head.weight'" in message


# RoPE's two schemas


def test_both_schemas_of_rope_give_the_same_logits(llama: LlamaForCausalLM, tmp_path: Path, ids: Tensor) -> None:
    parameters = {"rope_type": "default", "rope_theta": 500000.0}
    schemas = {
        "old": {"rope_theta": 500000.0, "rope_parameters": ...},
        "new": {"rope_parameters": parameters},
        "both": {"rope_theta": 500000.0, "rope_scaling": None, "rope_parameters": parameters},
        "split": {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "default"}},
        "other": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    }
    folders = {name: models.save(llama, tmp_path / name, **schema) for name, schema in schemas.items()}
    logits = {name: models.reference_logits(folder, ids) for name, folder in folders.items()}
    assert all(torch.equal(logits["old"], logits[name]) for name in ("new", "both", "split"))
    for name, folder in folders.items():
        model = load_transformers(SourceModel.open(folder))
        assert models.relative(logits[name], models.logits_of(model, ids)) <= 1e-5
    # 5e5 read as 1e4 shows late, and not at all at position 0.
    assert models.relative(logits["other"][:, 0], logits["old"][:, 0]) < 1e-6
    assert models.relative(logits["other"][:, 64], logits["old"][:, 64]) > 0.1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, ("500000.0", "10000.0")),
        ({"rope_parameters": {"rope_type": "default"}}, ("None", "10000.0")),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
            },
            ("'factor': 2.0", "'factor': 4.0"),
        ),
        ({"rope_parameters": {"rope_type": "liner", "rope_theta": 1e4}}, ("'liner'", "Did you mean 'linear'?")),
        ({"rope_parameters": {"factor": 4.0, "rope_theta": 1e4}}, ("factor", "rope_type")),
        ({"rope_parameters": {"rope_theta": "1e4"}}, ("'1e4'",)),
        ({"rope_theta": -1.0, "rope_parameters": ...}, ("-1.0",)),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ("rotary width of 8 of 16",)),
    ],
    ids=str,
)
def test_rope_facts_that_disagree_or_are_not_understood(
    changes: dict[str, Any], words: tuple[str, ...], llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    message = refusal(models.save(llama, tmp_path, **changes))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=["linear", "llama3"],
)
def test_a_scaled_rope_is_kept(scaling: dict[str, Any], tmp_path: Path, ids: Tensor) -> None:
    model = models.llama(rope_parameters={**scaling, "rope_theta": 1e4})
    folder = models.save(model, tmp_path)
    found, wanted = models.reference_logits(folder, ids), models.logits_of(model, ids)
    assert models.relative(found, wanted) <= 1e-5
    assert models.relative(models.logits_of(models.llama(), ids), wanted) > 0.1


# Tensors of other shapes: the field or the transposition that explains them all is named


@pytest.mark.parametrize(
    ("make", "changes", "words"),
    [
        (models.llama, {"head_dim": ...}, "where head_dim is 16, and the config has none and means 5"),
        (models.llama, {"head_dim": 8}, "where head_dim is 16, and the config says 8"),
        (
            models.llama,
            {"num_key_value_heads": ...},
            "where num_key_value_heads is 2, and the config has none and means 8",
        ),
        (models.llama, {"num_attention_heads": 4}, "where num_attention_heads is 8, and the config says 4"),
        (models.llama, {"intermediate_size": 64}, "where intermediate_size is 72, and the config says 64"),
        (models.gpt2, {"n_inner": ...}, "where n_inner is 80, and the config has none and means 192"),
        (models.gpt2, {"vocab_size": 60}, "where vocab_size is 61, and the config says 60"),
        (models.gpt2, {"n_positions": 100}, "where n_positions is 72, and the config says 100"),
        (models.gpt2, {"n_embd": 96}, "where n_embd is 48, and the config says 96"),
        (models.opt, {"max_position_embeddings": 80}, "where max_position_embeddings is 72, and the config says 80"),
    ],
)
def test_the_config_field_that_does_not_fit_is_named(
    make: Callable[[], PreTrainedModel], changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = models.save(make(), tmp_path, **changes)
    with pytest.raises(CheckpointError) as caught:
        SourceModel.open(folder)
    assert words in str(caught.value)


def test_a_head_dim_that_cannot_be_made_up_is_asked_for(tmp_path: Path) -> None:
    folder = models.save(models.llama(), tmp_path, num_attention_heads=6, head_dim=...)
    with pytest.raises(CheckpointError, match=r"not a multiple of .*'head_dim' is not there.*Write 'head_dim' into"):
        SourceModel.open(folder)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (models.gpt2, "those of a gpt2 are (in, out), and here they are (out, in)"),
        (models.llama, "those of a llama are (out, in), and here they are (in, out)"),
    ],
)
def test_transposed_linears_are_named(make: Callable[[], PreTrainedModel], words: str, tmp_path: Path) -> None:
    model = make()
    tensors = models.tensors_of(model)
    linears = [name for name, tensor in tensors.items() if tensor.ndim == 2 and re.search("attn|mlp", name)]
    folder = models.write(tmp_path, models.config_of(model), tensors | {name: tensors[name].T for name in linears})
    with pytest.raises(CheckpointError) as caught:
        SourceModel.open(folder)
    assert f"the linears lie transposed: {words}".capitalize() in str(caught.value)


@pytest.mark.parametrize("value", [7, "full_attention", {"a": 1}, [7]])
def test_layer_types_that_are_no_list_of_kinds_are_refused(value, tmp_path):
    folder = models.save(
        models.jitter(Qwen2ForCausalLM(Qwen2Config(**models.LLAMA)), 0), tmp_path / "model", layer_types=value
    )
    with pytest.raises(ConverterError):
        SourceModel.open(folder)


class TestNamesInTheWild:
    """What trainers and old releases call tensors; the logits are those of the plain checkpoint."""

    @pytest.mark.parametrize("outer", ["pretrained_model.", "model.", "net.model."])
    @pytest.mark.parametrize("value_head", [True, False])
    def test_a_trainer_s_prefix_and_value_head_are_told(self, outer: str, value_head: bool, tmp_path: Path):
        folder = models.save(models.gpt2(), tmp_path / "plain")
        tensors = load_file(folder / "model.safetensors")
        plain = SourceModel.open(folder)
        wrapped = {f"{outer}{name}": tensor for name, tensor in tensors.items()}
        if value_head:
            wrapped["v_head.summary.weight"] = torch.ones(1, 4)
        save_file(wrapped, folder / "model.safetensors", metadata={"format": "pt"})
        found = SourceModel.open(folder)
        assert found.used == plain.used
        assert any(f"begin with '{outer}'" in note for note in found.notes)
        assert any("value head" in each.reason for each in found.dropped) is value_head

    def test_the_head_of_dialogpt(self, tmp_path: Path):
        folder = models.save(models.gpt2(), tmp_path / "plain")
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.decoder.weight"] = tensors["transformer.wte.weight"].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        assert SourceModel.open(folder).spec.tied_head
