"""GPT-J: LayerNorm, one norm for attention and MLP side by side, the first part of each head rotated interleaved.

No op represents a parallel residual: such a model can be inspected, its layout detected and swapped.
"""

from __future__ import annotations

from typing import ClassVar

from converter.errors import UnsupportedError
from converter.families import Family, family
from converter.families.buffers import causal_mask, fill_value, position_ids
from converter.families.config import ConfigReader
from converter.families.fields import CLASSIFIERS, GPT_ALIASES, TRAINING
from converter.families.mapping import Drop
from converter.spec import ModelSpec, Norm, Positions, RopeLayout, RopeSpec


@family
class GPTJ(Family):
    """GPTJForCausalLM."""

    name = "gptj"
    prefix = "transformer."
    unprefixed = ("lm_head.weight", "lm_head.bias")
    default_token_ids: ClassVar = {"bos_token_id": 50256, "eos_token_id": 50256}
    model_class = "GPTJForCausalLM"
    fields: ClassVar = {
        "vocab_size": ("vocab_size", 50400),
        "context": ("n_positions", 2048),
        "hidden_size": ("n_embd", 4096),
        "num_layers": ("n_layer", 28),
        "num_heads": ("n_head", 16),
        "intermediate_size": ("n_inner", None),
        "activation": ("activation_function", "gelu_new"),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
    }
    facts: ClassVar = {
        "norm": Norm.LAYERNORM,
        "gated_mlp": False,
        "positions": Positions.ROPE,
        "norm_bias": True,
        "final_norm_bias": True,
        "biases": frozenset({"up", "down", "head"}),
        "parallel_residual": True,
    }
    aliases: ClassVar = GPT_ALIASES
    layout = RopeLayout.INTERLEAVED
    ignored: ClassVar = {
        "rotary": "always true in this family",
        "n_ctx": "an old name of n_positions",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), TRAINING),
        "scale_attn_weights": "not read by GPTJForCausalLM, which always divides by sqrt(head_dim)",
        **{f"summary_{key}": CLASSIFIERS for key in ("type", "use_proj", "activation", "proj_to_labels")},
        "summary_first_dropout": CLASSIFIERS,
    }
    modules: ClassVar = {
        "embed": "wte",
        "attn_norm": "h.{}.ln_1",
        "mlp_norm": "h.{}.ln_1",
        **{part: f"h.{{}}.attn.{part}_proj" for part in ("q", "k", "v")},
        "o": "h.{}.attn.out_proj",
        "up": "h.{}.mlp.fc_in",
        "down": "h.{}.mlp.fc_out",
        "final_norm": "ln_f",
        "head": "lm_head",
    }
    drops = (
        causal_mask(r"h\.\d+\.attn\.bias"),
        fill_value(r"h\.\d+\.attn\.masked_bias"),
        Drop(r"h\.\d+\.attn\.embed_positions", "table of sines and cosines"),
        position_ids(),
    )

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        spec, width = super().read_spec(config, tied), config.read("rotary_dim", int, 64)
        if width % 2 or width > spec.head_dim:
            raise UnsupportedError(
                f"rotary_dim is {width}, not an even part of a head of {spec.head_dim}",
                where=config.where,
                why="rotary rows come in pairs, and a head has no more of them",
            )
        return spec.replace(rope=RopeSpec(10000.0, width, self.layout))
