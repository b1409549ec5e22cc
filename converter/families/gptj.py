"""GPT-J: LayerNorm, one norm for attention and MLP side by side, the first part of each head rotated interleaved.

No op represents a parallel residual: such a model can be inspected, its layout detected and swapped.
"""

from __future__ import annotations

from typing import ClassVar

from converter.blocks import BlockRef
from converter.errors import UnsupportedError
from converter.families import Family, family
from converter.families.config import ConfigReader
from converter.families.gpt2 import ACTIVATIONS, not_a_causal_mask
from converter.families.mapping import Direct, Drop, Shared, TensorMapping
from converter.spec import ModelSpec, Norm, Positions, RopeLayout, RopeSpec


@family
class GPTJ(Family):
    """GPTJForCausalLM."""

    name = "gptj"
    prefix = "transformer."
    unprefixed = ("lm_head.weight", "lm_head.bias")
    embedding = "wte.weight"
    default_token_ids: ClassVar = {"bos_token_id": 50256, "eos_token_id": 50256}
    model_class = "GPTJForCausalLM"
    drops = (
        Drop(r"h\.\d+\.attn\.bias", "causal mask buffer", not_a_causal_mask),
        Drop(r"h\.\d+\.attn\.masked_bias", "mask fill value"),
        Drop(r"h\.\d+\.attn\.embed_positions", "table of sines and cosines"),
    )

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        hidden, heads = config.read("n_embd", int, 4096), config.read("n_head", int, 16)
        layers = config.read("n_layer", int, 28)
        head_dim = config.divide(hidden, heads, "n_embd", "n_head")
        rotary_dim = config.read("rotary_dim", int, 64)
        if rotary_dim % 2 or rotary_dim > head_dim:
            raise UnsupportedError(
                f"rotary_dim is {rotary_dim}, not an even part of a head of {head_dim}", where=config.where
            )
        config.ignore(
            {
                "rotary": "always true in this family",
                "n_ctx": "an old name of n_positions",
                "resid_pdrop": "dropout, training only",
                "embd_pdrop": "dropout, training only",
                "attn_pdrop": "dropout, training only",
                "scale_attn_weights": "not read by GPTJForCausalLM, which always divides by sqrt(head_dim)",
                **{key: "classification heads only" for key in config.config if key.startswith("summary_")},
            }
        )
        return ModelSpec(
            vocab_size=config.read("vocab_size", int, 50400),
            hidden_size=hidden,
            intermediate_size=config.read("n_inner", int, 4 * hidden),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            context=config.read("n_positions", int, 2048),
            norm=Norm.LAYERNORM,
            norm_eps=config.read("layer_norm_epsilon", float, 1e-5),
            activation=config.one_of("activation_function", ACTIVATIONS, "gelu_new"),
            gated_mlp=False,
            positions=Positions.ROPE,
            attention_scales=(head_dim**-0.5,) * layers,
            tied_head=tied,
            norm_bias=True,
            final_norm_bias=True,
            biases=frozenset({"up", "down", "head"}),
            rope=RopeSpec(10000.0, rotary_dim, RopeLayout.INTERLEAVED),
            parallel_residual=True,
        )

    def mappings(self, spec: ModelSpec, block: BlockRef) -> list[TensorMapping]:
        if block.kind == "embeddings":
            return [Direct(self.embedding, "embed.weight")]
        if block.kind == "head":
            return [
                Direct("ln_f.weight", "final_norm.weight"),
                Direct("ln_f.bias", "final_norm.bias"),
                Direct(self.embedding if spec.tied_head else self.head, "head.weight"),
                Direct("lm_head.bias", "head.bias"),
            ]
        h = f"h.{block.index}"
        attention = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
        return [
            *(Shared(f"{h}.ln_1.{k}", (f"attn_norm.{k}", f"mlp_norm.{k}")) for k in ("weight", "bias")),
            *(Direct(f"{h}.attn.{name}.weight", f"{part}.weight") for part, name in attention.items()),
            *(Direct(f"{h}.mlp.fc_in.{k}", f"up.{k}") for k in ("weight", "bias")),
            *(Direct(f"{h}.mlp.fc_out.{k}", f"down.{k}") for k in ("weight", "bias")),
        ]
