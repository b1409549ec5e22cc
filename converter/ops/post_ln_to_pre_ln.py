"""Post-LN -> pre-LN: the norms move before the sublayers. Lossy, calibrated.

A post-LN sublayer (Vaswani et al. 2017) norms its sum, x' = g N(y) + b with y = a x + f(x), a being 1 but in DeepNorm
(Wang et al. 2022). A pre-LN one (Xiong et al. 2020) norms what it reads, and the sum runs on: r' = r + f(g N(r) + b).
Take for the stream r the sums y, up to a factor. Then N(r) = N(y) =: n, and with its gain and bias before the sublayer
that reads it, every norm gives exactly what it gave. What has to be made of the next sum, up to another factor c, is

    c y' = c (a x + f(x)) = r + c (f(x) + a b) + (c a g n - r),   x = g n + b

since a norm ignores the scale of what it reads. The first two terms are a pre-LN sublayer whose writer (o or down) is
multiplied by c and whose bias takes a b. The last term is what a pre-LN model cannot do, a linear map of n:

 - c = E[r.(g n)] / (a E|g n|^2) makes it smallest over real states. A post-LN model shrinks what it knew at every norm;
   here the writers grow instead, layer by layer, by s/g, s being the rms of a sum.
 - What c leaves is there because s differs from token to token and g from dimension to dimension.
 - Of the attention's share nothing can be written, so the MLP's norm reads it uncorrected ("the MLP reads").
 - The MLP's share is linear in what the MLP reads, so `down` and its bias are refitted to c y' by least squares in fp64
   ("the next layer reads").
 - The first layer reads the bare embeddings, where no norm stands behind them. A pre-LN layer cannot, so they pass a
   norm whose one gain is their mean rms ("the attention reads"; in the layers after it that error is 0).
 - The last norm becomes the final one, exactly; its bias is for `fold_final_norm_bias`.

The names in brackets are those of the relative errors that the op notes for each layer, fed with the stream of the
model converted so far. `fit_blocks` takes back most of them: it compares what the next layer reads.

The stream begins as the embeddings, and is as small as they are: .06 in a trained model whose later states have a rms
of 1. Its scale is free, but what is trained afterwards feels it: writers of a twentieth of their size move by 7 % a
step of healing, and eps weighs in norms that read a square of .004. So the embeddings are brought to a rms of 1 by a
power of two, which rounds nothing, and the writers follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from converter.blocks import EMBEDDINGS, Block, BlockRef, block_shapes
from converter.ops import Calibration, Notes, Op, op, require
from converter.ops.least_squares import chunks, refit_down
from converter.reference import after_attention, after_mlp, position_table, run_mlp, run_norm
from converter.spec import ModelSpec, Norm, Positions

#: Tokens that factors and errors are taken over; both are single numbers a layer.
_TOKENS = 8192


@op
@dataclass(frozen=True)
class PostLNToPreLN(Op):
    """Move each norm before the sublayer that reads it, and scale the writers so that the sums stay what they were."""

    name = "post_ln_to_pre_ln"
    summary = "move the norms before the sublayers, and scale what is written to the stream"
    calibrated = True

    def change(self, spec: ModelSpec) -> ModelSpec:
        require(
            not spec.pre_norm,
            self.name,
            "the norms stand before the sublayers already (pre-LN)",
            "Leave it out, as recipe gpt2-to-llama does",
        )
        require(not spec.final_norm, self.name, "behind the last layer's norm stands another one")
        require(not spec.sandwich_norm, self.name, "what the sublayers write is normed, which keeps it from growing")
        require(
            not spec.tied_head,
            self.name,
            "the head is tied to the embeddings, which are to be scaled",
            "Put untie_head before it",
        )
        writers = {"o", "down"} if spec.norm_bias else set()
        return spec.replace(
            pre_norm=True,
            final_norm=True,
            final_norm_bias=spec.norm_bias,
            embedding_norm=False,
            positions=Positions.LEARNED if spec.absolute_positions else spec.positions,
            residual_scale=1.0,
            biases=spec.biases | writers,
        )

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        if calibration is None:
            shapes, some = block_shapes(self.change(spec), notes.ref), next(iter(block.values()))
            return Block({role: block[role] if role in block else some.new_empty(shapes[role]) for role in shapes})
        if notes.ref.kind == "embeddings":
            return _scaled_embeddings(block, spec, _stream_scale(calibration))
        if notes.ref.kind == "head":
            return Block({**last_norm(spec.num_layers, calibration), **block})
        layer = _Layer(block, spec, notes.ref.index, calibration, self.change(spec))
        layer.move_norms()
        layer.scale("attn_norm", "o")
        layer.scale("mlp_norm", "down")
        layer.result = refit_down(layer.result, layer.after, notes.ref.index, calibration, layer.wanted)
        notes.errors.update(layer.errors())
        return layer.result


def _scaled_embeddings(block: Block, spec: ModelSpec, scale: float) -> Block:
    """The embeddings times `scale`, without their norm; positions of sines become a table."""
    tables = {"embed.weight": block["embed.weight"]}
    if spec.absolute_positions:
        tables["positions.weight"] = position_table(block, spec)
    return Block({role: scale * table for role, table in tables.items()})


def _stream_scale(calibration: Calibration) -> float:
    """The power of two that brings the source's token embeddings nearest to a rms of 1."""
    table = calibration.source_block(EMBEDDINGS)["embed.weight"]
    rms = float(torch.linalg.vector_norm(table, dtype=torch.float64)) / math.sqrt(table.numel())
    return 2.0 ** -round(math.log2(rms)) if rms > 0 and math.isfinite(rms) else 1.0


def last_norm(num_layers: int, calibration: Calibration) -> dict[str, Tensor]:
    """The norm of a post-LN source's last layer, as the final one."""
    return _renamed(calibration.source_block(BlockRef("layer", num_layers - 1)), "mlp_norm", "final_norm")


def _renamed(block: Block, norm: str, name: str) -> dict[str, Tensor]:
    """A norm's gain, and bias where it has one, under another name."""
    kinds = [kind for kind in ("weight", "bias") if f"{norm}.{kind}" in block]
    return {f"{name}.{kind}": block[f"{norm}.{kind}"] for kind in kinds}


@dataclass
class _Layer:
    """A layer of the source, and `result`, what it has become so far."""

    source: Block
    spec: ModelSpec
    index: int
    calibration: Calibration
    after: ModelSpec

    def __post_init__(self) -> None:
        self.result = Block(self.source)
        #: The last factor c.
        self.factor = 1.0
        #: What bare embeddings are multiplied by where they are the stream.
        self.embedded = _stream_scale(self.calibration) if self.bare else 1.0

    @property
    def bare(self) -> bool:
        """Whether the source's layer reads embeddings that nothing has normed."""
        return self.index == 0 and not self.spec.embedding_norm

    def move_norms(self) -> None:
        """Put every norm before what reads it."""
        if self.bare:
            before = self._least_norm()
        elif self.index == 0:
            before = _renamed(self.calibration.source_block(EMBEDDINGS), "embed_norm", "attn_norm")
        else:
            previous = self.calibration.source_block(BlockRef("layer", self.index - 1))
            before = _renamed(previous, "mlp_norm", "attn_norm")
        self.result = Block({**self.result, **before, **_renamed(self.source, "attn_norm", "mlp_norm")})

    def _least_norm(self) -> dict[str, Tensor]:
        """The norm that changes bare embeddings least: their mean rms and their mean."""
        states = torch.cat(list(self._streams("attn_norm"))) / self.embedded
        means = states.mean(dim=-1) if self.spec.norm is Norm.LAYERNORM else states.new_zeros(len(states))
        rms = (states - means[:, None]).square().mean(dim=-1).sqrt()
        norm = {"attn_norm.weight": rms.mean().expand(self.spec.hidden_size).clone()}
        bias = {"attn_norm.bias": means.mean().expand(self.spec.hidden_size).clone()}
        return norm | (bias if self.spec.norm_bias else {})

    def scale(self, norm: str, writer: str) -> None:
        """Give a writer its factor c, and its bias what the norm before it adds."""
        gain, along, square = self.result[f"{norm}.weight"], 0.0, 0.0
        for states in self._streams(norm):
            normed = run_norm({f"{norm}.weight": torch.ones_like(gain)}, norm, self.after, states)
            rms = (states * normed).mean(dim=-1)  # r is rms n, and a mean that no norm reads; |n|^2 = D
            along += float((rms * (normed.square() @ gain)).double().sum())
            square += float((normed * gain).double().square().sum())
        self.factor = along / (square * self.spec.residual_scale)
        self.result[f"{writer}.weight"] = self.factor * self.source[f"{writer}.weight"]
        if f"{norm}.bias" in self.result:
            shift = self.spec.residual_scale * self.result[f"{norm}.bias"]
            self.result[f"{writer}.bias"] = self.factor * (self.source.get(f"{writer}.bias", 0) + shift)

    def _streams(self, norm: str) -> Iterator[Tensor]:
        """States (N, D) that a norm of the result reads."""
        for rows in chunks(self.calibration, _TOKENS):
            states = self.calibration.inputs(rows)
            if norm == "mlp_norm":
                states = after_attention(self.result, self.after, self.index, states)
            yield states[self.calibration.mask(rows)]

    def given(self, states: Tensor) -> Tensor:
        """What the source's layer is given where the stream has these states."""
        return states / self.embedded if self.bare else run_norm(self.result, "attn_norm", self.after, states)

    def wanted(self, states: Tensor) -> Tensor:
        """c y', what the stream should be behind the layer."""
        middle = after_attention(self.source, self.spec, self.index, self.given(states))
        return self.factor * (self.spec.residual_scale * middle + run_mlp(self.source, self.spec, middle))

    def errors(self) -> dict[str, float]:
        """|e| / |y|, root mean square over tokens, of what is read at each norm in the place of y."""
        found: dict[str, list[Tensor]] = {}
        for rows in chunks(self.calibration, _TOKENS):
            states, inside = self.calibration.inputs(rows), self.calibration.mask(rows)
            given = self.given(states)
            middle = after_attention(self.source, self.spec, self.index, given)
            end = after_mlp(self.source, self.spec, middle)
            half = after_attention(self.result, self.after, self.index, states)
            whole = after_mlp(self.result, self.after, half)
            pairs = {
                "the attention reads": (run_norm(self.result, "attn_norm", self.after, states), given),
                "the MLP reads": (run_norm(self.result, "mlp_norm", self.after, half), middle),
                "the next layer reads": (run_norm(self.source, "mlp_norm", self.spec, whole), end),
            }
            for what, (ours, right) in pairs.items():
                error = (ours - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-30)
                found.setdefault(what, []).append(error[inside])
        return {what: float(torch.cat(parts).square().mean().sqrt()) for what, parts in found.items()}
