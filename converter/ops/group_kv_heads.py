"""Groups of query heads share one key-value head (grouped-query attention, Ainslie et al. 2023). Lossy, calibrated.

A head's keys stand in a basis of their own: without rotation q.k stays what it is under k -> B k, q -> B^-T q for any
invertible B, and so does W_o v under v -> B v, W_o -> W_o B^-1. A mean over heads as they are is a mean of unrelated
things. So the g heads of a group are taken into one basis first, and what they share is kept:

    k_h ~ T_h k*,  q_h.k_h ~ (T_h^T q_h).k*          v_h ~ T_h v*,  W_h v_h ~ (W_h T_h) v*

k* are the d_h principal components of the group's keys side by side, each head's keys about their mean (a constant is
added to all logits of a row) and measured by E[q q^T], what its queries make of an error; T_h is the regression of k_h
on k*. No other d_h rows leave less of E|q.(k_h - T_h k*)|^2 over independent queries and keys (Eckart & Young 1936;
of a group of heads: Chang et al. 2024, "Palu"). Heads that are equal up to their bases are merged exactly, as aligning
and averaging them would. Values likewise, measured by W_h^T W_h. Then `o` is refitted to what the attention gave
before, by least squares.

RoPE rotates k, and commutes with no B that mixes its pairs: the heads have to be grouped before it. It leaves the
choice of a basis of k* open, and the op takes the one that the rotation disturbs least: the strongest components on
the pairs that turn slowest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from converter.blocks import Block
from converter.ops import Calibration, Notes, Op, op, require
from converter.ops.least_squares import Moments, chunks, refit
from converter.reference import attention_input, run_attention, run_heads, run_linear
from converter.spec import ModelSpec


@op
@dataclass(frozen=True)
class GroupKVHeads(Op):
    """Let the query heads share `kv_heads` key-value heads, each by heads that stand side by side."""

    kv_heads: int = 1

    name = "group_kv_heads"
    summary = "let groups of query heads share one key-value head"
    calibrated = True

    def __post_init__(self) -> None:
        if self.kv_heads < 1:
            raise ValueError("must be 1 or more")

    def needed(self, spec: ModelSpec) -> bool:
        return self.kv_heads != spec.num_kv_heads

    def change(self, spec: ModelSpec) -> ModelSpec:
        heads = spec.num_kv_heads
        divisors = [count for count in range(1, heads + 1) if heads % count == 0]
        require(
            self.kv_heads in divisors,
            self.name,
            f"the model's {heads} key-value heads do not fall into {self.kv_heads} groups of one size",
            f"Set kv_heads to {' or '.join(map(str, divisors))}",
        )
        require(
            spec.rope is None,
            self.name,
            "keys are rotated, and no change of their basis that would align two heads commutes with that",
            "Put it before learned_positions_to_rope; a model that comes with RoPE cannot be grouped",
        )
        require(spec.qk_norm is None, self.name, "q and k are normed, and a norm commutes with no change of basis")
        return spec.replace(num_kv_heads=self.kv_heads)

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        if notes.ref.kind != "layer" or not self.needed(spec):
            return block
        after = self.change(spec)
        if calibration is None:
            rows = after.key_value_size
            return Block({role: t[:rows] if role.startswith(("k.", "v.")) else t for role, t in block.items()})
        grouped = _grouped(block, spec, _pools(block, spec, self.kv_heads, calibration, notes))
        return refit(grouped, "o", _attention(grouped, after, block, spec, notes.ref.index, calibration))


#: P (K, d, g d) and T (K, g, d, d) of K groups of g heads of d rows: x* = P x of a group's rows x side by side, and
#: x_h ~ T_h x*.
Pool = tuple["Tensor", "Tensor"]


def share(covariance: Tensor, importance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a group's heads share: P (d, g d), T (g, d, d) and the squared error that is left, over all of it.

    `covariance` (g d, g d) is that of the heads' rows side by side, and an error e of head h costs
    e^T importance_h e, (g, d, d).
    """
    size = importance.shape[-1]
    root = torch.block_diag(*map(_root, importance))
    values, vectors = torch.linalg.eigh(root @ covariance @ root)
    kept = values[-size:].clamp_min(1e-12 * float(values[-1]) + 1e-300)  # ascending
    pooling = vectors[:, -size:].T @ root
    back = covariance @ pooling.T / kept
    # Of the same size for queries and keys, and for RoPE in half-split pairs, of which the last one turns slowest.
    scale = kept**-0.25
    order = torch.arange(size)
    order = torch.cat([order[0::2], order[1::2]]).to(scale.device)
    pooling, back = (scale[:, None] * pooling)[order], (back / scale)[:, order]
    return pooling, back.view(-1, size, size), 1 - values[-size:].sum() / values.sum()


def _root(form: Tensor) -> Tensor:
    """The symmetric root of a matrix that has no negative eigenvalues but by rounding."""
    values, vectors = torch.linalg.eigh(form)
    root: Tensor = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    return root


def _pools(block: Block, spec: ModelSpec, groups: int, calibration: Calibration, notes: Notes) -> dict[str, Pool]:
    """How the keys and the values of a layer are shared, in fp64."""
    moments = {part: Moments() for part in ("q", "k", "v")}
    for rows in chunks(calibration):
        read = attention_input(block, spec, calibration.inputs(rows))[calibration.mask(rows)]
        for part, each in moments.items():
            each.add(output := run_linear(block, part, read), output.new_ones(len(output), 1))
    writer = block["o.weight"].double().unflatten(1, (-1, spec.head_dim))
    importances = {
        "k": _blocks(moments["q"].mean_square(), spec.num_heads),
        "v": torch.einsum("xha,xhb->hab", writer, writer),
    }
    pools = {}
    for part, importance in importances.items():
        # A constant in the keys is nothing, and one in the values goes into o's bias, where there is one.
        centred = part == "k" or "o" in spec.biases
        covariances = _blocks(moments[part].covariance() if centred else moments[part].mean_square(), groups)
        importance = importance.unflatten(0, (spec.num_kv_heads, -1)).sum(dim=1).unflatten(0, (groups, -1))
        pooling, back, lost = zip(*map(share, covariances, importance), strict=True)
        pools[part] = torch.stack(pooling), torch.stack(back)
        notes.errors[{"k": "error of the keys", "v": "error of the values"}[part]] = float(
            max(lost).clamp_min(0).sqrt()
        )
    return pools


def _blocks(matrix: Tensor, count: int) -> Tensor:
    """The square blocks (count, n, n) on the diagonal of a matrix (count n, count n)."""
    size = len(matrix) // count
    return matrix.view(count, size, count, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def _grouped(block: Block, spec: ModelSpec, pools: dict[str, Pool]) -> Block:
    """The layer with its key-value heads pooled, and q and o in the bases of the pools."""
    result = Block(block)
    for role, tensor in block.items():
        part = role.split(".")[0]
        exact = tensor.double()
        if part in pools:  # k, v: (K g d, ...)
            pooling = pools[part][0]
            exact = (pooling @ exact.reshape(len(pooling), pooling.shape[2], -1)).flatten()
        elif part == "q":  # (H d, ...)
            back = pools["k"][1]
            heads = exact.reshape(*back.shape[:2], -1, spec.head_dim, exact[0].numel())
            exact = torch.einsum("kgab,kgpax->kgpbx", back, heads).flatten()
        elif role == "o.weight":  # (D, H d)
            back = pools["v"][1]
            heads = exact.unflatten(1, (*back.shape[:2], -1, spec.head_dim))
            exact = torch.einsum("xkgpa,kgab->xkgpb", heads, back).flatten()
        else:
            continue
        result[role] = exact.view(-1, *tensor.shape[1:]).to(tensor.dtype)
    return result


def _attention(
    grouped: Block, after: ModelSpec, block: Block, spec: ModelSpec, layer: int, calibration: Calibration
) -> Iterator[tuple[Tensor, Tensor]]:
    """What o reads now (N, H d), and what it gave before (N, D)."""
    for rows in chunks(calibration):
        read, inside = attention_input(block, spec, calibration.inputs(rows)), calibration.mask(rows)
        yield run_heads(grouped, after, layer, read)[inside], run_attention(block, spec, layer, read)[inside]
