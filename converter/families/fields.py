"""The facts that nearly every config states, read by a table of the family's own field names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converter.errors import CheckpointError
from converter.families.config import ConfigReader
from converter.spec import Activation, ModelSpec

#: transformers' names of activations.
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

#: A fact of `ModelSpec` -> the config's field, and its value where the config has none: `...` where it must have one,
#: None where it follows from other facts.
Fields = Mapping[str, tuple[str, Any]]

_MOST_LAYERS = 10_000

#: Facts that follow from others where the config says null.
_DERIVED = ("head_dim", "num_kv_heads", "intermediate_size")

#: Dropouts and other fields that several families have and that change nothing.
TRAINING = "dropout, training only"
CLASSIFIERS = "classification heads only"
#: The first GPTs' fields under transformers' common names.
GPT_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def activation_name(activation: Activation) -> str:
    """transformers' name of an activation."""
    return next(name for name, known in ACTIVATIONS.items() if known is activation)


def read_facts(
    config: ConfigReader, fields: Fields, activations: Mapping[str, Activation] = ACTIVATIONS, **facts: Any
) -> ModelSpec:
    """The spec of a config: what `fields` say of it, and `facts` that are no matter of the config.

    Without a field or a value of their own, `intermediate_size` is 4 D, `head_dim` D / H, `num_kv_heads` H, and
    attention is scaled by 1/sqrt(head_dim).
    """

    def read(fact: str, kind: type[Any]) -> Any:
        if fact in facts or fact not in fields:
            return facts.get(fact)
        key, default = fields[fact]
        if default is None or (fact in _DERIVED and key in config.config):  # null: derived, whatever the default is
            return config.optional(key, kind)
        return config.read(key, kind, None if default is ... else default)

    sizes = {fact: read(fact, int) for fact in ("vocab_size", "hidden_size", "num_layers", "num_heads", "context")}
    if sizes["num_layers"] > _MOST_LAYERS:
        raise CheckpointError(
            f"the config says {sizes['num_layers']} layers",
            where=config.where,
            why=f"no model has more than {_MOST_LAYERS}",
            fix="Write the number of layers that the model has",
        )
    hidden, heads, names = sizes["hidden_size"], sizes["num_heads"], {fact: field[0] for fact, field in fields.items()}
    head_dim = read("head_dim", int) or _head_dim(config, hidden, heads, names)
    kv_heads = read("num_kv_heads", int) or heads
    config.divide(heads, kv_heads, names["num_heads"], names.get("num_kv_heads", ""))
    more = {
        "head_dim": head_dim,
        "num_kv_heads": kv_heads,
        "intermediate_size": read("intermediate_size", int) or 4 * hidden,
        "attention_scales": (head_dim**-0.5,) * sizes["num_layers"],
        "norm_eps": read("norm_eps", float),
    }
    if "activation" in fields:
        key, default = fields["activation"]
        more["activation"] = config.one_of(key, activations, default)
    return ModelSpec(**{**sizes, **more, **facts})


def _head_dim(config: ConfigReader, hidden: int, heads: int, names: Mapping[str, str]) -> int:
    try:
        return config.divide(hidden, heads, names["hidden_size"], names["num_heads"])
    except CheckpointError as error:
        if "head_dim" in names:
            error.why = f"'{names['head_dim']}' is not there, so it is taken to be their quotient"
            error.fix = f"Write '{names['head_dim']}' into the config, as the model was trained with it"
        raise
