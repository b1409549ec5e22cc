"""OPT and Galactica: learned positions from row 2 on, ReLU, pre-LN but for OPT-350m.

OPT-350m also has narrow embeddings, with a projection behind them and another one before the head: both are
multiplied in as the blocks are read.
"""

from __future__ import annotations

from typing import ClassVar

from converter.blocks import BlockRef
from converter.errors import UnsupportedError
from converter.families import Family, family
from converter.families.buffers import position_ids, version
from converter.families.config import ConfigReader
from converter.families.fields import TRAINING
from converter.families.mapping import Ones, Projected, Skipped, TensorMapping
from converter.spec import ModelSpec, Norm, Positions

#: Rows of the position table before that of the first position (fairseq's pad index, plus one).
_OFFSET = 2


@family
class OPT(Family):
    """OPTForCausalLM, with or without `model.` and `decoder.` before its names."""

    name = "opt"
    prefix = "model.decoder."
    ties_by_default = True
    default_token_ids: ClassVar = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    model_class = "OPTForCausalLM"
    fields: ClassVar = {
        "vocab_size": ("vocab_size", 50272),
        "context": ("max_position_embeddings", 2048),
        "hidden_size": ("hidden_size", 768),
        "num_layers": ("num_hidden_layers", 12),
        "num_heads": ("num_attention_heads", 12),
        "intermediate_size": ("ffn_dim", 3072),
        "activation": ("activation_function", "relu"),
    }
    facts: ClassVar = {
        "norm": Norm.LAYERNORM,
        "norm_eps": 1e-5,  # transformers' LayerNorms here have torch's own eps, and the config cannot say another one
        "gated_mlp": False,
        "positions": Positions.LEARNED,
    }
    ignored: ClassVar = {
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "layerdrop"), TRAINING),
        "init_std": "training starts only",
    }
    drops = (version(r"version"), position_ids())
    modules: ClassVar = {
        "embed": "embed_tokens",
        "positions": "embed_positions",
        "attn_norm": "layers.{}.self_attn_layer_norm",
        **{part: f"layers.{{}}.self_attn.{part}_proj" for part in ("q", "k", "v")},
        "o": "layers.{}.self_attn.out_proj",
        "mlp_norm": "layers.{}.final_layer_norm",
        "up": "layers.{}.fc1",
        "down": "layers.{}.fc2",
        "final_norm": "final_layer_norm",
    }

    def bare_name(self, name: str) -> str:
        """Files of OPTModel say `decoder.` only."""
        return name.removeprefix("model.").removeprefix("decoder.")

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        for key, expected in {"learned_embeddings": True, "scale_embeddings": False}.items():
            if config.read(key, bool, expected) is not expected:
                raise UnsupportedError(
                    f"config field '{key}' is {config.config[key]}",
                    where=config.where,
                    why="OPTForCausalLM always learns its positions and never scales its embeddings",
                )
        spec = super().read_spec(config, tied)
        pre_norm = config.read("do_layer_norm_before", bool, True)
        final_norm = not config.read("_remove_final_layer_norm", bool, False) and pre_norm
        gains = config.read("layer_norm_elementwise_affine", bool, True)
        biases = {"q", "k", "v", "o", "up", "down"} if config.read("enable_bias", bool, True) else ()
        width = config.read("word_embed_proj_dim", int, spec.hidden_size)
        return spec.replace(
            pre_norm=pre_norm,
            final_norm=final_norm,
            norm_bias=gains,
            final_norm_bias=gains and final_norm,
            biases=frozenset(biases),
            embedding_size=width if width != spec.hidden_size else None,
        )

    def mapping(self, spec: ModelSpec, block: BlockRef, role: str) -> TensorMapping:
        if role == "positions.weight":
            return Skipped(f"{self.modules['positions']}.weight", role, _OFFSET)
        if role.endswith("norm.weight") and not spec.norm_bias:
            return Ones("", role, spec.hidden_size)
        if spec.embedding_size is not None and role == "embed.weight":
            return Projected(self.embedding, role, "project_in.weight", spec.embedding_size)
        if spec.embedding_size is not None and role == "head.weight":
            name = self.embedding if spec.tied_head else self.head
            return Projected(name, role, "project_out.weight", spec.embedding_size)
        return super().mapping(spec, block, role)
