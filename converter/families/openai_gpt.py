"""The first GPT in Hugging Face's format: post-LN without a final norm, learned positions, linears as (in, out)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from converter.families import Family, family
from converter.families.buffers import causal_mask, position_ids
from converter.families.gpt2 import GPT2
from converter.spec import Activation


@family
class OpenAIGPT(Family):
    """OpenAIGPTLMHeadModel, with or without the `transformer.` prefix."""

    name = "openai_gpt"
    prefix = "transformer."
    ties_by_default = True
    model_class = "OpenAIGPTLMHeadModel"
    fields: ClassVar = {
        **{fact: field for fact, field in GPT2.fields.items() if fact != "intermediate_size"},  # always 4 D
        "vocab_size": ("vocab_size", 40478),
        "context": ("n_positions", 512),
        "activation": ("afn", "gelu"),
    }
    facts: ClassVar = {**GPT2.facts, "pre_norm": False, "final_norm": False, "final_norm_bias": False}
    #: This family's own names: its "gelu" is the tanh form.
    activations: ClassVar = {
        "gelu": Activation.GELU_TANH,
        "relu": Activation.RELU,
        "silu": Activation.SILU,
        "swish": Activation.SILU,
    }
    aliases = GPT2.aliases
    ignored = {key: why for key, why in GPT2.ignored.items() if key != "reorder_and_upcast_attn"}  # noqa: RUF012
    modules: ClassVar = {**GPT2.modules, "embed": "tokens_embed", "positions": "positions_embed"}
    transposed = True
    drops = (causal_mask(r"h\.\d+\.attn\.bias"), position_ids())

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "openai-gpt"
