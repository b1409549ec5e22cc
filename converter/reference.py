"""The reference model: one forward, driven by any `ModelSpec`, one block at a time.

It exists so that every intermediate step of a conversion can be run and measured, and it is tested
against transformers' own classes. It computes in the dtype of the states that it is given.

Shapes: batch B, sequence T, hidden size D. States are (B, T, D).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from converter.blocks import BlockRef, blocks
from converter.spec import Activation, ModelSpec, Norm, Positions, QKNorm, RopeLayout, RopeSpec

Roles = Mapping[str, Tensor]


class RunningModel(ABC):
    """A whole model in memory whose logits can be asked for, whoever computes them."""

    vocab_size: int
    #: Tokens of the sequences that it was made for; None where nothing says it.
    context: int | None
    #: Tokens of the longest sequence that it can run; None for positions that have no end.
    longest: int | None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it runs."""

    @abstractmethod
    def to(self, device: str | torch.device) -> RunningModel:
        """Move it, and give it back."""

    @abstractmethod
    def logits(self, ids: Tensor) -> Tensor:
        """Logits (B, T, V) of token ids (B, T)."""


class ReferenceModel(RunningModel):
    """The reference forward over a whole model in memory; `read` gives its blocks."""

    def __init__(self, spec: ModelSpec, read: Callable[[BlockRef], Roles]) -> None:
        self.spec = spec
        self.vocab_size, self.context = spec.vocab_size, spec.context
        self.longest = spec.context if spec.absolute_positions else None
        self._blocks = {ref: dict(read(ref)) for ref in blocks(spec)}

    @property
    def device(self) -> torch.device:
        return next(iter(self._blocks[next(blocks(self.spec))].values())).device

    def to(self, device: str | torch.device) -> ReferenceModel:
        for roles in self._blocks.values():
            roles.update({role: tensor.to(device) for role, tensor in roles.items()})
        return self

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        states = torch.empty(0)
        for ref, roles in self._blocks.items():
            if ref.kind == "embeddings":
                states = run_embeddings(roles, self.spec, ids)
            elif ref.kind == "layer":
                states = run_layer(roles, self.spec, ref.index, states)
        return run_head(self._blocks[ref], self.spec, states)


def run_embeddings(roles: Roles, spec: ModelSpec, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Token ids (B, T) -> states (B, T, D); absolute positions are 0 to T-1 unless others (T,) are given."""
    states = F.embedding(ids, roles["embed.weight"])
    if spec.absolute_positions:
        table = position_table(roles, spec)
        states = states + (table[: ids.shape[1]] if positions is None else table[positions])
    return run_norm(roles, "embed_norm", spec, states) if spec.embedding_norm else states


def position_table(roles: Roles, spec: ModelSpec) -> Tensor:
    """The vectors of absolute positions, (context, D): learned ones, or sines and cosines."""
    if spec.positions is Positions.LEARNED:
        return roles["positions.weight"]
    embed = roles["embed.weight"]
    exponents = torch.arange(0, spec.hidden_size, 2, dtype=torch.float64, device=embed.device) / spec.hidden_size
    positions = torch.arange(spec.context, dtype=torch.float64, device=embed.device)
    angles = torch.outer(positions, 10000.0**-exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, : spec.hidden_size].to(embed.dtype)


def run_layer(roles: Roles, spec: ModelSpec, index: int, states: Tensor) -> Tensor:
    """States (B, T, D) through layer `index`."""
    if spec.parallel_residual:
        assert spec.pre_norm, "a parallel residual with norms behind the sublayers"
        read = run_norm(roles, "mlp_norm", spec, states)
        return after_attention(roles, spec, index, states) + _written(roles, "mlp", spec, run_mlp(roles, spec, read))
    return after_mlp(roles, spec, after_attention(roles, spec, index, states))


def after_attention(roles: Roles, spec: ModelSpec, index: int, states: Tensor) -> Tensor:
    """States (B, T, D) through the first half of layer `index`."""
    output = run_attention(roles, spec, index, attention_input(roles, spec, states))
    return _add(roles, "attn", spec, states, output)


def attention_input(roles: Roles, spec: ModelSpec, states: Tensor) -> Tensor:
    """What q, k and v of a layer read of its states."""
    return run_norm(roles, "attn_norm", spec, states) if spec.pre_norm else states


def after_mlp(roles: Roles, spec: ModelSpec, states: Tensor) -> Tensor:
    """States through the second half of a layer."""
    read = run_norm(roles, "mlp_norm", spec, states) if spec.pre_norm else states
    return _add(roles, "mlp", spec, states, run_mlp(roles, spec, read))


def _add(roles: Roles, sublayer: str, spec: ModelSpec, states: Tensor, output: Tensor) -> Tensor:
    """The residual connection around a sublayer, and the norm after it of a post-LN model."""
    states = spec.residual_scale * states + _written(roles, sublayer, spec, output)
    return states if spec.pre_norm else run_norm(roles, f"{sublayer}_norm", spec, states)


def _written(roles: Roles, sublayer: str, spec: ModelSpec, output: Tensor) -> Tensor:
    return run_norm(roles, f"{sublayer}_out_norm", spec, output) if spec.sandwich_norm else output


def run_final_norm(roles: Roles, spec: ModelSpec, states: Tensor) -> Tensor:
    """What the head reads, (..., D)."""
    return run_norm(roles, "final_norm", spec, states) if spec.final_norm else states


def run_head(roles: Roles, spec: ModelSpec, states: Tensor) -> Tensor:
    """States (..., D) -> logits (..., V)."""
    return run_linear(roles, "head", run_final_norm(roles, spec, states))


def run_norm(roles: Roles, norm: str, spec: ModelSpec, states: Tensor) -> Tensor:
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019), with a bias where there is one."""
    weight, bias = roles[f"{norm}.weight"], roles.get(f"{norm}.bias")
    if spec.norm is Norm.LAYERNORM:
        return F.layer_norm(states, weight.shape, weight, bias, spec.norm_eps)
    normed = F.rms_norm(states, weight.shape, weight, spec.norm_eps)
    return normed if bias is None else normed + bias


def run_attention(roles: Roles, spec: ModelSpec, index: int, states: Tensor) -> Tensor:
    """Causal self-attention of layer `index` on what it reads."""
    return run_linear(roles, "o", run_heads(roles, spec, index, states))


def run_heads(roles: Roles, spec: ModelSpec, index: int, states: Tensor) -> Tensor:
    """What `o` reads, (B, T, num_heads * head_dim), on what the attention of layer `index` reads."""
    batch, length, _ = states.shape

    def heads(part: str, count: int) -> Tensor:
        rows = run_linear(roles, part, states)
        if spec.qk_norm is QKNorm.FULL and part != "v":
            rows = run_norm(roles, f"{part}_norm", spec, rows)
        split = rows.view(batch, length, count, spec.head_dim).transpose(1, 2)
        if spec.qk_norm is QKNorm.PER_HEAD and part != "v":
            split = run_norm(roles, f"{part}_norm", spec, split)
        return split

    q, k, v = heads("q", spec.num_heads), heads("k", spec.num_kv_heads), heads("v", spec.num_kv_heads)
    if spec.rope is not None and spec.rope.rotates(index):
        cos, sin = rope_table(spec, length, states.dtype, states.device)
        q, k = (rotate(x, cos, sin, spec.rope) for x in (q, k))
    window = spec.sliding_window if spec.sliding_window is not None and spec.sliding_window < length else None
    mixed = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if window is None else window_mask(length, window, states.device),
        is_causal=window is None,
        scale=spec.attention_scales[index],
        enable_gqa=spec.num_heads != spec.num_kv_heads,
    )
    return mixed.transpose(1, 2).reshape(batch, length, -1)


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """(T, T), true where a token sees another: the last `window` ones, itself included."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def run_mlp(roles: Roles, spec: ModelSpec, states: Tensor) -> Tensor:
    """The MLP on normed states."""
    return run_linear(roles, "down", run_neurons(roles, spec, states))


def run_neurons(roles: Roles, spec: ModelSpec, states: Tensor) -> Tensor:
    """What `down` reads, (..., intermediate_size), on normed states."""
    up = run_linear(roles, "up", states)
    return (
        activate(spec.activation, run_linear(roles, "gate", states)) * up
        if spec.gated_mlp
        else activate(spec.activation, up)
    )


def activate(activation: Activation, x: Tensor) -> Tensor:
    """The activation function, elementwise."""
    if activation is Activation.GELU_ERF:
        return F.gelu(x)
    if activation is Activation.GELU_TANH:
        return F.gelu(x, approximate="tanh")
    if activation is Activation.QUICK_GELU:
        return x * torch.sigmoid(1.702 * x)
    if activation is Activation.RELU:
        return F.relu(x)
    return F.silu(x)


def rope_table(spec: ModelSpec, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (T, rotary_dim / 2), attention factor included (Su et al. 2021, eq. 34)."""
    rope = spec.rope
    assert rope is not None
    frequencies, factor = rope_frequencies(rope, spec.context)
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    positions = torch.arange(length, device=device, dtype=precise)
    angles = torch.outer(positions, frequencies.to(device=device, dtype=precise))
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rope_frequencies(rope: RopeSpec, context: int) -> tuple[Tensor, float]:
    """Angle per position of each rotary pair, (rotary_dim / 2,) in fp32, and the factor on cos and sin.

    Scaled kinds of RoPE (llama3, yarn, linear, ...) are transformers' own functions.
    """
    if rope.scaling is None:
        exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
        return 1.0 / (rope.theta**exponents), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=rope.rotary_dim,
        num_attention_heads=1,
        head_dim=rope.rotary_dim,
        max_position_embeddings=context,
        rope_parameters={**rope.scaling, "rope_theta": rope.theta},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.scaling["rope_type"]](config, device=torch.device("cpu"))
    return frequencies, float(factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rope: RopeSpec) -> Tensor:
    """Rotate the pairs of each head, (B, H, T, head_dim), by the angles of its position."""
    turned, rest = x[..., : rope.rotary_dim], x[..., rope.rotary_dim :]
    if rope.layout is RopeLayout.INTERLEAVED:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    parts = (first * cos - second * sin, first * sin + second * cos)
    if rope.layout is RopeLayout.INTERLEAVED:
        turned = torch.stack(parts, dim=-1).flatten(-2)
    else:
        turned = torch.cat(parts, dim=-1)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def run_linear(roles: Roles, part: str, x: Tensor) -> Tensor:
    """One linear of a block, with a bias where there is one."""
    return F.linear(x, roles[f"{part}.weight"], roles.get(f"{part}.bias"))


def flops_per_token(spec: ModelSpec, length: int) -> int:
    """Multiply-adds of one token at the end of a sequence of `length`, counted as two operations each."""
    attention = spec.hidden_size * (2 * spec.query_size + 2 * spec.key_value_size)
    mlp = spec.hidden_size * spec.intermediate_size * (3 if spec.gated_mlp else 2)
    scores = 2 * spec.query_size * length
    return 2 * (spec.num_layers * (attention + mlp + scores) + spec.hidden_size * spec.vocab_size)
