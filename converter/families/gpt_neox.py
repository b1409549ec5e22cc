"""GPT-NeoX and Pythia: LayerNorm, parallel residual, fused qkv per head, partial rotary, half-split.

No op represents a parallel residual: such a model can be inspected, its layout detected and swapped.
"""

from __future__ import annotations

from typing import Any, ClassVar

from converter.families import Family, family
from converter.families.buffers import causal_mask, fill_value, frequencies
from converter.families.config import ConfigReader
from converter.families.fields import CLASSIFIERS, TRAINING
from converter.families.mapping import FusedLayout
from converter.families.rope_config import read_rope, rope_fields
from converter.spec import ModelSpec, Norm, Positions

#: Theta and the rotary part of a head, under transformers' names and this family's own.
_ROPE_NAMES: dict[str, Any] = {
    "theta_names": ("rope_theta", "rotary_emb_base"),
    "partial_names": ("partial_rotary_factor", "rotary_pct"),
    "default_partial": 0.25,
}


@family
class GPTNeoX(Family):
    """GPTNeoXForCausalLM."""

    name = "gpt_neox"
    prefix = "gpt_neox."
    unprefixed = ("embed_out.weight", "lm_head.weight")
    default_token_ids: ClassVar = {"bos_token_id": 0, "eos_token_id": 2}
    model_class = "GPTNeoXForCausalLM"
    fields: ClassVar = {
        "vocab_size": ("vocab_size", 50432),
        "context": ("max_position_embeddings", 2048),
        "hidden_size": ("hidden_size", 6144),
        "num_layers": ("num_hidden_layers", 44),
        "num_heads": ("num_attention_heads", 64),
        "intermediate_size": ("intermediate_size", 24576),
        "activation": ("hidden_act", "gelu"),
        "norm_eps": ("layer_norm_eps", 1e-5),
    }
    facts: ClassVar = {
        "norm": Norm.LAYERNORM,
        "gated_mlp": False,
        "positions": Positions.ROPE,
        "norm_bias": True,
        "final_norm_bias": True,
    }
    ignored: ClassVar = {
        **dict.fromkeys(("attention_dropout", "hidden_dropout"), TRAINING),
        **dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), TRAINING),
        "classifier_dropout": CLASSIFIERS,
    }
    modules: ClassVar = {
        "embed": "embed_in",
        "attn_norm": "layers.{}.input_layernorm",
        "qkv": "layers.{}.attention.query_key_value",
        "o": "layers.{}.attention.dense",
        "mlp_norm": "layers.{}.post_attention_layernorm",
        "up": "layers.{}.mlp.dense_h_to_4h",
        "down": "layers.{}.mlp.dense_4h_to_h",
        "final_norm": "final_layer_norm",
        "head": "embed_out",
    }
    fused = FusedLayout.PER_HEAD
    drops = (
        causal_mask(r"layers\.\d+\.attention\.bias"),
        fill_value(r"layers\.\d+\.attention\.masked_bias"),
        frequencies(r"(layers\.\d+\.attention\.)?rotary_emb\.inv_freq"),
    )

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        spec = super().read_spec(config, tied)
        attention = {"q", "k", "v", "o"} if config.read("attention_bias", bool, True) else set()
        return spec.replace(
            biases=frozenset({"up", "down", *attention}),
            rope=read_rope(config, spec.head_dim, self.layout, **_ROPE_NAMES),
            parallel_residual=config.read("use_parallel_residual", bool, True),
        )

    def rope_config(self, spec: ModelSpec) -> dict[str, Any]:
        assert spec.rope is not None
        fields, part = rope_fields(spec.rope), spec.rope.rotary_dim / spec.head_dim
        fields["rope_parameters"] |= {"partial_rotary_factor": part}
        return {"rotary_emb_base": fields.pop("rope_theta"), "rotary_pct": part, **fields}

    def bare_name(self, name: str) -> str:
        """transformers 5 calls the head lm_head where the files say embed_out."""
        return self.head if name == "lm_head.weight" else super().bare_name(name)

    def full_name(self, bare: str) -> str:
        return "lm_head.weight" if bare == self.head else super().full_name(bare)
