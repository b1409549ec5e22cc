"""nanoGPT's own checkpoints: GPT-2's names, linears as (out, in), and no biases at all where `bias=False`.

Two facts are not in the file and can be said in a `nanogpt.json` beside it:

    {"activation_function": "gelu_new", "eos_token_id": 50256}

`activation_function` is "gelu" (erf, `nn.GELU()`) or "gelu_new" (the tanh form), as nanoGPT had until 17 May
2023. Without it erf is taken, but for files whose model_args have no `bias`: those are older than 27 January
2023, when nanoGPT got that key, and so have the tanh form for certain.

A model of characters has its tokenizer in the `meta.pkl` of its data, which is read when it lies beside the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from converter.families import Family, family
from converter.families.buffers import causal_mask
from converter.families.config import ConfigReader
from converter.families.fields import TRAINING, read_facts
from converter.families.gpt2 import GPT2
from converter.spec import ModelSpec

#: The vocabulary of GPT-2's tokenizer, and the rows that nanoGPT gives it: the next multiple of 64.
_TOKENS, _PADDED = 50257, 50304


@family
class NanoGPT(Family):
    """The GPT of nanoGPT's model.py, as its train.py saves it."""

    name = "nanogpt"
    prefix = "transformer."
    ties_by_default = True
    default_token_ids: ClassVar = {"bos_token_id": 50256, "eos_token_id": 50256}
    stand_in = "gpt2"
    fields: ClassVar = {
        "vocab_size": ("vocab_size", ...),
        "context": ("block_size", ...),
        "hidden_size": ("n_embd", ...),
        "num_layers": ("n_layer", ...),
        "num_heads": ("n_head", ...),
    }
    facts: ClassVar = {**GPT2.facts, "norm_eps": 1e-5}
    ignored: ClassVar = {"dropout": TRAINING}
    modules: ClassVar = GPT2.modules
    drops = (causal_mask(r"h\.\d+\.attn\.bias"),)

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        fields = {**self.fields, "activation": ("activation_function", _gelu(config.config))}
        config.ignore(self.ignored)
        spec = read_facts(config, fields, **self.facts, tied_head=tied)
        if config.read("bias", bool, True):
            return spec
        return spec.replace(norm_bias=False, final_norm_bias=False, biases=frozenset())

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
        if config.get("vocab_size") not in (_TOKENS, _PADDED) and tokens is None:
            found.append(
                f"it has no tokenizer and its {config.get('vocab_size')} tokens are not GPT-2's: for characters, "
                "put the meta.pkl of its data (data/<dataset>/meta.pkl) beside it"
            )
        return found


def _gelu(config: Mapping[str, Any]) -> str:
    """The GELU of a file that does not say: erf, but tanh before model_args had a `bias`."""
    return "gelu" if "bias" in config else "gelu_new"
