"""GPT-2 in Hugging Face's format: pre-LN, learned positions, fused qkv in Conv1D orientation (in, out)."""

from __future__ import annotations

from typing import ClassVar

from converter.checkpoint import Checkpoint, TensorInfo
from converter.config import ConfigReader
from converter.families import Family, family
from converter.mapping import Direct, Drop, FusedLayout, FusedQKV, TensorMapping, Transposed
from converter.spec import Activation, BlockRef, ModelSpec, Norm, Positions

ACTIVATIONS = {
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu": Activation.GELU_ERF,
    "gelu_python": Activation.GELU_ERF,
    "quick_gelu": Activation.QUICK_GELU,
    "relu": Activation.RELU,
    "silu": Activation.SILU,
    "swish": Activation.SILU,
}


def not_a_causal_mask(checkpoint: Checkpoint, info: TensorInfo, spec: ModelSpec) -> str | None:
    """Why a (1, 1, N, N) buffer is not the plain lower triangle; a windowed or prefix mask changes the function."""
    import torch

    mask = checkpoint.read(info.name)[0, 0]
    if not torch.equal(mask != 0, torch.ones_like(mask, dtype=torch.bool).tril()):
        return "its mask is not the plain causal triangle, so attention is windowed or prefixed, which no op represents"
    return None


@family
class GPT2(Family):
    """GPT2LMHeadModel, with or without the `transformer.` prefix."""

    name = "gpt2"
    prefix = "transformer."
    embedding = "wte.weight"
    ties_by_default = True
    default_token_ids: ClassVar = {"bos_token_id": 50256, "eos_token_id": 50256}
    default_recipe = "gpt2-to-llama"
    model_class = "GPT2LMHeadModel"
    drops = (
        Drop(r"h\.\d+\.attn\.bias", "causal mask buffer", not_a_causal_mask),
        Drop(r"h\.\d+\.attn\.masked_bias", "mask fill value"),
    )

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        hidden, heads = config.read("n_embd", int, 768), config.read("n_head", int, 12)
        layers = config.read("n_layer", int, 12)
        head_dim = config.divide(hidden, heads, "n_embd", "n_head")
        base = head_dim**-0.5 if config.read("scale_attn_weights", bool, True) else 1.0
        by_layer = config.read("scale_attn_by_inverse_layer_idx", bool, False)
        config.ignore(
            {
                "n_ctx": "an old name of n_positions",
                "reorder_and_upcast_attn": "precision of the attention kernel, not the function",
                "resid_pdrop": "dropout, training only",
                "embd_pdrop": "dropout, training only",
                "attn_pdrop": "dropout, training only",
                "summary_type": "classification heads only",
                "summary_use_proj": "classification heads only",
                "summary_activation": "classification heads only",
                "summary_proj_to_labels": "classification heads only",
                "summary_first_dropout": "classification heads only",
            }
        )
        return ModelSpec(
            vocab_size=config.read("vocab_size", int, 50257),
            hidden_size=hidden,
            intermediate_size=config.read("n_inner", int, 4 * hidden),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            context=config.read("n_positions", int, 1024),
            norm=Norm.LAYERNORM,
            norm_eps=config.read("layer_norm_epsilon", float, 1e-5),
            activation=config.one_of("activation_function", ACTIVATIONS, "gelu_new"),
            gated_mlp=False,
            positions=Positions.LEARNED,
            attention_scales=tuple(base / (layer + 1) if by_layer else base for layer in range(layers)),
            tied_head=tied,
            norm_bias=True,
            final_norm_bias=True,
            biases=frozenset({"q", "k", "v", "o", "up", "down"}),
        )

    def mappings(self, spec: ModelSpec, block: BlockRef) -> list[TensorMapping]:
        if block.kind == "embeddings":
            return [Direct("wte.weight", "embed.weight"), Direct("wpe.weight", "positions.weight")]
        if block.kind == "head":
            return [
                Direct("ln_f.weight", "final_norm.weight"),
                Direct("ln_f.bias", "final_norm.bias"),
                Direct(self.embedding if spec.tied_head else self.head, "head.weight"),
            ]
        h = f"h.{block.index}"
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        return [
            Direct(f"{h}.ln_1.weight", "attn_norm.weight"),
            Direct(f"{h}.ln_1.bias", "attn_norm.bias"),
            FusedQKV(f"{h}.attn.c_attn.weight", "weight", FusedLayout.STACKED, *heads, transposed=True),
            FusedQKV(f"{h}.attn.c_attn.bias", "bias", FusedLayout.STACKED, *heads),
            Transposed(f"{h}.attn.c_proj.weight", "o.weight"),
            Direct(f"{h}.attn.c_proj.bias", "o.bias"),
            Direct(f"{h}.ln_2.weight", "mlp_norm.weight"),
            Direct(f"{h}.ln_2.bias", "mlp_norm.bias"),
            Transposed(f"{h}.mlp.c_fc.weight", "up.weight"),
            Direct(f"{h}.mlp.c_fc.bias", "up.bias"),
            Transposed(f"{h}.mlp.c_proj.weight", "down.weight"),
            Direct(f"{h}.mlp.c_proj.bias", "down.bias"),
        ]
