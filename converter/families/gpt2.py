"""GPT-2 in Hugging Face's format: pre-LN, learned positions, fused qkv in Conv1D orientation (in, out)."""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar

from converter.families import TargetFamily, family
from converter.families.buffers import causal_mask, fill_value, position_ids
from converter.families.config import ConfigReader
from converter.families.fields import CLASSIFIERS, GPT_ALIASES, TRAINING, activation_name
from converter.families.holding import ANY_DECODER, refuse
from converter.spec import ModelSpec, Norm, Positions

_BIASES = frozenset({"q", "k", "v", "o", "up", "down"})
_LAYERS: dict[str, Any] = {"norm": Norm.LAYERNORM, "gated_mlp": False, "positions": Positions.LEARNED}


@family
class GPT2(TargetFamily):
    """GPT2LMHeadModel, with or without the `transformer.` prefix."""

    name = "gpt2"
    label = "GPT-2"
    prefix = "transformer."
    ties_by_default = True
    default_token_ids: ClassVar = {"bos_token_id": 50256, "eos_token_id": 50256}
    model_class = "GPT2LMHeadModel"
    fields: ClassVar = {
        "vocab_size": ("vocab_size", 50257),
        "context": ("n_positions", 1024),
        "hidden_size": ("n_embd", 768),
        "num_layers": ("n_layer", 12),
        "num_heads": ("n_head", 12),
        "intermediate_size": ("n_inner", None),
        "activation": ("activation_function", "gelu_new"),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
    }
    facts: ClassVar = {**_LAYERS, "norm_bias": True, "final_norm_bias": True, "biases": _BIASES}
    holds: ClassVar = {**_LAYERS, **ANY_DECODER}
    biased = (_BIASES,)
    always_biased = True
    aliases: ClassVar = GPT_ALIASES
    ignored: ClassVar = {
        "n_ctx": "an old name of n_positions",
        # GPT-SW3's: the first divides q by the layer's number and multiplies the scores by it again.
        "apply_query_key_layer_scaling": "a precision of training that cancels out",
        "normalize_attention_scores": "attention is a softmax here, whatever it says",
        "n_special": "tokens that the vocabulary counts already",
        "predict_special_tokens": "which logits old heads returned",
        "reorder_and_upcast_attn": "precision of the attention kernel, not the function",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), TRAINING),
        **{f"summary_{key}": CLASSIFIERS for key in ("type", "use_proj", "activation", "proj_to_labels")},
        "summary_first_dropout": CLASSIFIERS,
    }
    modules: ClassVar = {
        "embed": "wte",
        "positions": "wpe",
        "attn_norm": "h.{}.ln_1",
        "qkv": "h.{}.attn.c_attn",
        "o": "h.{}.attn.c_proj",
        "mlp_norm": "h.{}.ln_2",
        "up": "h.{}.mlp.c_fc",
        "down": "h.{}.mlp.c_proj",
        "final_norm": "ln_f",
    }
    transposed = True
    drops = (causal_mask(r"h\.\d+\.attn\.bias"), fill_value(r"h\.\d+\.attn\.masked_bias"), position_ids())

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        spec = super().read_spec(config, tied)
        scaled = config.read("scale_attn_weights", bool, True)
        by_layer = config.read("scale_attn_by_inverse_layer_idx", bool, False)
        return spec.replace(attention_scales=_attention_scales(spec, scaled, by_layer))

    def accept(self, spec: ModelSpec) -> ModelSpec:
        problems = {
            "it has fewer key-value heads than query heads": spec.num_kv_heads != spec.num_heads,
            "its heads together are not as wide as its states": spec.query_size != spec.hidden_size,
            "its attention scales are of no GPT-2": _scale_flags(spec) is None,
        }
        accepted = super().accept(spec)
        for what, wrong in problems.items():
            if wrong:
                refuse("GPT-2", what)
        return accepted.replace(norm_bias=True, final_norm_bias=True)

    def write_config(self, spec: ModelSpec) -> dict[str, Any]:
        flags = _scale_flags(spec)
        assert flags is not None
        return {
            "architectures": [self.model_class],
            "model_type": self.name,
            **self.stated(spec),
            "activation_function": activation_name(spec.activation),
            "scale_attn_weights": flags[0],
            "scale_attn_by_inverse_layer_idx": flags[1],
            "tie_word_embeddings": spec.tied_head,
        }


def _attention_scales(spec: ModelSpec, scaled: bool, by_layer: bool) -> tuple[float, ...]:
    base = spec.standard_attention_scale if scaled else 1.0
    return tuple(base / (layer + 1) if by_layer else base for layer in range(spec.num_layers))


def _scale_flags(spec: ModelSpec) -> tuple[bool, bool] | None:
    """`scale_attn_weights` and `scale_attn_by_inverse_layer_idx` that give these scales, where some do."""
    flags = product((True, False), (False, True))
    return next((each for each in flags if spec.attention_scales == _attention_scales(spec, *each)), None)
