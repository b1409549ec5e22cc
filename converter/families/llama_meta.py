"""LLaMA as Meta publishes it: `params.json`, Meta's tensor names, RoPE interleaved.

The MLP's width is not written down: it is 2/3 of 4 D, times a factor, rounded up (`FeedForward` of Meta's
reference code). No file states the context: `context_of` knows that of Meta's own models, and a guess is told as one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from converter.errors import CheckpointError, UnsupportedError
from converter.families import family
from converter.families.buffers import frequencies
from converter.families.config import ConfigReader
from converter.families.fields import read_facts
from converter.families.holding import refuse
from converter.families.llama import Llama
from converter.files.json_text import write_json
from converter.files.llama_meta import PARAMS, write_shards
from converter.files.safetensors import SafetensorsFile
from converter.spec import Activation, ModelSpec, RopeLayout, RopeSpec

if TYPE_CHECKING:
    from torch import Tensor

#: Meta's scaling since Llama 3.1, by `use_scaled_rope`: the constants of its reference code.
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def feed_forward_size(hidden_size: int, multiple_of: int, factor: float | None) -> int:
    """The MLP's width by Meta's rule."""
    size = int(2 * (4 * hidden_size) / 3)
    if factor is not None:
        size = int(factor * size)
    return multiple_of * ((size + multiple_of - 1) // multiple_of)


def context_of(params: Mapping[str, Any]) -> tuple[int, str, bool]:
    """The context of Meta's model with these params, which do not state it, its name, and whether that is certain.

    Only what Meta has published is known: theta tells CodeLlama and Llama 3, fewer key-value heads the largest
    Llama 2, and eps its smaller ones from LLaMA, of which the largest had their eps.
    """
    theta = params.get("rope_theta", 10000.0)
    if params.get("use_scaled_rope"):
        return 131072, "Llama 3.1", True
    if theta == 500000.0:
        return 8192, "Llama 3", True
    if isinstance(theta, int | float) and theta > 10000.0:
        return 16384, "Code Llama", theta == 1000000.0
    size = params.get("dim"), params.get("n_layers")
    if size == (8192, 80):
        return (4096, "Llama 2", True) if "n_kv_heads" in params else (2048, "LLaMA", True)
    if size in ((4096, 32), (5120, 40)) and params.get("norm_eps") in (1e-5, 1e-6):
        return (4096, "Llama 2", True) if params["norm_eps"] == 1e-5 else (2048, "LLaMA", True)
    if size == (6656, 60):
        return 2048, "LLaMA", True
    newer = params.get("norm_eps") == 1e-5 or "n_kv_heads" in params
    return (4096, "Llama 2", False) if newer else (2048, "LLaMA", False)


@family
class LlamaMeta(Llama):
    """A folder of Meta's. transformers has no class for it; the reference model runs it."""

    name = "llama_meta"
    label = "LLaMA in Meta's format"
    layout = RopeLayout.INTERLEAVED
    own_container: ClassVar[bool] = True
    prefix = ""
    unprefixed = ()
    ties_by_default = True  # Llama 3.2's small ones are tied and say so nowhere
    model_class: ClassVar[str | None] = None
    default_token_ids: ClassVar[dict[str, int | None]] = {}
    default_recipe = "meta-to-hf"
    fields: ClassVar = {
        "vocab_size": ("embedding_rows", ...),
        "hidden_size": ("dim", ...),
        "num_layers": ("n_layers", ...),
        "num_heads": ("n_heads", ...),
        "num_kv_heads": ("n_kv_heads", None),
        "head_dim": ("head_dim", None),
        "intermediate_size": ("intermediate_size", None),
        "norm_eps": ("norm_eps", 1e-5),
    }
    facts: ClassVar = {**Llama.facts, "activation": Activation.SILU}
    holds: ClassVar = {fact: value for fact, value in Llama.holds.items() if fact != "ranks"} | {
        "activation": Activation.SILU
    }
    biased = ()
    ignored = dict.fromkeys(("max_batch_size", "max_seq_len", "model_parallel_size"), "inference settings")
    modules: ClassVar = {
        "embed": "tok_embeddings",
        "attn_norm": "layers.{}.attention_norm",
        "mlp_norm": "layers.{}.ffn_norm",
        **{part: f"layers.{{}}.attention.w{part}" for part in ("q", "k", "v", "o")},
        "gate": "layers.{}.feed_forward.w1",
        "up": "layers.{}.feed_forward.w3",
        "down": "layers.{}.feed_forward.w2",
        "final_norm": "norm",
        "head": "output",
    }
    drops = (frequencies(r"rope\.freqs"),)

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        config.ignore(self.ignored)
        rows, vocabulary = config.config.get("embedding_rows"), config.config.get("vocab_size")
        config.ignore({"vocab_size": "the embedding has so many rows"})
        if isinstance(vocabulary, int) and vocabulary not in (-1, rows):
            raise CheckpointError(
                f"vocab_size is {vocabulary}, and the embedding has {rows} rows",
                where=config.where,
                fix="Take params.json and the weights from one and the same model",
            )
        theta = config.read("rope_theta", float, 10000.0)
        scaled = config.read("use_scaled_rope", bool, False)
        if scaled and theta != 500000.0:
            raise UnsupportedError(
                f"use_scaled_rope is true and rope_theta is {theta:g}",
                where=config.where,
                why="the scaling is known by Llama 3.1's rule only, and that is for a theta of 500000",
                fix="Write the rope_theta that the model was trained with",
            )
        for key in ("moe", "quantization_args", "lora_args", "vision_chunk_size"):
            if config.config.get(key) is not None:
                raise UnsupportedError(
                    f"params.json has {key}",
                    where=config.where,
                    why="only plain LLaMAs in full precision are converted",
                )
            config.ignore({key: "none"})
        context = config.read("max_position_embeddings", int, context_of(config.config)[0])
        spec = read_facts(config, self.fields, **self.facts, tied_head=tied, context=context)
        rope = RopeSpec(theta, spec.head_dim, self.layout, dict(LLAMA31) if scaled else None)
        multiple, factor = config.read("multiple_of", int, 256), config.optional("ffn_dim_multiplier", float)
        if config.config.get("intermediate_size") is None:
            spec = spec.replace(intermediate_size=feed_forward_size(spec.hidden_size, multiple, factor))
        return spec.replace(rope=rope)

    def remarks(self, config: Mapping[str, Any], tokens: int | None) -> list[str]:
        context, model, certain = context_of(config)
        if certain or config.get("max_position_embeddings") is not None:
            return []
        return [
            f"params.json does not say the context: {context} is taken, that of {model}. If it is another model, put "
            '"max_position_embeddings" with its context into params.json'
        ]

    def accept(self, spec: ModelSpec) -> ModelSpec:
        spec = super().accept(spec)
        assert spec.rope is not None
        scaling = dict(spec.rope.scaling) if spec.rope.scaling else None
        if scaling is not None and (scaling != LLAMA31 or spec.rope.theta != 500000.0):
            refuse(self.label, f"its positions are scaled by {scaling}")
        return spec

    def write_config(self, spec: ModelSpec) -> dict[str, Any]:
        """`params.json`. A width that Meta's rule does not give is written out, for us: Meta's code cannot hold it."""
        assert spec.rope is not None
        params: dict[str, Any] = {
            "dim": spec.hidden_size,
            "n_layers": spec.num_layers,
            "n_heads": spec.num_heads,
            "n_kv_heads": spec.num_kv_heads,
            "vocab_size": spec.vocab_size,
            "norm_eps": spec.norm_eps,
            "rope_theta": spec.rope.theta,
            "use_scaled_rope": spec.rope.scaling is not None,
            **_width(spec),
        }
        if spec.head_dim * spec.num_heads != spec.hidden_size:
            raise UnsupportedError(
                f"in a {self.label} the heads are as wide as the model, and here they are "
                f"{spec.num_heads} x {spec.head_dim} of {spec.hidden_size}",
                why="params.json has no field for another width",
                fix="Choose a target in Hugging Face's format",
            )
        return params

    def write_container(self, written: Path, folder: Path, spec: ModelSpec) -> None:
        """`params.json` and `consolidated.NN.pth`."""
        to_meta_files(written, folder, spec.ranks)


def to_meta_files(source: Path, folder: Path, ranks: int) -> None:
    """Meta's files in `folder`, cut for so many ranks, from config.json and safetensors by Meta's names."""
    params = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "use_cache", "model_type"):
        params.pop(key, None)
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("model*.safetensors")):
        opened = SafetensorsFile(file)
        tensors |= {name: opened.read(name) for name in opened.layout}
    tensors.setdefault("output.weight", tensors["tok_embeddings.weight"])  # tied: Meta's files hold it twice
    write_shards(folder, tensors, ranks, params["dim"])
    write_json(folder / PARAMS, params)


def _width(spec: ModelSpec) -> dict[str, Any]:
    """multiple_of and ffn_dim_multiplier that give the MLP's width by Meta's rule."""
    for multiple in (4096, 1024, 256, 64, 32, 8, 4, 2, 1):
        if spec.intermediate_size % multiple:
            continue
        if feed_forward_size(spec.hidden_size, multiple, None) == spec.intermediate_size:
            return {"multiple_of": multiple}
        factor = round(spec.intermediate_size / int(8 * spec.hidden_size / 3), 6)
        if feed_forward_size(spec.hidden_size, multiple, factor) == spec.intermediate_size:
            return {"multiple_of": multiple, "ffn_dim_multiplier": factor}
    raise UnsupportedError(
        f"no multiple_of and ffn_dim_multiplier give a width of {spec.intermediate_size}",
        why="params.json states the MLP's width by these two only",
        fix="Choose a target in Hugging Face's format",
    )
