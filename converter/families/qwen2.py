"""Qwen2: a LLaMA with biases on q, k and v only."""

from __future__ import annotations

from typing import Any, ClassVar

from converter.errors import UnsupportedError
from converter.families import family
from converter.families.config import ConfigReader
from converter.families.llama import Llama
from converter.spec import ModelSpec


def refuse_windows(config: ConfigReader) -> None:
    """Qwen's configs describe sliding windows that they do not use; one that is used is refused."""
    windowed = config.read("use_sliding_window", bool, False)
    kinds = [kind for kind in config.read("layer_types", list, []) if kind != "full_attention"]
    config.ignore(
        {
            "layer_types": "full attention in every layer",
            "sliding_window": "not used: use_sliding_window is false",
            "max_window_layers": "not used: use_sliding_window is false",
        }
    )
    if windowed or kinds:
        raise UnsupportedError(
            "some layers attend to a sliding window",
            where=config.where,
            why="the window differs from layer to layer, which no conversion represents",
        )


@family
class Qwen2(Llama):
    """Qwen2ForCausalLM."""

    name = "qwen2"
    label = "Qwen2"
    default_recipe = None
    model_class = "Qwen2ForCausalLM"
    default_token_ids: ClassVar = {}
    fields: ClassVar = {
        **Llama.fields,
        "vocab_size": ("vocab_size", 151936),
        "intermediate_size": ("intermediate_size", 22016),
        "num_kv_heads": ("num_key_value_heads", 32),
        "context": ("max_position_embeddings", 32768),
    }
    facts: ClassVar = {**Llama.facts, "biases": frozenset({"q", "k", "v"})}
    biased = (frozenset({"q", "k", "v"}),)
    always_biased = True

    def read_own(self, config: ConfigReader, spec: ModelSpec) -> ModelSpec:
        refuse_windows(config)
        return spec

    def write_own(self, spec: ModelSpec) -> dict[str, Any]:
        return {"use_sliding_window": False}
