"""`ModelSpec`: the facts of an architecture, with no tensors and no torch.

Every decision of the conversion is taken from these facts, never from a path or a model's name. Each
intermediate step of a conversion has its own spec, and the reference model (`converter.reference`) runs
any of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class RopeLayout(str, Enum):
    """Which rows of a q or k head are rotated together, for a rotary width r."""

    INTERLEAVED = "interleaved"  # pairs (2i, 2i+1): GPT-J, Meta's own LLaMA files, llama.cpp "NORM"
    HALF_SPLIT = "half_split"  # pairs (i, i+r/2): rotate_half, GPT-NeoX, Hugging Face LLaMA


class Norm(str, Enum):
    """The kind of normalisation."""

    LAYERNORM = "layernorm"
    RMSNORM = "rmsnorm"


class Activation(str, Enum):
    """The non-linearity of the MLP."""

    GELU_ERF = "gelu_erf"
    GELU_TANH = "gelu_tanh"
    QUICK_GELU = "quick_gelu"  # z * sigmoid(1.702 z)
    RELU = "relu"
    SILU = "silu"


class QKNorm(str, Enum):
    """The width over which q and k are normalised, before they are rotated."""

    PER_HEAD = "per_head"  # one gain of head_dim for all heads: Qwen3
    FULL = "full"  # one gain for all rows: OLMo 2


class Positions(str, Enum):
    """How the model knows the order of tokens."""

    LEARNED = "learned"
    SINUSOIDAL = "sinusoidal"  # sines, then cosines, added to the embeddings (Vaswani et al. 2017, section 3.5)
    ROPE = "rope"


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions: base `theta`, `rotary_dim` rotated rows a head, pairing `layout`.

    `scaling` holds Hugging Face's `rope_parameters` beyond theta, `rope_type` included, for context
    extension (llama3, yarn, linear, ...); `None` is plain RoPE. `skipped_layers` do not rotate.
    """

    theta: float
    rotary_dim: int
    layout: RopeLayout = RopeLayout.HALF_SPLIT
    scaling: Mapping[str, Any] | None = None
    skipped_layers: tuple[int, ...] = ()

    def rotates(self, layer: int) -> bool:
        """Whether a layer rotates its q and k."""
        return layer not in self.skipped_layers


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer, described.

    `biases` names the linears that carry one (`q k v o gate up down`, and `head`); `norm_bias` and
    `final_norm_bias` say it for the norms. `attention_scales` holds the factor on q.k of each layer.
    A plain MLP is `down(activation(up(x)))`; a gated one `down(activation(gate(x)) * up(x))`. With a
    `parallel_residual` attention and MLP both read the layer's input, each through its own norm. A
    token sees the last `sliding_window` tokens, itself included, or all.

    Without `pre_norm` a layer is x' = norm(x + f(x)), twice, and the first one reads the bare embeddings unless an
    `embedding_norm` stands behind them. A `residual_scale` multiplies x (DeepNorm, Wang et al. 2022); with
    `sandwich_norm` what a sublayer writes is normed too (Ding et al. 2021). An `embedding_size` is the width of stored
    embeddings and head that are multiplied by a projection each as they are read: a tied head is not the embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    norm: Norm
    norm_eps: float
    activation: Activation
    gated_mlp: bool
    positions: Positions
    attention_scales: tuple[float, ...]
    tied_head: bool
    pre_norm: bool = True
    final_norm: bool = True
    norm_bias: bool = False
    final_norm_bias: bool = False
    biases: frozenset[str] = field(default_factory=frozenset)
    rope: RopeSpec | None = None
    qk_norm: QKNorm | None = None
    parallel_residual: bool = False
    sliding_window: int | None = None
    embedding_norm: bool = False
    embedding_size: int | None = None
    residual_scale: float = 1.0
    sandwich_norm: bool = False
    #: Parts that the files are cut into, one for each rank of tensor parallelism; more than one in Meta's format only.
    ranks: int = 1

    def replace(self, **changes: Any) -> ModelSpec:
        """A copy with some facts changed."""
        return dataclasses.replace(self, **changes)

    @property
    def absolute_positions(self) -> bool:
        """Whether a vector for each position is added to the embeddings."""
        return self.positions is not Positions.ROPE

    @property
    def standard_attention_scale(self) -> float:
        """1/sqrt(head_dim): what a LLaMA divides its attention logits by."""
        return float(self.head_dim**-0.5)

    @property
    def query_size(self) -> int:
        """Rows of q."""
        return self.num_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Rows of k, and of v."""
        return self.num_kv_heads * self.head_dim

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        facts = dataclasses.asdict(self)
        facts["biases"] = sorted(self.biases)
        facts["attention_scales"] = list(self.attention_scales)
        return {key: value.value if isinstance(value, Enum) else value for key, value in facts.items()}
