"""LLaMA in Hugging Face's format: pre-norm RMSNorm, SwiGLU, RoPE in half-split layout."""

from __future__ import annotations

from typing import Any, ClassVar

from converter.errors import UnsupportedError
from converter.families import TargetFamily, family
from converter.families.buffers import frequencies, position_ids
from converter.families.config import ConfigReader
from converter.families.fields import TRAINING, activation_name
from converter.families.holding import ANY_DECODER, refuse
from converter.families.mapping import Drop
from converter.families.rope_config import read_rope, rope_fields
from converter.spec import ModelSpec, Norm, Positions

ATTENTION = frozenset({"q", "k", "v", "o"})
MLP = frozenset({"gate", "up", "down"})


@family
class Llama(TargetFamily):
    """LlamaForCausalLM. `attention_bias` and `mlp_bias` hold what a LayerNorm left behind.

    The base of the families that differ from it in a few facts.
    """

    name = "llama"
    label: ClassVar[str] = "LLaMA"
    prefix = "model."
    model_class: ClassVar[str | None] = "LlamaForCausalLM"
    default_token_ids: ClassVar = {"bos_token_id": 1, "eos_token_id": 2}
    default_recipe: ClassVar[str | None] = "llama-to-llama"
    fields: ClassVar = {
        "vocab_size": ("vocab_size", 32000),
        "hidden_size": ("hidden_size", 4096),
        "intermediate_size": ("intermediate_size", 11008),
        "num_layers": ("num_hidden_layers", 32),
        "num_heads": ("num_attention_heads", 32),
        "num_kv_heads": ("num_key_value_heads", None),
        "head_dim": ("head_dim", None),
        "activation": ("hidden_act", "silu"),
        "context": ("max_position_embeddings", 2048),
        "norm_eps": ("rms_norm_eps", 1e-6),
    }
    facts: ClassVar = {"norm": Norm.RMSNORM, "gated_mlp": True, "positions": Positions.ROPE}
    holds: ClassVar = {
        "norm": Norm.RMSNORM,
        **ANY_DECODER,
        "norm_bias": False,
        "final_norm_bias": False,
        "gated_mlp": True,
        "positions": Positions.ROPE,
    }
    biased: ClassVar[tuple[frozenset[str], ...]] = (ATTENTION, MLP)
    ignored: ClassVar = {"attention_dropout": TRAINING, "pretraining_tp": "a sum split in parts"}
    modules: ClassVar = {
        "embed": "embed_tokens",
        "attn_norm": "layers.{}.input_layernorm",
        "mlp_norm": "layers.{}.post_attention_layernorm",
        **{part: f"layers.{{}}.self_attn.{part}_proj" for part in ("q", "k", "v", "o")},
        **{part: f"layers.{{}}.mlp.{part}_proj" for part in ("gate", "up", "down")},
        "q_norm": "layers.{}.self_attn.q_norm",
        "k_norm": "layers.{}.self_attn.k_norm",
        "final_norm": "norm",
    }
    drops: ClassVar[tuple[Drop, ...]] = (
        frequencies(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
        position_ids(),
    )

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        spec = super().read_spec(config, tied)
        rope = read_rope(config, spec.head_dim, self.layout)
        if rope.rotary_dim != spec.head_dim:
            raise UnsupportedError(
                f"the config asks for a rotary width of {rope.rotary_dim} of {spec.head_dim}",
                where=config.where,
                why=f"transformers' {self.model_class} rotates whole heads and would ignore it",
            )
        return self.read_own(config, spec.replace(rope=rope))

    def read_own(self, config: ConfigReader, spec: ModelSpec) -> ModelSpec:
        """The facts in which this family differs from its relatives."""
        biases = (ATTENTION if config.read("attention_bias", bool, False) else frozenset()) | (
            MLP if config.read("mlp_bias", bool, False) else frozenset()
        )
        return spec.replace(biases=biases)

    def accept(self, spec: ModelSpec) -> ModelSpec:
        accepted = super().accept(spec)
        assert spec.rope is not None
        if spec.rope.layout is not self.layout:
            pairs = f"it pairs rotary rows {spec.rope.layout.value}, and a {self.label} {self.layout.value}"
            refuse(self.label, pairs, "swap_rope_layout")
        if spec.rope.rotary_dim != spec.head_dim or spec.rope.skipped_layers:
            refuse(self.label, "it does not rotate whole heads in every layer")
        return accepted

    def write_config(self, spec: ModelSpec) -> dict[str, Any]:
        stated = self.stated(spec) | {"hidden_act": activation_name(spec.activation)}
        last = {key: stated.pop(key) for key in ("hidden_act", "max_position_embeddings", "rms_norm_eps")}
        return {
            "architectures": [self.model_class],
            "model_type": self.name,
            **stated,
            **self.write_own(spec),
            **last,
            "attention_dropout": 0.0,
            "tie_word_embeddings": spec.tied_head,
            **self.rope_config(spec),
        }

    def rope_config(self, spec: ModelSpec) -> dict[str, Any]:
        assert spec.rope is not None
        return rope_fields(spec.rope)

    def write_own(self, spec: ModelSpec) -> dict[str, Any]:
        """The inverse of `read_own`."""
        return {"attention_bias": bool(spec.biases & ATTENTION), "mlp_bias": bool(spec.biases & MLP)}
