"""LLaMA as Meta publishes it: `params.json`, Meta's tensor names, RoPE interleaved.

The MLP's width is not written down: it is 2/3 of 4 D, times a factor, rounded up (`FeedForward` of Meta's
reference code). No file states the context; it is taken as Meta's for each generation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from converter.blocks import BlockRef
from converter.errors import CheckpointError, UnsupportedError
from converter.families import family
from converter.families.config import ConfigReader
from converter.families.llama import Llama
from converter.families.mapping import Direct, Drop, TensorMapping
from converter.files.json_text import write_json
from converter.files.llama_meta import PARAMS, write_shards
from converter.files.safetensors import SafetensorsFile
from converter.spec import Activation, ModelSpec, Norm, Positions, RopeLayout, RopeSpec

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
_NAMES = {
    "q": "attention.wq",
    "k": "attention.wk",
    "v": "attention.wv",
    "o": "attention.wo",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}


def feed_forward_size(hidden_size: int, multiple_of: int, factor: float | None) -> int:
    """The MLP's width by Meta's rule."""
    size = int(2 * (4 * hidden_size) / 3)
    if factor is not None:
        size = int(factor * size)
    return multiple_of * ((size + multiple_of - 1) // multiple_of)


@family
class LlamaMeta(Llama):
    """A folder of Meta's. transformers has no class for it; the reference model runs it."""

    name = "llama_meta"
    label = "LLaMA in Meta's format"
    layout = RopeLayout.INTERLEAVED
    cut_for_ranks: ClassVar[bool] = True
    prefix = ""
    unprefixed = ()
    embedding = "tok_embeddings.weight"
    head = "output.weight"
    ties_by_default = True  # Llama 3.2's small ones are tied and say so nowhere
    model_class: ClassVar[str | None] = None
    default_token_ids: ClassVar[dict[str, int | None]] = {}
    default_recipe = "meta-to-hf"
    drops = (Drop(r"rope\.freqs", "RoPE frequencies, computed from theta"),)

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        hidden, heads = config.read("dim", int), config.read("n_heads", int)
        layers = config.read("n_layers", int)
        head_dim = config.optional("head_dim", int) or config.divide(hidden, heads, "dim", "n_heads")
        rows = config.read("embedding_rows", int)
        vocabulary = config.config.get("vocab_size")
        config.ignore({"vocab_size": "the embedding has so many rows"})
        if isinstance(vocabulary, int) and vocabulary not in (-1, rows):
            raise CheckpointError(f"vocab_size is {vocabulary}, and the embedding has {rows} rows", where=config.where)
        theta = config.read("rope_theta", float, 10000.0)
        scaled = config.read("use_scaled_rope", bool, False)
        if scaled and theta != 500000.0:
            raise UnsupportedError("use_scaled_rope is known with a rope_theta of 500000 only", where=config.where)
        config.ignore(dict.fromkeys(("max_batch_size", "max_seq_len", "model_parallel_size"), "inference settings"))
        for key in ("moe", "quantization_args", "lora_args", "vision_chunk_size"):
            if config.config.get(key) is not None:
                raise UnsupportedError(f"params.json has {key}", where=config.where)
            config.ignore({key: "none"})
        known = 131072 if scaled else 8192 if theta == 500000.0 else 4096 if "n_kv_heads" in config.config else 2048
        return ModelSpec(
            vocab_size=rows,
            hidden_size=hidden,
            intermediate_size=config.optional("intermediate_size", int)
            or feed_forward_size(
                hidden, config.read("multiple_of", int, 256), config.optional("ffn_dim_multiplier", float)
            ),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=config.optional("n_kv_heads", int) or heads,
            head_dim=head_dim,
            context=config.read("max_position_embeddings", int, known),
            norm=Norm.RMSNORM,
            norm_eps=config.read("norm_eps", float, 1e-5),
            activation=Activation.SILU,
            gated_mlp=True,
            positions=Positions.ROPE,
            attention_scales=(head_dim**-0.5,) * layers,
            tied_head=tied,
            rope=RopeSpec(theta, head_dim, self.layout, dict(LLAMA31) if scaled else None),
        )

    def mappings(self, spec: ModelSpec, block: BlockRef) -> list[TensorMapping]:
        if block.kind == "embeddings":
            return [Direct(self.embedding, "embed.weight")]
        if block.kind == "head":
            norm = Direct("norm.weight", "final_norm.weight")
            return [norm, Direct(self.embedding if spec.tied_head else self.head, "head.weight")]
        h = f"layers.{block.index}"
        return [
            Direct(f"{h}.attention_norm.weight", "attn_norm.weight"),
            Direct(f"{h}.ffn_norm.weight", "mlp_norm.weight"),
            *(Direct(f"{h}.{name}.weight", f"{part}.weight") for part, name in _NAMES.items()),
        ]

    def accept(self, spec: ModelSpec) -> ModelSpec:
        spec = super().accept(spec)
        assert spec.rope is not None
        if spec.biases:
            raise UnsupportedError(f"a {self.label} has no biases", fix="Add drop_biases to the recipe")
        if spec.activation is not Activation.SILU:
            raise UnsupportedError(f"a {self.label} computes SiLU, and the converted model {spec.activation.value}")
        scaling = dict(spec.rope.scaling) if spec.rope.scaling else None
        if scaling is not None and (scaling != LLAMA31 or spec.rope.theta != 500000.0):
            raise UnsupportedError(f"a {self.label} cannot say that its positions are scaled by {scaling}")
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
                f"{spec.num_heads} x {spec.head_dim} of {spec.hidden_size}"
            )
        return params

    def finish(self, folder: Path, spec: ModelSpec) -> None:
        """Write `params.json` and `consolidated.NN.pth` in the place of Hugging Face's files."""
        to_meta_files(folder, folder, spec.ranks)
        for file in (folder / "config.json", *folder.glob("model*.safetensors*")):
            file.unlink()


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
    raise UnsupportedError(f"no multiple_of and ffn_dim_multiplier give a width of {spec.intermediate_size}")
