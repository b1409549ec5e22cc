"""GGUF files of the architectures that are LLaMA's or close to it.

The layout is the container's own rule, by architecture: llama.cpp rotates `llama` interleaved and permutes q and
k when it converts from Hugging Face's format; `qwen2` and `qwen3` it rotates half-split, as they are.
"""

from __future__ import annotations

from typing import Any, ClassVar

from converter.errors import CheckpointError, UnsupportedError, did_you_mean
from converter.families import Family, family
from converter.families.config import ConfigReader
from converter.families.fields import read_facts
from converter.families.mapping import Drop
from converter.families.scaling import scaling_of
from converter.files.gguf import DIVISORS
from converter.spec import Activation, ModelSpec, Norm, Positions, QKNorm, RopeLayout, RopeSpec

#: Architecture -> layout, linears that carry biases, norms on q and k.
ARCHITECTURES: dict[str, tuple[RopeLayout, frozenset[str], QKNorm | None]] = {
    "llama": (RopeLayout.INTERLEAVED, frozenset(), None),
    "qwen2": (RopeLayout.HALF_SPLIT, frozenset({"q", "k", "v"}), None),
    "qwen3": (RopeLayout.HALF_SPLIT, frozenset(), QKNorm.PER_HEAD),
}


@family
class GGUF(Family):
    """A GGUF file. transformers has no class for it; the reference model runs it."""

    name = "gguf"
    ties_by_default = True
    default_recipe = "gguf-to-hf"
    facts: ClassVar = {
        "norm": Norm.RMSNORM,
        "activation": Activation.SILU,
        "gated_mlp": True,
        "positions": Positions.ROPE,
    }
    modules: ClassVar = {
        "embed": "token_embd",
        "attn_norm": "blk.{}.attn_norm",
        **{part: f"blk.{{}}.attn_{part}" for part in ("q", "k", "v")},
        "o": "blk.{}.attn_output",
        "q_norm": "blk.{}.attn_q_norm",
        "k_norm": "blk.{}.attn_k_norm",
        "mlp_norm": "blk.{}.ffn_norm",
        **{part: f"blk.{{}}.ffn_{part}" for part in ("gate", "up", "down")},
        "final_norm": "output_norm",
        "head": "output",
    }
    drops: ClassVar[tuple[Drop, ...]] = (Drop(r"rope_freqs\.weight", "divisors of the rotary frequencies, now a rule"),)

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        architecture = config.read("general.architecture", str)
        if architecture not in ARCHITECTURES:
            raise UnsupportedError(
                f"the GGUF holds a '{architecture}', which is not an architecture that we know",
                where=config.where,
                fix=did_you_mean(architecture, ARCHITECTURES),
            )
        layout, biases, qk_norm = ARCHITECTURES[architecture]
        a = architecture
        fields = {
            "context": (f"{a}.context_length", ...),
            "hidden_size": (f"{a}.embedding_length", ...),
            "intermediate_size": (f"{a}.feed_forward_length", ...),
            "num_layers": (f"{a}.block_count", ...),
            "num_heads": (f"{a}.attention.head_count", ...),
            "num_kv_heads": (f"{a}.attention.head_count_kv", None),
            "head_dim": (f"{a}.attention.key_length", None),
            "norm_eps": (f"{a}.attention.layer_norm_rms_epsilon", ...),
        }
        own: dict[str, Any] = {"vocab_size": _vocabulary(config, a), "biases": biases, "qk_norm": qk_norm}
        spec = read_facts(config, fields, **self.facts, **own, tied_head=tied)
        if config.read(f"{a}.attention.value_length", int, spec.head_dim) != spec.head_dim:
            raise UnsupportedError("rows of v are not as many as those of k", where=config.where, why=_NO_PLACE)
        if config.config.get(f"{a}.expert_count"):
            raise UnsupportedError("the model is a mixture of experts", where=config.where, why=_NO_PLACE)
        config.ignore({f"{a}.expert_count": "none", f"{a}.expert_used_count": "none"})
        config.ignore({key: "about the file" for key in config.config if key.startswith(("general.", "quantize."))})
        config.ignore({key: "the tokenizer's" for key in config.config if key.startswith("tokenizer.")})
        return spec.replace(rope=_rope(config, a, spec.head_dim, layout))


_NO_PLACE = "a LLaMA has no place for that"


def _vocabulary(config: ConfigReader, a: str) -> int:
    """The vocabulary's size: a key that older files lack, then the number of tokens."""
    tokens = config.optional("vocab_size", int)
    size = config.optional(f"{a}.vocab_size", int) or tokens
    if size is None:
        raise CheckpointError(
            f"neither {a}.vocab_size nor a list of tokens is there",
            where=config.where,
            fix="Write the GGUF again, with its tokenizer",
        )
    return size


def _rope(config: ConfigReader, a: str, head_dim: int, layout: RopeLayout) -> RopeSpec:
    kind = config.read(f"{a}.rope.scaling.type", str, "none")
    scaling: dict[str, Any] | None = None
    if kind == "linear":
        scaling = {"rope_type": "linear", "factor": config.read(f"{a}.rope.scaling.factor", float)}
    elif kind != "none":
        raise UnsupportedError(f"the rotary positions are scaled by '{kind}'", where=config.where, fix="Known: linear")
    width = config.read(f"{a}.rope.dimension_count", int, head_dim)
    theta = config.read(f"{a}.rope.freq_base", float, 10000.0)
    divisors = config.config.get(DIVISORS)
    config.ignore({DIVISORS: "read as a rule of RoPE scaling"})
    if divisors is not None:
        try:
            if len(divisors) != width // 2:
                raise ValueError(f"there are {len(divisors)}, for {width // 2} frequencies")
            rule = scaling_of(divisors, theta)
            if rule and scaling:
                raise ValueError("the metadata scales the positions too")
        except ValueError as error:
            raise UnsupportedError(
                f"'{DIVISORS}' divides the rotary frequencies in a way that no rule is known for",
                where=config.where,
                why=str(error),
            ) from None
        scaling = scaling or rule
    return RopeSpec(theta, width, layout, scaling)
