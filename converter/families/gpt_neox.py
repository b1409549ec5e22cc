"""GPT-NeoX and Pythia: LayerNorm, parallel residual, fused qkv per head, partial rotary, half-split.

No op represents a parallel residual: such a model can be inspected, its layout detected and swapped.
"""

from __future__ import annotations

from converter.blocks import BlockRef
from converter.errors import CheckpointError
from converter.families import Family, family
from converter.families.config import ConfigReader
from converter.families.gpt2 import ACTIVATIONS, not_a_causal_mask
from converter.families.mapping import Direct, Drop, FusedLayout, FusedQKV, TensorMapping
from converter.spec import ModelSpec, Norm, Positions, RopeLayout, RopeSpec


@family
class GPTNeoX(Family):
    """GPTNeoXForCausalLM."""

    name = "gpt_neox"
    prefix = "gpt_neox."
    unprefixed = ("embed_out.weight", "lm_head.weight")
    embedding = "embed_in.weight"
    head = "embed_out.weight"
    default_token_ids = {"bos_token_id": 0, "eos_token_id": 2}  # noqa: RUF012
    model_class = "GPTNeoXForCausalLM"
    drops = (
        Drop(r"layers\.\d+\.attention\.bias", "causal mask buffer", not_a_causal_mask),
        Drop(r"layers\.\d+\.attention\.masked_bias", "mask fill value"),
        Drop(r"layers\.\d+\.attention\.rotary_emb\.inv_freq", "RoPE frequencies, computed from theta"),
    )

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        hidden, heads = config.read("hidden_size", int, 6144), config.read("num_attention_heads", int, 64)
        layers = config.read("num_hidden_layers", int, 44)
        head_dim = config.divide(hidden, heads, "hidden_size", "num_attention_heads")
        config.ignore(
            {
                "attention_dropout": "dropout, training only",
                "hidden_dropout": "dropout, training only",
                "classifier_dropout": "classification heads only",
                "attention_probs_dropout_prob": "dropout, training only",
                "hidden_dropout_prob": "dropout, training only",
                "gradient_checkpointing": "training memory only",
            }
        )
        attention = {"q", "k", "v", "o"} if config.read("attention_bias", bool, True) else set()
        return ModelSpec(
            vocab_size=config.read("vocab_size", int, 50432),
            hidden_size=hidden,
            intermediate_size=config.read("intermediate_size", int, 24576),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            context=config.read("max_position_embeddings", int, 2048),
            norm=Norm.LAYERNORM,
            norm_eps=config.read("layer_norm_eps", float, 1e-5),
            activation=config.one_of("hidden_act", ACTIVATIONS, "gelu"),
            gated_mlp=False,
            positions=Positions.ROPE,
            attention_scales=(head_dim**-0.5,) * layers,
            tied_head=tied,
            norm_bias=True,
            final_norm_bias=True,
            biases=frozenset({"up", "down", *attention}),
            rope=_read_rope(config, head_dim),
            parallel_residual=config.read("use_parallel_residual", bool, True),
        )

    def mappings(self, spec: ModelSpec, block: BlockRef) -> list[TensorMapping]:
        if block.kind == "embeddings":
            return [Direct(self.embedding, "embed.weight")]
        if block.kind == "head":
            return [
                Direct("final_layer_norm.weight", "final_norm.weight"),
                Direct("final_layer_norm.bias", "final_norm.bias"),
                Direct(self.embedding if spec.tied_head else self.head, "head.weight"),
            ]
        h = f"layers.{block.index}"
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        kinds = ("weight", "bias") if "q" in spec.biases else ("weight",)
        linears = {f"{h}.mlp.dense_h_to_4h": "up", f"{h}.mlp.dense_4h_to_h": "down"}
        norms = {f"{h}.input_layernorm": "attn_norm", f"{h}.post_attention_layernorm": "mlp_norm"}
        return [
            *(FusedQKV(f"{h}.attention.query_key_value.{k}", k, FusedLayout.PER_HEAD, *heads) for k in kinds),
            *(Direct(f"{h}.attention.dense.{kind}", f"o.{kind}") for kind in kinds),
            *(Direct(f"{n}.{kind}", f"{role}.{kind}") for n, role in (linears | norms).items() for kind in _BOTH),
        ]

    def bare_name(self, name: str) -> str:
        """transformers 5 calls the head lm_head where the files say embed_out."""
        return self.head if name == "lm_head.weight" else super().bare_name(name)

    def full_name(self, bare: str) -> str:
        return "lm_head.weight" if bare == self.head else super().full_name(bare)


_BOTH = ("weight", "bias")


def _read_rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    """Theta and rotary width under transformers 5's names or the family's own: rotary_emb_base, rotary_pct."""
    parameters = dict(config.optional("rope_parameters", dict) or {})
    scaling = config.optional("rope_scaling", dict)
    values = {}
    for own, key, default in (("rotary_emb_base", "rope_theta", 1e4), ("rotary_pct", "partial_rotary_factor", 0.25)):
        inner, outer = parameters.get(key), config.optional(own, float)
        if inner is not None and outer is not None and float(inner) != outer:
            raise CheckpointError(
                f"{own} is {outer} and rope_parameters.{key} is {inner}",
                where=config.where,
                why="old readers would take the one and new readers the other",
                fix="Keep the one that the model was trained with in both",
            )
        values[key] = float(inner if inner is not None else outer if outer is not None else default)
    plain = ConfigReader({"rope_parameters": parameters | values, "rope_scaling": scaling}, config.where)
    return plain.rope(head_dim, RopeLayout.HALF_SPLIT)
