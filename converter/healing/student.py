"""The student with its losses, and the teacher that it learns from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from converter.healing.batches import Sequences
from converter.healing.head import Head, Told, head_losses
from converter.healing.packed import run_packed, run_packed_layers
from converter.losses import IGNORE, Loss, Top
from converter.losses.hidden_states import hidden_state_loss


class Answer(NamedTuple):
    """What a teacher says about a batch: states (N, D) that its head reads, which of them count, and its head.

    A recorded one has `top`, its likeliest tokens, in the place of states and head. With `layers` instead, the states
    (S, T, D) after the embeddings and after each layer.
    """

    states: Tensor | None = None
    mask: Tensor | None = None
    head: Head | None = None
    top: Top | None = None
    layers: tuple[Tensor, ...] = ()


class Sums(NamedTuple):
    """Sums over the targets of a batch, in fp32: what is minimised, each loss by name, and targets with a teacher."""

    total: Tensor
    losses: dict[str, Tensor]
    answered: Tensor


class Teacher:
    """The frozen source. It may have another width than the student, never other tokens.

    Of its logits only the first `rows` are heard, where it has padding rows that the student lacks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        rows: int | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self._autocast, self._rows = autocast, rows

    @torch.no_grad()
    def __call__(self, sequences: Sequences, layers: bool = False) -> Answer:
        """Its states for a batch: what the head reads, or those of all layers."""
        with self._autocast():
            if layers:
                return Answer(layers=run_packed_layers(self.model, sequences))
            states = run_packed(self.model, sequences).flatten(0, 1)
        context, head = self.model.config.max_position_embeddings, head_of(self.model)
        head = Head(head.weight[: self._rows], None if head.bias is None else head.bias[: self._rows])
        return Answer(states, sequences.positions.flatten() < context, head)


class Student(nn.Module):
    """The model in training. Its losses are part of its forward, so that whoever shards it gathers the head with it.

    `centred`: whether the teacher's residual stream is compared without its mean, as a LayerNorm reads it.
    """

    def __init__(self, model: PreTrainedModel, losses: Sequence[Loss], centred: bool = False) -> None:
        super().__init__()
        self.model = model
        self.losses, self.centred = tuple(losses), centred
        self._no_split_modules = model._no_split_modules  # accelerate shards by these
        self.config = model.config  # and sizes DeepSpeed's buckets by this, where its config says "auto"

    def tie_weights(self) -> None:
        """As transformers does; accelerate asks for it after sharding."""
        self.model.tie_weights()

    def forward(
        self,
        ids: Tensor,
        documents: Tensor,
        positions: Tensor,
        targets: Tensor,
        answer: Answer | None,
        losses: Sequence[Loss] | None = None,
    ) -> Sums:
        """The losses of a batch, each (S, T); others than the run's own serve evaluations."""
        sequences = Sequences(ids, documents, positions, targets)
        if answer is not None and answer.layers:
            return self._stage_one(sequences, answer.layers)
        states = run_packed(self.model, sequences).flatten(0, 1)
        flat = targets.flatten()
        answered = flat != IGNORE
        if answer is None:
            answer, answered = Answer(), torch.zeros_like(answered)
        elif answer.mask is not None:
            answered &= answer.mask
        told = Told(answer.states, answer.head, answer.top, answer.mask)
        found = head_losses(states, head_of(self.model), flat, losses=losses or self.losses, told=told)
        return Sums(found.total, found.values, answered.sum().float())

    def _stage_one(self, sequences: Sequences, layers: tuple[Tensor, ...]) -> Sums:
        """Squared distance of the states to the teacher's, over their squared length, mean over the layers.

        The embeddings are left out, since the teacher's hold positions, and so is the last layer, which transformers
        gives behind the final norm only.
        """
        valid = sequences.targets != IGNORE
        own = run_packed_layers(self.model, sequences)
        pairs = list(zip(own, layers, strict=True))[1:-1]
        losses = [hidden_state_loss(a, b, valid, centred=self.centred) for a, b in pairs]
        total = torch.stack(losses).mean()
        return Sums(total, {}, total.detach() * 0.0)


def in_bfloat16(model: PreTrainedModel) -> None:
    """Round the weights of a model, and nothing else: rounded rotary frequencies say nothing of far positions."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)


def head_of(model: PreTrainedModel) -> Head:
    """A model's output head, gathered where it is sharded."""
    head = model.get_output_embeddings()
    return Head(_whole(head.weight), None if head.bias is None else _whole(head.bias))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
