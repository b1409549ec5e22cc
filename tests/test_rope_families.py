"""Families with RoPE: the reference model, driven by the family's declared facts, against transformers' own class.

The declared layout, rotary width and exceptions are what the test is about (case R9): the same weights under the other
layout have to be far off.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers
from models import edit_config, jitter, random_ids, run, save
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from converter.conversion.recipe import Recipe
from converter.conversion.run import plan_conversion
from converter.errors import CheckpointError, UnsupportedError
from converter.families.opened import SourceModel
from converter.layout import other_layout
from converter.measure.models import load_transformers
from converter.spec import QKNorm, RopeLayout

LLAMA_LIKE = {
    "vocab_size": 61,
    "max_position_embeddings": 72,
    "hidden_size": 42,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 3e-4,
}
NEOX = {
    "vocab_size": 61,
    "max_position_embeddings": 72,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "layer_norm_eps": 3e-4,
}
GPTJ = {
    "vocab_size": 61,
    "n_positions": 72,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 3,
    "n_inner": 80,
    "rotary_dim": 8,
    "layer_norm_epsilon": 3e-4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 18,
}

#: Family, config, and the facts that it must declare.
CASES = {
    "llama": ("Llama", LLAMA_LIKE | {"attention_bias": True}, {"layout": "half_split", "rotary": 16}),
    "llama, scaled as Llama 3": ("Llama", LLAMA_LIKE | {"rope_parameters": LLAMA3}, {"rotary": 16}),
    "mistral": ("Mistral", LLAMA_LIKE | {"sliding_window": None}, {"layout": "half_split", "rotary": 16}),
    "mistral, window": ("Mistral", LLAMA_LIKE | {"sliding_window": 9}, {"rotary": 16}),
    "qwen2": ("Qwen2", {**LLAMA_LIKE, "hidden_size": 96}, {"layout": "half_split", "rotary": 16}),
    "qwen2, tied": ("Qwen2", {**LLAMA_LIKE, "hidden_size": 96, "tie_word_embeddings": True}, {"rotary": 16}),
    "qwen3": ("Qwen3", LLAMA_LIKE, {"layout": "half_split", "rotary": 16}),
    "gpt_neox": (
        "GPTNeoX",
        NEOX | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rotary": 8},
    ),
    "gpt_neox, sequential": ("GPTNeoX", NEOX | {"use_parallel_residual": False}, {"layout": "half_split", "rotary": 4}),
    "gpt_neox, no biases": ("GPTNeoX", NEOX | {"attention_bias": False}, {"rotary": 4}),
    "gptj": ("GPTJ", GPTJ, {"layout": "interleaved", "rotary": 8}),
    "gptj, whole head": ("GPTJ", GPTJ | {"rotary_dim": 16}, {"layout": "interleaved", "rotary": 16}),
}


def make(family: str, config: dict[str, object]) -> PreTrainedModel:
    config_class, model_class = (getattr(transformers, family + end) for end in ("Config", "ForCausalLM"))
    return jitter(model_class(config_class(**config)), seed=1)


def logits(source: SourceModel, ids: torch.Tensor) -> torch.Tensor:
    return run(lambda ref: source.read_block(ref, torch.float32), source.spec, ids)


@pytest.mark.parametrize("case", CASES)
def test_reference_model_equals_transformers(case: str, tmp_path: Path):
    family, config, facts = CASES[case]
    model = make(family, config)
    source = SourceModel.open(save(model, tmp_path / "model"))
    ids = random_ids()
    assert ids.shape[1] >= 64
    with torch.no_grad():
        expected = model(ids).logits
    found = logits(source, ids)
    scale = float(expected.abs().max())
    assert float((found - expected).abs().max()) <= 1e-5 * scale

    rope = source.spec.rope
    assert rope is not None
    assert rope.rotary_dim == facts["rotary"]
    assert rope.layout.value == facts.get("layout", rope.layout.value)
    wrong = dataclasses.replace(rope, layout=other_layout(rope.layout))
    source.spec = source.spec.replace(rope=wrong)
    if rope.rotary_dim > 4:
        assert float((logits(source, ids) - expected).abs().max()) > 1e-2 * scale


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_by_our_mapping(case: str, tmp_path: Path):
    family, config, _ = CASES[case]
    model = make(family, config)
    loaded = load_transformers(SourceModel.open(save(model, tmp_path / "model")))
    ids = random_ids()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_qwen3_has_norms_on_each_head(tmp_path: Path):
    source = SourceModel.open(save(make("Qwen3", LLAMA_LIKE), tmp_path / "model"))
    assert source.spec.qk_norm is QKNorm.PER_HEAD


def test_mistral_without_the_field_has_transformers_own_window(tmp_path: Path):
    folder = save(
        make("Mistral", LLAMA_LIKE | {"max_position_embeddings": 5000, "sliding_window": 4096}), tmp_path / "m"
    )
    assert SourceModel.open(edit_config(folder, sliding_window=...)).spec.sliding_window == 4096
    assert SourceModel.open(edit_config(folder, sliding_window=None)).spec.sliding_window is None


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_windows_that_differ_by_layer_are_refused(family: str, tmp_path: Path):
    folder = save(make(family, {**LLAMA_LIKE, "hidden_size": 96}), tmp_path / "model")
    edit_config(folder, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(UnsupportedError, match="sliding window"):
        SourceModel.open(folder)


def test_old_and_new_names_of_gpt_neox_rope(tmp_path: Path):
    folder = save(make("GPTNeoX", NEOX), tmp_path / "model")
    old = {"rope_parameters": ..., "rotary_pct": 0.5, "rotary_emb_base": 5e4}
    rope = SourceModel.open(edit_config(folder, **old)).spec.rope
    assert rope is not None
    assert (rope.theta, rope.rotary_dim) == (5e4, 8)
    edit_config(folder, rope_parameters={"rope_theta": 1e4, "rope_type": "default"})
    with pytest.raises(CheckpointError) as caught:
        SourceModel.open(folder)
    assert "50000" in str(caught.value)
    assert "10000" in str(caught.value)


@pytest.mark.parametrize(("family", "config"), [("GPTJ", GPTJ), ("GPTNeoX", NEOX)])
def test_a_parallel_residual_is_refused_by_a_conversion(family: str, config: dict[str, object], tmp_path: Path):
    folder = save(make(family, config), tmp_path / "model")
    with pytest.raises(UnsupportedError, match="read the same states \\(parallel residual\\), which no op changes"):
        plan_conversion(folder, "gpt2-to-llama")


@pytest.mark.parametrize(
    ("family", "target"), [("Mistral", "mistral"), ("Qwen2", "qwen2"), ("Qwen3", "qwen3"), ("Llama", "llama")]
)
def test_a_target_writes_what_it_reads(family: str, target: str, tmp_path: Path):
    source = SourceModel.open(save(make(family, {**LLAMA_LIKE, "hidden_size": 96}), tmp_path / "model"))
    plan = plan_conversion(tmp_path / "model", Recipe("r", target, ()))
    from converter.families.config import ConfigReader

    config = plan.target.write_config(plan.target_spec)
    assert plan.target.read_spec(ConfigReader(config, "written"), source.spec.tied_head) == source.spec
    for key in ("rope_theta", "rope_parameters"):
        assert key in config


@pytest.mark.parametrize(("family", "target"), [("Qwen3", "llama"), ("Qwen3", "mistral"), ("Qwen2", "mistral")])
def test_a_target_refuses_what_it_cannot_hold(family: str, target: str, tmp_path: Path):
    folder = save(make(family, {**LLAMA_LIKE, "hidden_size": 96}), tmp_path / "model")
    with pytest.raises(UnsupportedError):
        plan_conversion(folder, Recipe("r", target, ()))


def test_layouts_are_declared():
    from converter.families import families

    assert families()["llama"].layout is RopeLayout.HALF_SPLIT  # type: ignore[attr-defined]


@pytest.mark.parametrize(("scaling", "stored"), [(None, 1e4), (LLAMA3, 5e5), (LLAMA3, None)])
def test_a_stored_table_of_frequencies_is_the_plain_or_the_scaled_one(
    scaling: dict[str, object] | None, stored: float | None, tmp_path: Path
):
    model = make("Llama", LLAMA_LIKE | ({"rope_parameters": scaling} if scaling else {}))
    frequencies = model.model.rotary_emb.inv_freq
    if stored is not None:
        frequencies = stored ** -(torch.arange(0, 16, 2) / 16)
    table = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": frequencies.clone() for i in range(2)}
    folder = save(model, tmp_path / "model")
    save_file(load_file(folder / "model.safetensors") | table, folder / "model.safetensors")
    plan_conversion(folder, "llama-to-llama")
    other = {name: frequencies.clone() ** 0.7 for name in table}
    save_file(load_file(folder / "model.safetensors") | other, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"those of a theta of \d.*, and the config says \d"):
        plan_conversion(folder, "llama-to-llama")
