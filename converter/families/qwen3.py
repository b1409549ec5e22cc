"""Qwen3: a LLaMA with a norm on each head of q and k, before they are rotated."""

from __future__ import annotations

from typing import Any

from converter.errors import UnsupportedError
from converter.families import family, only_biases
from converter.families.config import ConfigReader
from converter.families.llama import ATTENTION, Llama
from converter.families.qwen2 import refuse_windows
from converter.spec import ModelSpec, QKNorm


@family
class Qwen3(Llama):
    """Qwen3ForCausalLM."""

    name = "qwen3"
    label = "Qwen3"
    default_recipe = None
    model_class = "Qwen3ForCausalLM"
    default_token_ids = {}  # noqa: RUF012
    defaults = {  # noqa: RUF012
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "head_dim": 128,
    }

    def read_own(self, config: ConfigReader, spec: ModelSpec) -> ModelSpec:
        refuse_windows(config)
        biases = ATTENTION if config.read("attention_bias", bool, False) else frozenset()
        return spec.replace(biases=biases, qk_norm=QKNorm.PER_HEAD)

    def accept(self, spec: ModelSpec) -> ModelSpec:
        self.refuse_others(spec)
        only_biases(spec, ATTENTION)
        if spec.qk_norm is not QKNorm.PER_HEAD or spec.sliding_window is not None:
            raise UnsupportedError("a Qwen3 has a norm on each head of q and k, and the converted model has not")
        return spec.replace(biases=ATTENTION if spec.biases else frozenset())

    def write_own(self, spec: ModelSpec) -> dict[str, Any]:
        return {"use_sliding_window": False, "attention_bias": bool(spec.biases)}
