"""What stands beside the weights of a result: each file inherits from its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
from test_tokenizer import byte_level_bpe
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from converter import convert
from converter.families.companions import pad_in_text
from converter.families.opened import SourceModel
from converter.measure.inspect import warnings


def source(folder: Path, ids: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    models.save(models.gpt2(), folder, **ids)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def written(path: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json of a conversion."""
    target = path.with_name("result")
    convert(path, target, recipe="gpt2-to-llama-naive", verify=False, **options)
    config, generation = (json.loads((target / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    return config, generation


def test_a_generation_config_that_ends_at_several_tokens_still_does(tmp_path):
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    path = source(tmp_path / "source", ids, {"eos_token_id": [0, 5, 7, 99], "do_sample": True})
    config, generation = written(path)
    assert config["eos_token_id"] == 0
    assert generation == ids | {"eos_token_id": [0, 5, 7], "do_sample": True}  # 99 has no embedding
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (0, [0, 5, 7])


@pytest.mark.parametrize(
    ("ids", "generation", "kept"),
    [
        ({"bos_token_id": 3, "eos_token_id": 3, "pad_token_id": 3}, None, None),
        ({"bos_token_id": None, "eos_token_id": 3, "pad_token_id": 5}, {"eos_token_id": [3, 5]}, None),
        ({"bos_token_id": None, "eos_token_id": 3, "pad_token_id": 4}, None, 4),
    ],
)
def test_a_pad_token_of_the_text_is_left_to_generation_and_told(tmp_path, ids, generation, kept):
    path = source(tmp_path / "source", ids, generation)
    config, generated = written(path)
    assert config["pad_token_id"] == kept
    assert generated["pad_token_id"] == ids["pad_token_id"]
    told = [each for each in warnings(SourceModel.open(path)) if "token of the text" in each]
    assert len(told) == (kept is None)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "result").get_input_embeddings().padding_idx == kept


def test_a_word_is_no_pad_token_and_a_special_token_is_one(tmp_path):
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 5}
    path = source(tmp_path / "source", ids)
    tokenizer = byte_level_bpe()
    size, special = tokenizer.get_vocab_size(), tokenizer.token_to_id("<|endoftext|>")
    models.save(models.gpt2(vocab_size=size), path, **ids)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(path)
    assert pad_in_text(SourceModel.open(path))
    models.edit_config(path, pad_token_id=special)
    assert pad_in_text(SourceModel.open(path))  # the tokenizer's own eos
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>").save_pretrained(path)
    assert not pad_in_text(SourceModel.open(path))


def test_a_llama_is_given_the_inputs_that_it_takes(tmp_path):
    tokenizer = byte_level_bpe()
    path = tmp_path / "source"
    models.save(models.gpt2(vocab_size=tokenizer.get_vocab_size()), path, bos_token_id=None, eos_token_id=0)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", model_input_names=names
    ).save_pretrained(path)
    assert "token_type_ids" in AutoTokenizer.from_pretrained(path)("def f(x):")
    written(path)
    asked = AutoTokenizer.from_pretrained(tmp_path / "result")("def f(x):", return_tensors="pt")
    assert sorted(asked) == ["attention_mask", "input_ids"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    assert model.generate(**asked, max_new_tokens=4).shape[1] > asked["input_ids"].shape[1]
