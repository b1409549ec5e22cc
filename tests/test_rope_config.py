"""How a config states RoPE (cases C1, C2, C3 and C6)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import edit_config, run, save
from test_rope_families import LLAMA3, LLAMA_LIKE, make
from torch import Tensor

from converter.conversion.run import convert
from converter.errors import CheckpointError
from converter.families.config import ConfigReader
from converter.families.opened import SourceModel
from converter.families.rope_config import read_rope
from converter.reference import rope_frequencies
from converter.spec import RopeLayout

LONG = {**LLAMA_LIKE, "max_position_embeddings": 1200}
IDS = torch.randint(61, (1, 1100), generator=torch.Generator().manual_seed(0))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}


def logits(folder: Path) -> Tensor:
    source = SourceModel.open(folder)
    return run(lambda ref: source.read_block(ref, torch.float32), source.spec, IDS)


def llama(folder: Path, **config: Any) -> Path:
    """A llama whose config states RoPE in this way and in no other."""
    save(make("Llama", LONG), folder)
    return edit_config(folder, **{"rope_parameters": ..., **config})


class TestC1:
    def test_old_and_new_schema_are_the_same_model_and_theta_counts(self, tmp_path):
        old = llama(tmp_path / "a", rope_theta=500000.0)
        new = llama(tmp_path / "b", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
        assert torch.equal(logits(old), logits(new))
        wrong = logits(llama(tmp_path / "w", rope_theta=10000.0))
        assert float((wrong - logits(old))[:, 0].abs().max()) <= 1e-5
        assert float((wrong - logits(old))[:, 64].abs().max()) > 0.1

    @pytest.mark.parametrize(
        ("config", "values"),
        [
            ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, ("10000", "500000")),
            ({"rope_parameters": {"rope_type": "default"}}, ("rope_theta", "None")),
        ],
    )
    def test_a_disagreement_or_a_missing_theta_is_an_error_with_both_values(self, config, values, tmp_path):
        with pytest.raises(CheckpointError) as caught:
            SourceModel.open(llama(tmp_path / "m", **config))
        assert all(value in str(caught.value) for value in values)


def read(scaling: dict[str, Any], context: int = 64) -> Any:
    config = {"rope_parameters": scaling, "max_position_embeddings": context}
    return read_rope(ConfigReader(config, "config.json"), 8, RopeLayout.HALF_SPLIT)


class TestC3:
    @pytest.mark.parametrize("spelling", [None, "attn_factor", "attention_factor"])
    def test_frequencies_and_attention_scale(self, spelling):
        scaling = YARN if spelling is None else {**YARN, spelling: 1.1386294361119891}
        frequencies, factor = rope_frequencies(read(scaling), 64)
        assert factor == pytest.approx(1.13863, abs=1e-5)
        assert frequencies.tolist() == pytest.approx([1, 0.025, 0.0025, 0.00025], rel=1e-4)

    def test_one_spelling_is_kept(self):
        scaling = read({**YARN, "attn_factor": 1.2}).scaling
        assert scaling["attention_factor"] == 1.2
        assert "attn_factor" not in scaling

    def test_contradictions_are_errors(self):
        with pytest.raises(CheckpointError, match=r"attn_factor is 1\.2 and attention_factor is 1\.3"):
            read({**YARN, "attn_factor": 1.2, "attention_factor": 1.3})
        with pytest.raises(CheckpointError, match="max_position_embeddings is 128"):
            read(YARN, context=128)


@pytest.mark.parametrize(
    "scaling",
    [
        {**LLAMA3, "original_max_position_embeddings": 300},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        {**YARN, "original_max_position_embeddings": 300},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_c2_and_c6_scaling_is_kept_in_both_schemas_and_far_positions_agree(scaling, tmp_path):
    model = make("Llama", {**LONG, "rope_parameters": scaling})
    folder = save(model, tmp_path / "model")
    with torch.no_grad():
        wanted = model(IDS).logits
    assert float((logits(folder) - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    convert(folder, tmp_path / "out", recipe="llama-to-llama", verify=False)
    config = json.loads((tmp_path / "out/config.json").read_text())
    for schema in ("rope_scaling", "rope_parameters"):
        assert {key: config[schema][key] for key in scaling if key != "rope_theta"} == {
            key: value for key, value in scaling.items() if key != "rope_theta"
        }
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == scaling["rope_theta"]
    with torch.no_grad():
        from transformers import AutoModelForCausalLM

        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(IDS).logits, wanted)
