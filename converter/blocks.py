"""The units of streaming: the blocks of a model, the roles of a block, and a block's tensors. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converter.spec import ModelSpec, Positions, QKNorm

if TYPE_CHECKING:
    from torch import Tensor

#: The linears of a layer, in the order in which activations pass through them.
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class BlockRef:
    """One unit of streaming: the embeddings, one layer, or the head."""

    kind: str  # "embeddings", "layer" or "head"
    index: int = 0

    def __str__(self) -> str:
        return f"layers.{self.index}" if self.kind == "layer" else self.kind


EMBEDDINGS = BlockRef("embeddings")
HEAD = BlockRef("head")


def blocks(spec: ModelSpec) -> Iterator[BlockRef]:
    """Every block of a model, in the order in which activations pass through them."""
    yield EMBEDDINGS
    yield from (BlockRef("layer", index) for index in range(spec.num_layers))
    yield HEAD


def block_shapes(spec: ModelSpec, block: BlockRef) -> dict[str, tuple[int, ...]]:
    """The roles of a block and their shapes, linears as (out, in).

    The head block always holds `head.weight`, also where it is tied to the embeddings: a tie is a
    matter of storage, and only the family's mapping knows where the bytes lie.
    """
    hidden = spec.hidden_size
    if block.kind == "embeddings":
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (spec.vocab_size, hidden)}
        if spec.positions is Positions.LEARNED:
            shapes["positions.weight"] = (spec.context, hidden)
        return shapes | (_norm_shapes("embed_norm", hidden, spec.norm_bias) if spec.embedding_norm else {})
    if block.kind == "head":
        shapes = _norm_shapes("final_norm", hidden, spec.final_norm_bias) if spec.final_norm else {}
        bias = {"head.bias": (spec.vocab_size,)} if "head" in spec.biases else {}
        return {**shapes, "head.weight": (spec.vocab_size, hidden), **bias}
    linears = {
        "q": (spec.query_size, hidden),
        "k": (spec.key_value_size, hidden),
        "v": (spec.key_value_size, hidden),
        "o": (hidden, spec.query_size),
        "gate": (spec.intermediate_size, hidden),
        "up": (spec.intermediate_size, hidden),
        "down": (hidden, spec.intermediate_size),
    }
    if not spec.gated_mlp:
        del linears["gate"]
    norms = ("attn_norm", "mlp_norm") + (("attn_out_norm", "mlp_out_norm") if spec.sandwich_norm else ())
    shapes = {role: shape for norm in norms for role, shape in _norm_shapes(norm, hidden, spec.norm_bias).items()}
    shapes |= {f"{linear}.weight": shape for linear, shape in linears.items()}
    shapes |= {f"{linear}.bias": shape[:1] for linear, shape in linears.items() if linear in spec.biases}
    if spec.qk_norm is not None:
        full = spec.qk_norm is QKNorm.FULL
        shapes["q_norm.weight"] = (spec.query_size if full else spec.head_dim,)
        shapes["k_norm.weight"] = (spec.key_value_size if full else spec.head_dim,)
    return shapes


def _norm_shapes(norm: str, hidden: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{norm}.weight": (hidden,)}
    if bias:
        shapes[f"{norm}.bias"] = (hidden,)
    return shapes


class Block(dict[str, "Tensor"]):
    """Roles of one block -> tensors, linears as (out, in). An op never changes a tensor in place."""

    def without(self, *roles: str) -> Block:
        """A copy that lacks some roles."""
        return Block({role: tensor for role, tensor in self.items() if role not in roles})


@dataclass(frozen=True)
class Dropped:
    """A tensor, or a part of one, that the result does not hold."""

    name: str
    reason: str
    norm: float | None = None
