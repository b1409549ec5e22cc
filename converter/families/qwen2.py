"""Qwen2: a LLaMA with biases on q, k and v only."""

from __future__ import annotations

from typing import Any

from converter.errors import UnsupportedError
from converter.families import family, only_biases
from converter.families.config import ConfigReader
from converter.families.llama import Llama
from converter.spec import ModelSpec


def refuse_windows(config: ConfigReader) -> None:
    """Qwen's configs describe sliding windows that they do not use; one that is used is refused."""
    windowed = config.read("use_sliding_window", bool, False)
    kinds = set(config.config.get("layer_types") or []) - {"full_attention"}
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
    default_token_ids = {}  # noqa: RUF012
    defaults = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}  # noqa: RUF012

    def read_own(self, config: ConfigReader, spec: ModelSpec) -> ModelSpec:
        refuse_windows(config)
        return spec.replace(biases=frozenset({"q", "k", "v"}))

    def accept(self, spec: ModelSpec) -> ModelSpec:
        self.refuse_others(spec)
        only_biases(spec, {"q", "k", "v"})
        if spec.qk_norm is not None or spec.sliding_window is not None:
            raise UnsupportedError("a Qwen2 has no norms on q and k and no window here, and the converted model has")
        return spec.replace(biases=frozenset({"q", "k", "v"}))

    def write_own(self, spec: ModelSpec) -> dict[str, Any]:
        return {"use_sliding_window": False}
