"""GPT-2 in Hugging Face's format: pre-LN, learned positions, fused qkv in Conv1D orientation (in, out)."""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar

from converter.blocks import BlockRef
from converter.errors import UnsupportedError
from converter.families import TargetFamily, family, only_biases
from converter.families.config import ConfigReader
from converter.families.mapping import Direct, Drop, FusedLayout, FusedQKV, TensorMapping, Transposed
from converter.files.checkpoint import Checkpoint, TensorInfo
from converter.spec import Activation, ModelSpec, Norm, Positions

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


def activation_name(activation: Activation) -> str:
    """transformers' name of an activation."""
    return next(name for name, known in ACTIVATIONS.items() if known is activation)


def not_a_causal_mask(checkpoint: Checkpoint, info: TensorInfo, spec: ModelSpec) -> str | None:
    """Why a buffer is not the plain lower triangle (1, 1, N, N); a windowed or prefix mask changes the function."""
    import torch

    if len(info.shape) != 4 or info.shape != (1, 1, *info.shape[3:] * 2):
        return f"its shape is {list(info.shape)}, and a mask is [1, 1, N, N]"
    mask = checkpoint.read(info.name)[0, 0]
    if not torch.equal(mask != 0, torch.ones_like(mask, dtype=torch.bool).tril()):
        return "its mask is not the plain causal triangle, so attention is windowed or prefixed, which no op represents"
    return None


def not_a_fill_value(checkpoint: Checkpoint, info: TensorInfo, spec: ModelSpec) -> str | None:
    """Why a buffer is not the single number that masked attention logits were set to."""
    return None if info.shape in ((), (1,)) else f"its shape is {list(info.shape)}, and the fill value is one number"


@family
class GPT2(TargetFamily):
    """GPT2LMHeadModel, with or without the `transformer.` prefix."""

    name = "gpt2"
    prefix = "transformer."
    embedding = "wte.weight"
    ties_by_default = True
    default_token_ids: ClassVar = {"bos_token_id": 50256, "eos_token_id": 50256}
    model_class = "GPT2LMHeadModel"
    drops = (
        Drop(r"h\.\d+\.attn\.bias", "causal mask buffer", not_a_causal_mask),
        Drop(r"h\.\d+\.attn\.masked_bias", "mask fill value", not_a_fill_value),
    )

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        hidden, heads = config.read("n_embd", int, 768), config.read("n_head", int, 12)
        layers = config.read("n_layer", int, 12)
        head_dim = config.divide(hidden, heads, "n_embd", "n_head")
        scaled = config.read("scale_attn_weights", bool, True)
        by_layer = config.read("scale_attn_by_inverse_layer_idx", bool, False)
        config.ignore(
            {
                "n_ctx": "an old name of n_positions",
                "n_special": "tokens that the vocabulary counts already",
                "predict_special_tokens": "which logits old heads returned",
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
            attention_scales=_attention_scales(head_dim, layers, scaled, by_layer),
            tied_head=tied,
            norm_bias=True,
            final_norm_bias=True,
            biases=_BIASES,
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

    def accept(self, spec: ModelSpec) -> ModelSpec:
        problems = {
            "its norm is RMSNorm": spec.norm is not Norm.LAYERNORM,
            "its norms stand after the sublayers": not spec.pre_norm,
            "it has no final norm": not spec.final_norm,
            "its embeddings are normed before the first layer": spec.embedding_norm,
            "what its sublayers write is normed": spec.sandwich_norm,
            "its residual stream is scaled": spec.residual_scale != 1,
            "its head is tied behind a projection": spec.tied_head and spec.embedding_size is not None,
            "q and k have norms": spec.qk_norm is not None,
            "its MLP is gated": spec.gated_mlp,
            "its attention and MLP are parallel": spec.parallel_residual,
            "its positions are not learned": spec.positions is not Positions.LEARNED,
            "its attention sees a window only": spec.sliding_window is not None,
            "it has fewer key-value heads than query heads": spec.num_kv_heads != spec.num_heads,
            "its heads together are not as wide as its states": spec.query_size != spec.hidden_size,
            "its attention scales are of no GPT-2": _scale_flags(spec) is None,
        }
        for what, wrong in problems.items():
            if wrong:
                raise UnsupportedError(f"a GPT-2 cannot hold the converted model: {what}")
        only_biases(spec, _BIASES)
        return spec.replace(norm_bias=True, final_norm_bias=True, biases=_BIASES)

    def write_config(self, spec: ModelSpec) -> dict[str, Any]:
        flags = _scale_flags(spec)
        assert flags is not None
        return {
            "architectures": [self.model_class],
            "model_type": self.name,
            "vocab_size": spec.vocab_size,
            "n_positions": spec.context,
            "n_embd": spec.hidden_size,
            "n_layer": spec.num_layers,
            "n_head": spec.num_heads,
            "n_inner": spec.intermediate_size,
            "activation_function": activation_name(spec.activation),
            "layer_norm_epsilon": spec.norm_eps,
            "scale_attn_weights": flags[0],
            "scale_attn_by_inverse_layer_idx": flags[1],
            "tie_word_embeddings": spec.tied_head,
        }


_BIASES = frozenset({"q", "k", "v", "o", "up", "down"})


def _attention_scales(head_dim: int, layers: int, scaled: bool, by_layer: bool) -> tuple[float, ...]:
    base = head_dim**-0.5 if scaled else 1.0
    return tuple(base / (layer + 1) if by_layer else base for layer in range(layers))


def _scale_flags(spec: ModelSpec) -> tuple[bool, bool] | None:
    """`scale_attn_weights` and `scale_attn_by_inverse_layer_idx` that give these scales, where some do."""
    for scaled, by_layer in product((True, False), (False, True)):
        if spec.attention_scales == _attention_scales(spec.head_dim, spec.num_layers, scaled, by_layer):
            return scaled, by_layer
    return None
