"""LLaMA in Hugging Face's format: pre-norm RMSNorm, SwiGLU, RoPE in half-split layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from converter.blocks import BlockRef
from converter.errors import UnsupportedError
from converter.families import TargetFamily, family
from converter.families.config import ConfigReader
from converter.families.gpt2 import ACTIVATIONS, activation_name
from converter.families.mapping import Direct, Drop, TensorMapping
from converter.spec import ModelSpec, Norm, Positions, RopeLayout

ATTENTION = frozenset({"q", "k", "v", "o"})
MLP = frozenset({"gate", "up", "down"})


@family
class Llama(TargetFamily):
    """LlamaForCausalLM. `attention_bias` and `mlp_bias` hold what a LayerNorm left behind.

    The base of the families that differ from it in a few facts.
    """

    name = "llama"
    label: ClassVar[str] = "LLaMA"
    layout: ClassVar[RopeLayout] = RopeLayout.HALF_SPLIT
    #: Whether its files can be cut for ranks of tensor parallelism.
    cut_for_ranks: ClassVar[bool] = False
    prefix = "model."
    embedding = "embed_tokens.weight"
    model_class: ClassVar[str | None] = "LlamaForCausalLM"
    default_token_ids = {"bos_token_id": 1, "eos_token_id": 2}  # noqa: RUF012 - a constant of the class
    default_recipe: ClassVar[str | None] = "llama-to-llama"
    drops = (Drop(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq", "RoPE frequencies, computed from theta"),)
    #: What transformers' config class assumes where a field is absent; without head_dim it is hidden / heads.
    defaults: ClassVar[Mapping[str, int]] = {
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
    }

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        hidden, heads = config.read("hidden_size", int, 4096), config.read("num_attention_heads", int, 32)
        layers = config.read("num_hidden_layers", int, 32)
        head_dim = config.optional("head_dim", int) or self.defaults.get("head_dim")
        if head_dim is None:
            head_dim = config.divide(hidden, heads, "hidden_size", "num_attention_heads")
        kv_heads = config.optional("num_key_value_heads", int) or heads
        config.divide(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
        rope = config.rope(head_dim, self.layout)
        if rope.rotary_dim != head_dim:
            raise UnsupportedError(
                f"the config asks for a rotary width of {rope.rotary_dim} of {head_dim}",
                where=config.where,
                why=f"transformers' {self.model_class} rotates whole heads and would ignore it",
            )
        config.ignore({"attention_dropout": "dropout, training only", "pretraining_tp": "a sum split in parts"})
        spec = ModelSpec(
            vocab_size=config.read("vocab_size", int, self.defaults["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=config.read("intermediate_size", int, self.defaults["intermediate_size"]),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            context=config.read("max_position_embeddings", int, self.defaults["max_position_embeddings"]),
            norm=Norm.RMSNORM,
            norm_eps=config.read("rms_norm_eps", float, 1e-6),
            activation=config.one_of("hidden_act", ACTIVATIONS, "silu"),
            gated_mlp=True,
            positions=Positions.ROPE,
            attention_scales=(head_dim**-0.5,) * layers,
            tied_head=tied,
            rope=rope,
        )
        return self.read_own(config, spec)

    def read_own(self, config: ConfigReader, spec: ModelSpec) -> ModelSpec:
        """The facts in which this family differs from its relatives."""
        biases = (ATTENTION if config.read("attention_bias", bool, False) else frozenset()) | (
            MLP if config.read("mlp_bias", bool, False) else frozenset()
        )
        return spec.replace(biases=biases)

    def mappings(self, spec: ModelSpec, block: BlockRef) -> list[TensorMapping]:
        if block.kind == "embeddings":
            return [Direct(self.embedding, "embed.weight")]
        if block.kind == "head":
            norm = Direct("norm.weight", "final_norm.weight")
            return [norm, Direct(self.embedding if spec.tied_head else self.head, "head.weight")]
        layer = f"layers.{block.index}"
        linears = {part: f"{layer}.self_attn.{part}_proj" for part in ("q", "k", "v", "o")}
        linears |= {part: f"{layer}.mlp.{part}_proj" for part in ("gate", "up", "down")}
        return [
            Direct(f"{layer}.input_layernorm.weight", "attn_norm.weight"),
            Direct(f"{layer}.post_attention_layernorm.weight", "mlp_norm.weight"),
            *(Direct(f"{name}.weight", f"{part}.weight") for part, name in linears.items()),
            *(Direct(f"{name}.bias", f"{part}.bias") for part, name in linears.items() if part in spec.biases),
            *(
                Direct(f"{layer}.self_attn.{part}_norm.weight", f"{part}_norm.weight")
                for part in ("q", "k")
                if spec.qk_norm is not None
            ),
        ]

    def accept(self, spec: ModelSpec) -> ModelSpec:
        self.refuse_others(spec)
        if spec.qk_norm is not None:
            raise UnsupportedError(f"a {self.label} has no norms on q and k, and the converted model has them")
        if spec.sliding_window is not None:
            raise UnsupportedError(
                f"a {self.label} attends to everything, and the converted model to {spec.sliding_window} tokens"
            )
        biases = spec.biases
        for group in (ATTENTION, MLP):
            biases |= group if biases & group else frozenset()
        return spec.replace(biases=biases)

    def refuse_others(self, spec: ModelSpec) -> None:
        """Raise UnsupportedError for what neither a LLaMA nor its relatives can hold."""
        problems = [
            (spec.norm is not Norm.RMSNORM, "its norm is LayerNorm", "layernorm_to_rmsnorm"),
            (not spec.pre_norm, "its norms stand after the sublayers", "post_ln_to_pre_ln"),
            (not spec.final_norm, "it has no final norm", None),
            (spec.embedding_norm, "its embeddings are normed before the first layer", None),
            (spec.sandwich_norm, "what its sublayers write is normed", None),
            (spec.residual_scale != 1, f"its residual stream is scaled by {spec.residual_scale:g}", None),
            (spec.tied_head and spec.embedding_size is not None, "its head is tied behind a projection", "untie_head"),
            (spec.norm_bias, "its norms have biases", "layernorm_to_rmsnorm"),
            (spec.final_norm_bias, "its final norm has a bias", "fold_final_norm_bias"),
            (not spec.gated_mlp, "its MLP is not gated", "gelu_to_swiglu"),
            (spec.absolute_positions, f"its positions are {spec.positions.value}", "learned_positions_to_rope"),
            (_scaled(spec), "its attention scale is not 1/sqrt(head_dim)", "fold_attention_scale"),
            (spec.parallel_residual, "its attention and MLP are parallel", None),
            ("head" in spec.biases, "its head has a bias", None),
            (spec.ranks > 1 and not self.cut_for_ranks, f"its files are to be cut for {spec.ranks} ranks", None),
        ]
        for wrong, what, remedy in problems:
            if wrong:
                raise UnsupportedError(
                    f"a {self.label} cannot hold the converted model: {what}",
                    fix=f"Add {remedy} to the recipe" if remedy else "No op represents that, so it cannot be converted",
                )
        assert spec.rope is not None
        if spec.rope.layout is not self.layout:
            raise UnsupportedError(
                f"a {self.label} pairs rotary rows {self.layout.value}, and the converted model "
                f"{spec.rope.layout.value}",
                fix="Add swap_rope_layout to the recipe",
            )
        if spec.rope.rotary_dim != spec.head_dim or spec.rope.skipped_layers:
            raise UnsupportedError(
                f"a {self.label} rotates whole heads in every layer, and the converted model does not"
            )

    def write_config(self, spec: ModelSpec) -> dict[str, Any]:
        assert spec.rope is not None
        scaling = dict(spec.rope.scaling or {})
        return {
            "architectures": [self.model_class],
            "model_type": self.name,
            "vocab_size": spec.vocab_size,
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            **self.write_own(spec),
            "hidden_act": activation_name(spec.activation),
            "max_position_embeddings": spec.context,
            "rms_norm_eps": spec.norm_eps,
            "attention_dropout": 0.0,
            "tie_word_embeddings": spec.tied_head,
            # Both schemas: transformers 5 reads the last, older readers the first two.
            "rope_theta": spec.rope.theta,
            "rope_scaling": scaling or None,
            "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": spec.rope.theta},
        }

    def write_own(self, spec: ModelSpec) -> dict[str, Any]:
        """The inverse of `read_own`."""
        return {"attention_bias": bool(spec.biases & ATTENTION), "mlp_bias": bool(spec.biases & MLP)}


def _scaled(spec: ModelSpec) -> bool:
    return any(scale != spec.standard_attention_scale for scale in spec.attention_scales)
