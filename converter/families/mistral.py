"""Mistral: a LLaMA without biases, whose attention may see a window of the last tokens only."""

from __future__ import annotations

from typing import Any

from converter.errors import UnsupportedError
from converter.families import family, only_biases
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
    defaults = {"vocab_size": 32000, "intermediate_size": 14336, "max_position_embeddings": 131072}  # noqa: RUF012

    def read_own(self, config: ConfigReader, spec: ModelSpec) -> ModelSpec:
        # An absent field means transformers' default, and null means no window at all.
        absent = "sliding_window" not in config.config
        window = 4096 if absent else config.optional("sliding_window", int)
        config.ignore({"layer_types": "MistralForCausalLM gives every layer the same window, and does not read it"})
        return spec.replace(sliding_window=window if window is not None and window < spec.context else None)

    def accept(self, spec: ModelSpec) -> ModelSpec:
        self.refuse_others(spec)
        only_biases(spec, ())
        if spec.qk_norm is not None:
            raise UnsupportedError("a Mistral has no norms on q and k, and the converted model has them")
        return spec

    def write_own(self, spec: ModelSpec) -> dict[str, Any]:
        return {"sliding_window": spec.sliding_window}
