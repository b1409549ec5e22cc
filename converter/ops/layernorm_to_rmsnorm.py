"""LayerNorm -> RMSNorm: LN(x) = RMSNorm(x) g + b for every x whose mean is zero. Exact.

LayerNorm takes the mean off before it divides by the root mean square. When everything that is added
to the residual stream is centred over the hidden dimension - embeddings, attention output, MLP
output - the stream's mean is zero at every norm and taking it off does nothing. The gain g stays,
the bias b moves into the biases of the linears that read the norm: W (n + b) = W n + W b. The final
norm's bias stays where it is; the head has no bias to take it (`fold_final_norm_bias`).

The idea is in Ashkboos et al. 2024 (SliceGPT, section 3.1); the folds are computed in fp64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from converter.blocks import Block
from converter.ops import Calibration, Notes, Op, op, require
from converter.reference import position_table
from converter.spec import ModelSpec, Norm, Positions

#: Rows that are taken to fp64 at once: few enough to stay in the cache, and no large matrix needs a copy.
_ROWS = 256


@op
@dataclass(frozen=True)
class LayerNormToRMSNorm(Op):
    """Centre all that writes to the residual stream, and fold the norm biases into their readers."""

    name = "layernorm_to_rmsnorm"
    summary = "centre the residual stream, fold the norms' biases into their readers"

    def exact(self, spec: ModelSpec) -> bool:
        return True

    def change(self, spec: ModelSpec) -> ModelSpec:
        require(spec.norm is Norm.LAYERNORM, self.name, "the model has RMSNorm already, and centring would change it")
        require(
            spec.pre_norm,
            self.name,
            "the norms stand after the sublayers (post-LN)",
            "Put post_ln_to_pre_ln before it, as recipe postln-to-llama does",
        )
        normed = {
            "the embeddings are normed": spec.embedding_norm,
            "what the sublayers write is normed": spec.sandwich_norm,
            "q and k are normed": spec.qk_norm is not None,
        }
        for what, present in normed.items():
            require(not present, self.name, f"{what}, and no weight behind that norm could be centred")
        require(spec.final_norm, self.name, "the model has no final norm, so the head would see the stream centred")
        require(
            not spec.tied_head,
            self.name,
            "the head is tied to the embeddings, which are to be centred",
            "Put untie_head before it",
        )
        readers = {"q", "k", "v", "up", *(["gate"] if spec.gated_mlp else [])} if spec.norm_bias else set()
        positions = Positions.LEARNED if spec.absolute_positions else spec.positions  # centred sines are a table
        return spec.replace(norm=Norm.RMSNORM, norm_bias=False, biases=spec.biases | readers, positions=positions)

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        if notes.ref.kind == "embeddings":
            positions = {"positions.weight": position_table(block, spec)} if spec.absolute_positions else {}
            return Block({role: centre_rows(table) for role, table in (block | positions).items()})
        if notes.ref.kind == "head":
            return block
        readers = {"attn_norm": ("q", "k", "v"), "mlp_norm": ("gate", "up") if spec.gated_mlp else ("up",)}
        result = block.without("attn_norm.bias", "mlp_norm.bias")
        for norm, linears in readers.items():
            if spec.norm_bias:
                for linear in linears:
                    result[f"{linear}.bias"] = fold_bias(
                        block[f"{linear}.weight"], block[f"{norm}.bias"], block.get(f"{linear}.bias")
                    )
        for writer in ("o", "down"):
            result[f"{writer}.weight"] = centre_rows(block[f"{writer}.weight"].T).T
            if f"{writer}.bias" in block:
                result[f"{writer}.bias"] = centre_rows(block[f"{writer}.bias"][None])[0]
        return result


def centre_rows(table: Tensor) -> Tensor:
    """Each row of (N, D) less its mean, which is computed in fp64."""
    centred = table.new_empty(table.shape)
    if table.is_meta:
        return centred
    for start in range(0, table.shape[0], _ROWS):
        rows = table[start : start + _ROWS]
        means = rows.mean(dim=1, keepdim=True, dtype=torch.float64).to(table.dtype)
        torch.sub(rows, means, out=centred[start : start + _ROWS])
    return centred


def fold_bias(weight: Tensor, shift: Tensor, bias: Tensor | None) -> Tensor:
    """The bias that makes W n + bias' = W (n + shift) + bias, computed in fp64."""
    if weight.is_meta:
        return weight.new_empty(weight.shape[0])
    precise = shift.double()
    folded = torch.cat([rows.double() @ precise for rows in weight.split(_ROWS)])
    return (folded if bias is None else folded + bias.double()).to(weight.dtype)
