"""What a target family holds, as facts, and the words for a model that has others."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from converter.errors import UnsupportedError
from converter.spec import ModelSpec, Norm, Positions

#: Facts that no target of ours can do without.
ANY_DECODER: Mapping[str, object] = {
    "pre_norm": True,
    "final_norm": True,
    "embedding_norm": False,
    "sandwich_norm": False,
    "residual_scale": 1.0,
    "parallel_residual": False,
    "qk_norm": None,
    "sliding_window": None,
    "ranks": 1,
}

#: A fact and what it should be -> what is said of another value, and the op that makes it so.
_WORDS: Mapping[tuple[str, object], tuple[str, str | None]] = {
    ("norm", Norm.RMSNORM): ("its norm is LayerNorm", "layernorm_to_rmsnorm"),
    ("norm", Norm.LAYERNORM): ("its norm is RMSNorm", None),
    ("pre_norm", True): ("its norms stand after the sublayers", "post_ln_to_pre_ln"),
    ("final_norm", True): ("it has no final norm", None),
    ("embedding_norm", False): ("its embeddings are normed before the first layer", None),
    ("sandwich_norm", False): ("what its sublayers write is normed", None),
    ("residual_scale", 1.0): ("its residual stream is scaled by {:g}", None),
    ("norm_bias", False): ("its norms have biases", "layernorm_to_rmsnorm"),
    ("final_norm_bias", False): ("its final norm has a bias", "fold_final_norm_bias"),
    ("gated_mlp", True): ("its MLP is not gated", "gelu_to_swiglu"),
    ("gated_mlp", False): ("its MLP is gated", None),
    ("positions", Positions.ROPE): ("its positions are {}", "learned_positions_to_rope"),
    ("parallel_residual", False): ("its attention and MLP are parallel", None),
    ("qk_norm", None): ("its q and k are normed", None),
    ("sliding_window", None): ("its attention sees {} tokens only", None),
    ("ranks", 1): ("its files are to be cut for {} ranks", None),
}


def refuse_others(spec: ModelSpec, label: str, holds: Mapping[str, object], biases: frozenset[str]) -> None:
    """Raise UnsupportedError for a model with other facts than `holds`, or other biases than these."""
    for fact, wanted in holds.items():
        found = getattr(spec, fact)
        if found != wanted:
            shown = found.value if isinstance(found, Enum) else found
            words, remedy = _WORDS.get((fact, wanted), (f"its {fact} is {{}}", None))
            refuse(label, words.format(shown), remedy)
    if spec.tied_head and spec.embedding_size is not None:
        refuse(label, "its head is tied behind a projection", "untie_head")
    if spec.rope is not None and spec.attention_scales != (spec.standard_attention_scale,) * spec.num_layers:
        refuse(label, "its attention scale is not 1/sqrt(head_dim)", "fold_attention_scale")
    extra = sorted(spec.biases - biases)
    if extra:
        refuse(label, f"it has biases of {', '.join(extra)}", "drop_biases" if extra != ["head"] else None)


def refuse(label: str, what: str, remedy: str | None = None) -> None:
    """Say what of a model a target cannot hold, and the op that takes it away."""
    raise UnsupportedError(
        f"a {label} cannot hold the converted model: {what}",
        fix=f"Add {remedy} to the recipe" if remedy else "No op represents that, so it cannot be converted",
    )
