"""nanoGPT's own checkpoints: GPT-2's names, linears as (out, in), and no biases at all where `bias=False`.

Two facts are not in the file and can be said in a `nanogpt.json` beside it:

    {"activation_function": "gelu_new", "eos_token_id": 50256}

`activation_function` is "gelu" (erf, `nn.GELU()`) or "gelu_new" (the tanh form), as nanoGPT had until 17 May
2023. Without it erf is taken, but for files whose model_args have no `bias`: those are older than 27 January
2023, when nanoGPT got that key, and so have the tanh form for certain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from converter.blocks import BlockRef
from converter.families import Family, family
from converter.families.config import ConfigReader
from converter.families.gpt2 import ACTIVATIONS, not_a_causal_mask
from converter.families.mapping import Direct, Drop, FusedLayout, FusedQKV, TensorMapping
from converter.spec import ModelSpec, Norm, Positions

#: The vocabulary of GPT-2's tokenizer, and the rows that nanoGPT gives it: the next multiple of 64.
_TOKENS, _PADDED = 50257, 50304

#: nanoGPT's module -> our part.
_NORMS = {"ln_1": "attn_norm", "ln_2": "mlp_norm"}
_LINEARS = {"attn.c_proj": "o", "mlp.c_fc": "up", "mlp.c_proj": "down"}


@family
class NanoGPT(Family):
    """The GPT of nanoGPT's model.py, as its train.py saves it."""

    name = "nanogpt"
    prefix = "transformer."
    embedding = "wte.weight"
    ties_by_default = True
    default_token_ids: ClassVar = {"bos_token_id": 50256, "eos_token_id": 50256}
    stand_in = "gpt2"
    drops = (Drop(r"h\.\d+\.attn\.bias", "causal mask buffer", not_a_causal_mask),)

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        hidden, heads, layers = (config.read(key, int) for key in ("n_embd", "n_head", "n_layer"))
        head_dim = config.divide(hidden, heads, "n_embd", "n_head")
        bias = config.read("bias", bool, True)
        config.ignore({"dropout": "dropout, training only"})
        return ModelSpec(
            vocab_size=config.read("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            context=config.read("block_size", int),
            norm=Norm.LAYERNORM,
            norm_eps=1e-5,
            activation=config.one_of("activation_function", ACTIVATIONS, _gelu(config.config)),
            gated_mlp=False,
            positions=Positions.LEARNED,
            attention_scales=(head_dim**-0.5,) * layers,
            tied_head=tied,
            norm_bias=bias,
            final_norm_bias=bias,
            biases=frozenset({"q", "k", "v", "o", "up", "down"} if bias else ()),
        )

    def mappings(self, spec: ModelSpec, block: BlockRef) -> list[TensorMapping]:
        kinds = ("weight", "bias") if spec.norm_bias else ("weight",)
        if block.kind == "embeddings":
            return [Direct("wte.weight", "embed.weight"), Direct("wpe.weight", "positions.weight")]
        if block.kind == "head":
            norm = [Direct(f"ln_f.{kind}", f"final_norm.{kind}") for kind in kinds]
            return [*norm, Direct(self.embedding if spec.tied_head else self.head, "head.weight")]
        h = f"h.{block.index}"
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        parts = {**_NORMS, **_LINEARS}
        return [
            *(FusedQKV(f"{h}.attn.c_attn.{kind}", kind, FusedLayout.STACKED, *heads) for kind in kinds),
            *(Direct(f"{h}.{name}.{kind}", f"{part}.{kind}") for name, part in parts.items() for kind in kinds),
        ]

    def remarks(self, config: Mapping[str, Any], tokens: int | None) -> list[str]:
        found = []
        if config.get("activation_function") is None:
            taken = "the tanh form is taken, as the file is older than the `bias` of model_args"
            if _gelu(config) == "gelu":
                taken = "erf is taken, and files from before 17 May 2023 have the tanh form"
            found.append(
                f"the file does not say which GELU it was trained with: {taken}. To choose, put "
                '{"activation_function": "gelu"} (erf) or "gelu_new" (tanh) into nanogpt.json beside it'
            )
        if config.get("vocab_size") == _PADDED and tokens is None:
            found.append(
                f"of the {_PADDED} rows of the embeddings {_PADDED - _TOKENS} are padding, if it was trained with "
                f"GPT-2's tokenizer of {_TOKENS} tokens, as nanoGPT does by default; all rows are kept"
            )
        return found


def _gelu(config: Mapping[str, Any]) -> str:
    """The GELU of a file that does not say: erf, but tanh before model_args had a `bias`."""
    return "gelu" if "bias" in config else "gelu_new"
