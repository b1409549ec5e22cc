"""Qwen3: a LLaMA with a norm on each head of q and k, before they are rotated."""

from __future__ import annotations

from typing import Any, ClassVar

from converter.families import family
from converter.families.config import ConfigReader
from converter.families.llama import ATTENTION, Llama
from converter.families.qwen2 import Qwen2, refuse_windows
from converter.spec import ModelSpec, QKNorm


@family
class Qwen3(Llama):
    """Qwen3ForCausalLM."""

    name = "qwen3"
    label = "Qwen3"
    default_recipe = None
    model_class = "Qwen3ForCausalLM"
    default_token_ids: ClassVar = {}
    fields: ClassVar = {**Qwen2.fields, "head_dim": ("head_dim", 128)}
    facts: ClassVar = {**Llama.facts, "qk_norm": QKNorm.PER_HEAD}
    holds: ClassVar = {**Llama.holds, "qk_norm": QKNorm.PER_HEAD}
    biased = (ATTENTION,)

    def read_own(self, config: ConfigReader, spec: ModelSpec) -> ModelSpec:
        refuse_windows(config)
        biases = ATTENTION if config.read("attention_bias", bool, False) else frozenset()
        return spec.replace(biases=biases)

    def write_own(self, spec: ModelSpec) -> dict[str, Any]:
        return {"use_sliding_window": False, "attention_bias": bool(spec.biases)}
