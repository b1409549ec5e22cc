"""The first GPT in Hugging Face's format: post-LN without a final norm, learned positions, linears as (in, out)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converter.blocks import BlockRef
from converter.families import Family, family
from converter.families.config import ConfigReader
from converter.families.gpt2 import not_a_causal_mask
from converter.families.mapping import Direct, Drop, FusedLayout, FusedQKV, TensorMapping, Transposed
from converter.spec import Activation, ModelSpec, Norm, Positions

#: This family's own names: its "gelu" is the tanh form.
ACTIVATIONS = {
    "gelu": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}


@family
class OpenAIGPT(Family):
    """OpenAIGPTLMHeadModel, with or without the `transformer.` prefix."""

    name = "openai_gpt"
    prefix = "transformer."
    embedding = "tokens_embed.weight"
    ties_by_default = True
    model_class = "OpenAIGPTLMHeadModel"
    drops = (
        Drop(r"h\.\d+\.attn\.bias", "causal mask buffer", not_a_causal_mask),
        Drop(r"position_ids", "the numbers from 0 on"),
    )

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "openai-gpt"

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        hidden, heads = config.read("n_embd", int, 768), config.read("n_head", int, 12)
        layers = config.read("n_layer", int, 12)
        head_dim = config.divide(hidden, heads, "n_embd", "n_head")
        config.ignore(
            {
                "n_ctx": "an old name of n_positions",
                "n_special": "tokens that the vocabulary counts already",
                "predict_special_tokens": "which logits old heads returned",
                "resid_pdrop": "dropout, training only",
                "embd_pdrop": "dropout, training only",
                "attn_pdrop": "dropout, training only",
                **{key: "classification heads only" for key in config.config if key.startswith("summary_")},
            }
        )
        return ModelSpec(
            vocab_size=config.read("vocab_size", int, 40478),
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            context=config.read("n_positions", int, 512),
            norm=Norm.LAYERNORM,
            norm_eps=config.read("layer_norm_epsilon", float, 1e-5),
            activation=config.one_of("afn", ACTIVATIONS, "gelu"),
            gated_mlp=False,
            positions=Positions.LEARNED,
            attention_scales=(head_dim**-0.5,) * layers,
            tied_head=tied,
            pre_norm=False,
            final_norm=False,
            norm_bias=True,
            biases=frozenset({"q", "k", "v", "o", "up", "down"}),
        )

    def mappings(self, spec: ModelSpec, block: BlockRef) -> list[TensorMapping]:
        if block.kind == "embeddings":
            return [Direct(self.embedding, "embed.weight"), Direct("positions_embed.weight", "positions.weight")]
        if block.kind == "head":
            return [Direct(self.embedding if spec.tied_head else self.head, "head.weight")]
        h = f"h.{block.index}"
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        linears = {"attn.c_proj": "o", "mlp.c_fc": "up", "mlp.c_proj": "down"}
        norms = {"ln_1": "attn_norm", "ln_2": "mlp_norm"}
        return [
            FusedQKV(f"{h}.attn.c_attn.weight", "weight", FusedLayout.STACKED, *heads, transposed=True),
            FusedQKV(f"{h}.attn.c_attn.bias", "bias", FusedLayout.STACKED, *heads),
            *(Transposed(f"{h}.{name}.weight", f"{part}.weight") for name, part in linears.items()),
            *(Direct(f"{h}.{name}.weight", f"{norm}.weight") for name, norm in norms.items()),
            *(Direct(f"{h}.{name}.bias", f"{part}.bias") for name, part in (linears | norms).items()),
        ]
