"""Mistral: a LLaMA without biases, whose attention may see a window of the last tokens only."""

from __future__ import annotations

from typing import Any, ClassVar

from converter.families import family
from converter.families.config import ConfigReader
from converter.families.llama import Llama
from converter.spec import ModelSpec


@family
class Mistral(Llama):
    """MistralForCausalLM."""

    name = "mistral"
    label = "Mistral"
    default_recipe = None
    model_class = "MistralForCausalLM"
    fields: ClassVar = {
        **Llama.fields,
        "intermediate_size": ("intermediate_size", 14336),
        "num_kv_heads": ("num_key_value_heads", 8),
        "context": ("max_position_embeddings", 131072),
    }
    holds: ClassVar = {fact: value for fact, value in Llama.holds.items() if fact != "sliding_window"}
    biased = ()

    def read_own(self, config: ConfigReader, spec: ModelSpec) -> ModelSpec:
        # An absent field means transformers' default, and null means no window at all.
        absent = "sliding_window" not in config.config
        window = 4096 if absent else config.optional("sliding_window", int)
        config.ignore({"layer_types": "MistralForCausalLM gives every layer the same window, and does not read it"})
        return spec.replace(sliding_window=window if window is not None and window < spec.context else None)

    def write_own(self, spec: ModelSpec) -> dict[str, Any]:
        return {"sliding_window": spec.sliding_window}
