"""OPT and Galactica: learned positions from row 2 on, ReLU, pre-LN but for OPT-350m.

OPT-350m also has narrow embeddings, with a projection behind them and another one before the head: both are
multiplied in as the blocks are read.
"""

from __future__ import annotations

from typing import ClassVar

from converter.blocks import BlockRef
from converter.errors import UnsupportedError
from converter.families import Family, family
from converter.families.config import ConfigReader
from converter.families.gpt2 import ACTIVATIONS
from converter.families.mapping import Direct, Ones, Projected, Skipped, TensorMapping
from converter.spec import ModelSpec, Norm, Positions

#: Rows of the position table before that of the first position (fairseq's pad index, plus one).
_OFFSET = 2
#: transformers' LayerNorms here have torch's own eps, and the config cannot say another one.
_EPS = 1e-5
_ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}


@family
class OPT(Family):
    """OPTForCausalLM, with or without `model.` and `decoder.` before its names."""

    name = "opt"
    prefix = "model.decoder."
    embedding = "embed_tokens.weight"
    ties_by_default = True
    default_token_ids: ClassVar = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    model_class = "OPTForCausalLM"

    def bare_name(self, name: str) -> str:
        """Files of OPTModel say `decoder.` only."""
        return name.removeprefix("model.").removeprefix("decoder.")

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        hidden, heads = config.read("hidden_size", int, 768), config.read("num_attention_heads", int, 12)
        layers = config.read("num_hidden_layers", int, 12)
        head_dim = config.divide(hidden, heads, "hidden_size", "num_attention_heads")
        pre_norm = config.read("do_layer_norm_before", bool, True)
        removed = config.read("_remove_final_layer_norm", bool, False)
        gains = config.read("layer_norm_elementwise_affine", bool, True)
        biases = {"q", "k", "v", "o", "up", "down"} if config.read("enable_bias", bool, True) else ()
        width = config.read("word_embed_proj_dim", int, hidden)
        self._account_for_others(config)
        return ModelSpec(
            vocab_size=config.read("vocab_size", int, 50272),
            hidden_size=hidden,
            intermediate_size=config.read("ffn_dim", int, 3072),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            context=config.read("max_position_embeddings", int, 2048),
            norm=Norm.LAYERNORM,
            norm_eps=_EPS,
            activation=config.one_of("activation_function", ACTIVATIONS, "relu"),
            gated_mlp=False,
            positions=Positions.LEARNED,
            attention_scales=(head_dim**-0.5,) * layers,
            tied_head=tied,
            pre_norm=pre_norm,
            final_norm=pre_norm and not removed,
            norm_bias=gains,
            final_norm_bias=gains and pre_norm and not removed,
            biases=frozenset(biases),
            embedding_size=width if width != hidden else None,
        )

    def _account_for_others(self, config: ConfigReader) -> None:
        for key, expected in {"learned_embeddings": True, "scale_embeddings": False}.items():
            if config.read(key, bool, expected) is not expected:
                raise UnsupportedError(
                    f"config field '{key}' is {config.config[key]}",
                    where=config.where,
                    why="OPTForCausalLM always learns its positions and never scales its embeddings",
                )
        dropouts = ("dropout", "attention_dropout", "activation_dropout", "layerdrop")
        config.ignore(dict.fromkeys(dropouts, "dropout, training only") | {"init_std": "training starts only"})

    def mappings(self, spec: ModelSpec, block: BlockRef) -> list[TensorMapping]:
        if block.kind == "embeddings":
            positions = Skipped("embed_positions.weight", "positions.weight", _OFFSET)
            return [_table(self.embedding, "project_in.weight", "embed.weight", spec), positions]
        if block.kind == "head":
            norm = _norm("final_layer_norm", "final_norm", spec) if spec.final_norm else []
            name = self.embedding if spec.tied_head else self.head
            return [*norm, _table(name, "project_out.weight", "head.weight", spec)]
        h = f"layers.{block.index}"
        linears = {part: f"{h}.self_attn.{name}" for part, name in _ATTENTION.items()}
        linears |= {"up": f"{h}.fc1", "down": f"{h}.fc2"}
        return [
            *_norm(f"{h}.self_attn_layer_norm", "attn_norm", spec),
            *_norm(f"{h}.final_layer_norm", "mlp_norm", spec),
            *(Direct(f"{name}.weight", f"{part}.weight") for part, name in linears.items()),
            *(Direct(f"{name}.bias", f"{part}.bias") for part, name in linears.items() if part in spec.biases),
        ]


def _table(name: str, projection: str, role: str, spec: ModelSpec) -> TensorMapping:
    """Embeddings or head, with their projection where they have one."""
    if spec.embedding_size is None:
        return Direct(name, role)
    return Projected(name, projection, role, spec.embedding_size, before=role == "head.weight")


def _norm(name: str, role: str, spec: ModelSpec) -> list[TensorMapping]:
    """A norm with its parameters, or one without any."""
    if not spec.norm_bias:
        return [Ones(f"{role}.weight", spec.hidden_size)]
    return [Direct(f"{name}.weight", f"{role}.weight"), Direct(f"{name}.bias", f"{role}.bias")]
