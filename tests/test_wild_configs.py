"""Configs as people publish them: fields of their owners', other names, models that no family reads (U1, U4, U5)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from test_rope_families import LLAMA3, LLAMA_LIKE, make

import converter
from converter.errors import CheckpointError, ConverterError, UnsupportedError, near_spelling
from converter.families import families, find_family
from converter.families.config import ConfigReader
from converter.families.foreign import fields_read, owners
from converter.families.opened import SourceModel
from converter.families.rope_config import read_rope
from converter.spec import RopeLayout


def edited(folder: Path, model: Any, **changes: Any) -> Path:
    return models.edit_config(models.save(model, folder), **changes)


def notes(folder: Path) -> str:
    return " | ".join(converter.inspect(folder).warnings)


# U1: fields that no class reads


def test_a_gpt2_of_2022_as_published_converts_with_no_edit(tmp_path: Path) -> None:
    model, source = models.gpt2(), tmp_path / "source"
    source.mkdir()
    config = models.config_of(model, condition_on_x=True, prompt_kind="abstract", torch_dtype="float32", dtype=...)
    mask = torch.ones(1, 1, models.CONTEXT, models.CONTEXT, dtype=torch.uint8).tril()
    tensors = dict(models.tensors_of(model))
    for layer in range(model.config.n_layer):
        tensors[f"transformer.h.{layer}.attn.bias"] = mask
        tensors[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    (source / "config.json").write_text(json.dumps(config))
    torch.save(tensors, source / "pytorch_model.bin")
    text = models.write_ids(tmp_path / "ids.npy")
    result = converter.convert(source, tmp_path / "llama", text=[text])
    told = notes(source)
    assert "'condition_on_x' = True, 'prompt_kind' = 'abstract'" in told
    assert "GPT2LMHeadModel does not read them" in told
    assert result.verification is not None
    (remark,) = converter.check(source)
    assert remark.remark
    assert remark.what in told
    account = converter.inspect(source).config_accounts["condition_on_x"]
    assert "cannot change the function" in account
    ids = models.random_ids()
    with torch.no_grad():
        assert models.relative(models.reference_logits(source, ids), model(ids).logits) <= 1e-5


@pytest.mark.parametrize("field", ["scale_attn_by_layer", "attn_logit_softcapping", "no_rope_layers"])
def test_transformers_computes_the_same_with_a_field_that_it_does_not_read(field: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, ids = models.gpt2(), models.random_ids()
    folder = edited(tmp_path, model, **{field: 2.0})
    assert f"'{field}' = 2.0" in notes(folder)
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    assert torch.equal(wanted, model(ids).logits)
    assert models.relative(models.reference_logits(folder, ids), wanted) <= 1e-5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"no_rope_layers": [1, 0]}, "a field of llama4"),
        ({"num_local_experts": 8}, "check the model_type"),
        ({"layer_norm_epsilon": ..., "layer_norm_epsilom": 1e-6}, "is 'layer_norm_epsilon' meant?"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.XModel"}}, "(modeling_x.XModel), which is never run"),
    ],
    ids=str,
)
def test_a_field_is_named_for_what_it_is(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in notes(edited(tmp_path, models.gpt2(), **changes))


@pytest.mark.parametrize("field", ["n_layer", "n_head", "vocab_size", "n_positions", "n_inner", "n_embd"])
def test_a_size_of_a_thousand_million_is_refused_at_once(field: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        SourceModel.open(edited(tmp_path, models.gpt2(), **{field: 10**9}))
    assert str(10**9) in str(caught.value)


def test_a_field_of_any_content_is_noted_on_one_line(tmp_path: Path) -> None:
    (note,) = SourceModel.open(edited(tmp_path, models.gpt2(), **{"odd\n\x1b[31mname": "x" * 100_000})).notes
    assert note.isprintable()
    assert len(note) < 1000


def test_a_field_that_only_the_checkpoints_own_code_reads_is_refused(tmp_path: Path) -> None:
    changes = {"auto_map": {"AutoModelForCausalLM": "modeling_x.XModel"}, "condition_on_x": True}
    with pytest.raises(UnsupportedError) as caught:
        SourceModel.open(edited(tmp_path, models.gpt2(), **changes))
    assert "'condition_on_x' = True" in str(caught.value)
    assert "modeling_x.XModel" in str(caught.value)
    assert "delete auto_map" in str(caught.value)


def test_code_for_the_tokenizer_alone_is_no_code_of_the_model(tmp_path: Path) -> None:
    changes = {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}, "condition_on_x": True}
    assert "never run" not in notes(edited(tmp_path, models.gpt2(), **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "is_causal": True},
        {"sliding_window": 4096, "attention_chunk_size": None},
        {"head_dim": 16, "num_key_value_heads": 3, "attention_dropout": 0.1},
        {"apply_query_key_layer_scaling": True, "normalize_attention_scores": True},
        {"embd_pdrop": 0.1, "summary_first_dropout": 0.1, "initializer_factor": 1.0, "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_values_that_change_nothing_whoever_reads_them_are_silent(changes: dict[str, Any], tmp_path: Path) -> None:
    bare = converter.inspect(models.save(models.gpt2(), tmp_path / "bare")).warnings
    assert converter.inspect(edited(tmp_path / "more", models.gpt2(), **changes)).warnings == bare


def test_every_field_of_transformers_own_config_classes_is_known(tmp_path: Path) -> None:
    """What the class of a family reads is accounted for by the family, so that only others' fields are unknown."""
    from transformers import AutoConfig

    for family in families().values():
        if family.model_class is None:
            continue
        kind = {"openai_gpt": "openai-gpt"}.get(family.name, family.name)
        config = AutoConfig.for_model(kind).to_dict()
        if family.name == "mistral":
            config["sliding_window"] = None
        reader = ConfigReader(config, "config.json", aliases=family.aliases, model_class=family.model_class)
        reader.read("tie_word_embeddings", bool, False)
        spec = family.read_spec(reader, tied=True)
        reader.finish(spec)
        assert reader.notes == [], family.name


def test_the_names_that_are_read_are_found_in_transformers_text() -> None:
    reads = fields_read("GPT2LMHeadModel")
    assert reads is not None
    assert {
        "n_embd",
        "scale_attn_by_inverse_layer_idx",
        "is_causal",
        "sliding_window",
        "reorder_and_upcast_attn",
    } <= reads
    assert not {"condition_on_x", "no_rope_layers", "rotary_pct", "layer_norm_eps"} & reads
    assert fields_read("NoSuchModel") is None
    assert "smollm3" in owners("no_rope_layers")
    assert owners("condition_on_x") == []


# Other names


def test_the_common_names_of_a_gpts_fields_are_read(tmp_path: Path) -> None:
    model, ids = models.gpt2(), models.random_ids()
    folder = edited(
        tmp_path, model, hidden_size=48, n_embd=..., num_hidden_layers=3, max_position_embeddings=models.CONTEXT
    )
    with torch.no_grad():
        assert models.relative(models.reference_logits(folder, ids), model(ids).logits) <= 1e-5


def test_aliases_are_those_of_transformers() -> None:
    from transformers import GPT2Config, GPTJConfig, OpenAIGPTConfig

    for name, config in (("gpt2", GPT2Config), ("gptj", GPTJConfig), ("openai_gpt", OpenAIGPTConfig)):
        assert families()[name].aliases == config.attribute_map


def test_a_gpt2_without_model_type_is_known_by_its_architecture(tmp_path: Path) -> None:
    folder = edited(tmp_path / "a", models.gpt2(), model_type=..., architectures=["GPT2LMHeadModel"])
    text = models.write_ids(tmp_path / "ids.npy")
    converter.convert(folder, tmp_path / "llama", text=[text])
    assert "taken for a gpt2" in notes(folder)


# Buffers that transformers skips

COUNTED = torch.arange(models.CONTEXT)[None]


@pytest.mark.parametrize(
    ("make_model", "name", "buffer", "wrong"),
    [
        (models.opt, "model.decoder.version", torch.tensor([3.0]), torch.ones(4)),
        (models.opt, "decoder.version", torch.tensor([3.0]), torch.ones(4)),
        (models.gpt2, "transformer.position_ids", COUNTED, COUNTED.flip(1)),
        (models.openai_gpt, "position_ids", COUNTED[0], COUNTED[0] + 2),
        (models.llama, "model.position_ids", COUNTED, COUNTED + 1),
        (models.llama, "model.rotary_emb.inv_freq", 1e4 ** -(torch.arange(8) / 8), torch.ones(8)),
    ],
    ids=str,
)
def test_a_buffer_that_carries_nothing_is_left_out_and_another_is_refused(
    make_model: Any, name: str, buffer: torch.Tensor, wrong: torch.Tensor, tmp_path: Path
) -> None:
    model, ids = make_model(), models.random_ids()
    for folder, tensor in (("right", buffer), ("wrong", wrong)):
        tensors = models.tensors_of(model) | {name: tensor}
        source = SourceModel.open(models.write(tmp_path / folder, models.config_of(model), tensors))
        if folder == "wrong":
            with pytest.raises(UnsupportedError, match=name.replace(".", r"\.")):
                source.check_contents()
            continue
        source.check_contents()
        assert name in {drop.name for drop in source.dropped}
        with torch.no_grad():
            assert models.relative(models.reference_logits(tmp_path / folder, ids), model(ids).logits) <= 1e-5


# U5: models that no family reads


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "smollm3"}, "`no_rope_layers`"),
        ({"model_type": "gpt_bigcode"}, "share one k and v"),
        ({"model_type": "mixtral"}, "a mixture of experts"),
        ({"model_type": "llama4"}, "a Llama 4"),
        ({"model_type": "phi"}, "in parallel"),
        ({"model_type": "mamba"}, "carry a state"),
        ({"model_type": "gpt_neo"}, "attends to a window"),
        ({"model_type": "qwen"}, "lie in one tensor"),
        ({"model_type": "bert"}, "an encoder"),
        ({"model_type": "helium"}, "a model of transformers that no family here reads"),
        ({"model_type": "my_moe", "num_experts": 8}, "a mixture of experts"),
        ({"model_type": "frobnicate"}, "so nothing is guessed"),
    ],
    ids=str,
)
def test_a_stranger_is_told_what_it_is_and_why(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        find_family(config, "config.json")
    assert words in str(caught.value)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(("kind", "meant"), [("gpt-2", "gpt2"), ("lama", "llama"), ("mistrall", "mistral")])
def test_one_or_two_letters_off_is_a_spelling(kind: str, meant: str) -> None:
    with pytest.raises(UnsupportedError, match=f"Did you mean '{meant}'"):
        find_family({"model_type": kind}, "config.json")


def test_letters_are_counted() -> None:
    assert near_spelling("kitten", ["sitting"], letters=3) == "Did you mean 'sitting'?"
    assert near_spelling("kitten", ["sitting"]) is None
    assert near_spelling("x", []) is None


# U4: rope dicts

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
LONG["original_max_position_embeddings"] = 16
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}


def rope(parameters: Any, **config: Any) -> Any:
    config = {"rope_parameters": parameters, "max_position_embeddings": 64, **config}
    reader = ConfigReader(config, "config.json")
    return read_rope(reader, 8, RopeLayout.HALF_SPLIT), reader.notes


@pytest.mark.parametrize("value", [..., None, "4.0", 0, -1, True, [4.0], float("inf"), 10**400], ids=str)
@pytest.mark.parametrize(
    ("scaling", "fact"),
    [
        *((kind, fact) for kind in (LLAMA3,) for fact in kind if fact not in ("rope_type", "rope_theta")),
        *((YARN, fact) for fact in ("factor", "original_max_position_embeddings")),
        *(({"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}, "factor") for kind in ("linear", "dynamic")),
        *((LONG, fact) for fact in ("short_factor", "long_factor", "original_max_position_embeddings")),
    ],
    ids=lambda each: each if isinstance(each, str) else each["rope_type"],
)
def test_a_fact_that_is_missing_or_no_number_is_one_paragraph(scaling: dict[str, Any], fact: str, value: Any) -> None:
    changed = {key: each for key, each in {**scaling, fact: value}.items() if each is not ...}
    assert rope(scaling)[0].scaling is not None
    with pytest.raises(CheckpointError) as caught:
        rope(changed)
    assert f"'{fact}'" in str(caught.value) or f".{fact}'" in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize("length", [0, 3, 5, 8])
def test_a_longrope_list_of_a_wrong_length(length: int) -> None:
    with pytest.raises(
        CheckpointError, match=rf"has {length} entries. It must hold one number .* 4 rotary frequencies"
    ):
        rope({**LONG, "long_factor": [1.0] * length})


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"rope_type": "linear", "factr": 4.0, "rope_theta": 1e4}, "'factr'"),
        ({"rope_type": "su", "rope_theta": 1e4}, "Write 'longrope'"),
        ({"rope_type": ["yarn"], "rope_theta": 1e4}, "rope_type"),
        ({"full_attention": {"rope_type": "default", "rope_theta": 1e4}}, "for each kind of layer"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "the second must be larger"),
        ({**LONG, "attn_factor": 1.2, "attention_factor": 1.3}, "attn_factor is 1.2 and attention_factor is 1.3"),
        ({**YARN, "attn_factor": "1.2"}, "attention_factor' is '1.2'"),
        (
            {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "pairs rows of the whole head",
        ),
        ({**YARN, "truncate": "no"}, "truncate"),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5},
            "rotary width of 12 of a head of 8",
        ),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4}, "come in pairs"),
    ],
    ids=str,
)
def test_facts_that_do_not_fit(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ConverterError) as caught:
        rope(parameters)
    assert words in str(caught.value)


def test_the_other_spelling_of_the_attention_factor_is_told() -> None:
    spec, told = rope({**LONG, "attn_factor": 1.2})
    assert spec.scaling["attention_factor"] == 1.2
    assert told == [
        "rope_parameters: 'attn_factor' is read as attention_factor, which is the name that transformers knows"
    ]


def test_a_fact_that_the_kind_does_not_read_is_left_out_and_told() -> None:
    spec, told = rope({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "mscale": 1.0})
    assert spec.scaling == {"rope_type": "linear", "factor": 2.0}
    assert "rope_parameters.mscale = 1.0 is left out" in told[0]


def test_old_and_new_schema_with_null_and_int_are_one() -> None:
    new = {**YARN, "attention_factor": None}
    old = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 16}
    assert rope(new, rope_scaling=old)[0] == rope(YARN)[0]


@pytest.mark.parametrize("outer", ["rotary_emb_base", "rope_theta"])
def test_an_old_neox_with_rope_scaling_computes_what_transformers_computes(outer: str, tmp_path: Path) -> None:
    neox = {key: value for key, value in LLAMA_LIKE.items() if "key_value" not in key and key != "head_dim"}
    parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e4, "partial_rotary_factor": 0.5}
    model = make("GPTNeoX", {**neox, "hidden_size": 16 * neox["num_attention_heads"], "rope_parameters": parameters})
    changes = {"rope_parameters": ..., "rotary_pct": 0.5, outer: 2e4, "rope_scaling": {"type": "linear", "factor": 4.0}}
    folder = edited(tmp_path, model, **changes)
    ids = torch.randint(61, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(ids).logits
    assert models.relative(models.reference_logits(folder, ids), wanted) <= 1e-5
    models.edit_config(folder, rope_scaling=...)
    assert models.relative(models.reference_logits(folder, ids), wanted) > 1e-3
