"""Fit every layer to the source's: the same inputs as in the converted model, the source's outputs. Lossy, calibrated.

A layer's parameters theta are moved by gradient so that

    mean over tokens of e^T (1 + S / s)^-1 e,    e = (f_theta(x) - y) / |y|

falls, where x are the states that enter the layer in the model converted so far, with all the damage of the layers
before it, and y those that leave the same layer of the source, fed its own states. Each token is divided by its own
size because the next norm does so; a few states of huge norm would own the sum otherwise. Where the source's norms
stand behind the sublayers (post-LN), y is what its next layer reads, and f is compared as the converted model's next
layer reads it: through the norm that was moved there, so that the scale of the stream is free.

S is the covariance of the errors so far and s the mean of its diagonal: generalised least squares (Aitken 1935),
damped by the 1. y holds all that the source knew, positions too, so a layer can learn to read off the prefix what a
lost position table had said. What nobody can read there is noise, large and in few directions. Plain squares would
spend the steps on it; the inverse covariance turns these directions down and leaves the others as they are.

Where the norms were moved, the metric is (R^-1 + S / s)^-1, R = 1 + A / a: A is the Gram matrix of the q, k and v
weights that read y in the source's next layer, a the mean of its diagonal, and s that of RS's. A post-LN model norms
every state before it goes on, so what is read there decides more than what remains: it lowers the KL from .039 to .033
on a trained model. In a pre-LN one, whose states remain to the end, it costs .003, and R is 1 (docs/conversion.md).

The layer starts where the ops before left it, and nothing is propagated through more than one layer: the memory is
that of one layer, its gradients, Adam's two moments and the activations of one micro-batch.

Layer-wise reconstruction of the source's outputs from the converted stream is in Frantar & Alistarh 2022 (OBC) and
Li et al. 2021 (BRECQ); the optimizer is Adam (Kingma & Ba 2015), with a cosine down to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from converter.blocks import Block, BlockRef
from converter.ops import Calibration, Notes, Op, op
from converter.reference import run_layer
from converter.spec import ModelSpec

#: Steps over which the rate rises: Adam's second moments mean nothing before.
_WARMUP = 10
#: Biases learn so much faster. A rotated bias grows from zero to a norm of several, to draw a function of the
#: distance; at the rate of the weights it gets a twentieth of the way (docs/conversion.md, "What did not help").
_BIAS_RATE = 60.0
#: Share of the newest errors in their covariance, and steps between two inversions of it.
_NEWEST, _INVERSION = 0.05, 10
#: Tokens whose activations are held at once, or a window; more are summed up in micro-batches. In a layer of GPT-2-XL
#: their graph is half as large as the layer (85 and 164 MB), and the backward needs as much again.
MICRO_BATCH = 512
#: Tokens that the error is measured on, before and after.
_MEASURED = 16384


@op
@dataclass(frozen=True)
class FitBlocks(Op):
    """Fit each layer by `steps` steps of Adam on `sequences` windows, at `rate` falling to nothing.

    With little text there are fewer steps: no window is looked at more than `passes` times.
    """

    steps: int = 600
    rate: float = 5e-4
    sequences: int = 1
    passes: int = 2
    seed: int = 0

    name = "fit_blocks"
    summary = "fit every layer to the outputs of the source's"
    calibrated = True
    follows_source = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ValueError("must be a number above 0")
        if self.sequences < 1 or self.passes < 1:
            raise ValueError("must be 1 or more")

    def needed(self, spec: ModelSpec) -> bool:
        return self.steps > 0

    def change(self, spec: ModelSpec) -> ModelSpec:
        return spec

    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        if notes.ref.kind != "layer" or calibration is None or self.steps == 0:
            return block
        before = notes.errors["before"] = _error(block, spec, notes.ref.index, calibration)
        parameters = {role: tensor.clone().requires_grad_() for role, tensor in block.items()}
        steps = self._steps(calibration)
        with torch.enable_grad():
            for step, loss in enumerate(self._fit(parameters, spec, notes.ref.index, calibration, steps)):
                notes.progress(f"fit {notes.ref}, error {math.sqrt(loss):.1%}", step, steps)
        fitted = Block({role: tensor.detach() for role, tensor in parameters.items()})
        after = notes.errors["after"] = _error(fitted, spec, notes.ref.index, calibration)
        notes.progress(f"fit {notes.ref}, error {before:.1%} before, {after:.1%} after", steps, steps)
        return fitted

    def _steps(self, calibration: Calibration) -> int:
        """As many as asked for, or as the text allows."""
        return min(self.steps, max(1, self.passes * calibration.count // self.sequences))

    def _fit(
        self, parameters: dict[str, Tensor], spec: ModelSpec, layer: int, calibration: Calibration, steps: int
    ) -> Iterator[float]:
        """Change the parameters in place; yields the loss of each step."""
        groups = [
            {"params": [tensor], "scale": _rate_scale(role, calibration.stream_scale)}
            for role, tensor in parameters.items()
        ]
        optimizer = torch.optim.Adam(groups, lr=self.rate, betas=(0.9, 0.99), fused=True)
        metric_for = _Metric(_reading(spec, layer, calibration))
        covariance: Tensor | None = None
        metric: Tensor | None = None
        for step, rows in enumerate(_selections(calibration.count, self.sequences, steps, self.seed, layer)):
            for group in optimizer.param_groups:
                group["lr"] = self.rate * group["scale"] * _schedule(step, steps)
            tokens = int(calibration.mask(rows).sum())
            squares: Tensor | None = None
            for part in rows.split(_micro_batch(calibration)):
                errors = _errors(parameters, spec, layer, calibration, part)
                weighted = errors if metric is None else errors @ metric
                ((weighted * errors).sum() / tokens).backward()
                errors = errors.detach()
                products = errors.T @ errors / tokens
                squares = products if squares is None else squares + products
            assert squares is not None
            optimizer.step()
            optimizer.zero_grad()
            covariance = squares if covariance is None else covariance.lerp(squares, _NEWEST)
            if step % _INVERSION == 0:
                metric = metric_for(covariance)
            yield float(squares.trace())


def _rate_scale(role: str, stream_scale: float) -> float:
    """By how much faster than the rest a tensor is moved: biases, and writers in units of the stream."""
    part, kind = role.split(".")
    return (_BIAS_RATE if kind == "bias" else 1.0) * (stream_scale if part in ("o", "down") else 1.0)


def _reading(spec: ModelSpec, layer: int, calibration: Calibration) -> Tensor | None:
    """R (D, D) of what reads a layer of a post-LN source; None stands for 1."""
    if not calibration.moved_norms or layer == spec.num_layers - 1:
        return None
    reader = calibration.source_block(BlockRef("layer", layer + 1))
    weights = torch.cat([reader[f"{part}.weight"] for part in "qkv"])
    gram = weights.T @ weights
    result: Tensor = gram / gram.diagonal().mean() + torch.eye(len(gram)).to(gram)
    return result


class _Metric:
    """(R^-1 + S / s)^-1 for one R and any S (D, D), s being the mean of RS's diagonal."""

    def __init__(self, reading: Tensor | None) -> None:
        self._reading = reading
        self._unread = None if reading is None else torch.linalg.inv(reading)

    def __call__(self, covariance: Tensor) -> Tensor:
        if self._reading is None or self._unread is None:
            unread, scale = torch.eye(len(covariance)).to(covariance), covariance.diagonal().mean()
        else:
            unread, scale = self._unread, (self._reading * covariance).sum() / len(covariance)
        metric: Tensor = torch.linalg.inv(covariance / scale.clamp_min(1e-30) + unread)
        return metric


def _schedule(step: int, steps: int) -> float:
    """The rate's share at a step: a linear warm-up, and a cosine to nothing."""
    return min(1.0, (step + 1) / _WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _selections(count: int, sequences: int, steps: int, seed: int, layer: int) -> Iterator[torch.Tensor]:
    """Window numbers of each step: all windows in a random order, then again in another one."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + layer)
    order = torch.empty(0, dtype=torch.long)
    sequences = min(sequences, count)
    for _ in range(steps):
        if len(order) < sequences:
            order = torch.cat([order, torch.randperm(count, generator=generator)])
        yield order[:sequences]
        order = order[sequences:]


def _micro_batch(calibration: Calibration) -> int:
    """Windows whose activations are held at once."""
    return max(1, MICRO_BATCH // calibration.length)


def _errors(
    roles: dict[str, Tensor] | Block, spec: ModelSpec, layer: int, calibration: Calibration, rows: Tensor
) -> Tensor:
    """(f(x) - y) / |y| of every token of some windows, (N, D)."""
    inside = calibration.mask(rows)
    targets = calibration.targets(rows)[inside]
    outputs = calibration.as_read(run_layer(roles, spec, layer, calibration.inputs(rows)))[inside]
    errors: Tensor = (outputs - targets) / targets.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    return errors


def _error(block: Block, spec: ModelSpec, layer: int, calibration: Calibration) -> float:
    """The root of the mean of |e|^2, over some tokens spread over the text."""
    windows = max(1, min(calibration.count, _MEASURED // calibration.length))
    rows = torch.arange(windows) * calibration.count // windows
    parts = rows.split(_micro_batch(calibration))
    squares = [_errors(block, spec, layer, calibration, part).square().sum(dim=-1) for part in parts]
    return float(torch.cat(squares).mean().sqrt())
