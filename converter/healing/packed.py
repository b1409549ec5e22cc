"""Hidden states of packed documents, none of which sees another.

transformers makes the mask of packed documents from positions that restart, and only where there is
neither an attention mask nor a cache: in 5.24 anything else leaks (6.4 in the logits, against 3e-6). Its
flash attention does so for a batch of one row only. Classes that do not look at positions for it
(OPT, openai-gpt) run each document piece in a row of its own. `check_no_leak` proves either on the model at hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from converter.errors import VerificationError
from converter.healing.batches import Sequences
from converter.losses import IGNORE
from converter.measure.models import is_rotary

#: Largest difference, over the largest state, that rounding alone makes: 1e-6 is seen in fp32, 1e-2 in bf16.
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def run_packed(model: PreTrainedModel, sequences: Sequences) -> Tensor:
    """The states (S, T, D) that a causal model's head reads.

    A piece of a document that is longer than a table of learned positions gets states up to there, then zeros.
    """
    return _run(model, sequences)[-1]


def run_packed_layers(model: PreTrainedModel, sequences: Sequences) -> tuple[Tensor, ...]:
    """The states (S, T, D) after the embeddings and after each layer; the last as the head reads them."""
    return _run(model, sequences, output_hidden_states=True)


def _run(model: PreTrainedModel, sequences: Sequences, **options: Any) -> tuple[Tensor, ...]:
    context = model.config.max_position_embeddings
    packs = is_rotary(model) or (model.config.model_type == "gpt2" and int(sequences.positions.max()) < context)
    if not packs:
        pieces = sequences.unpacked(context)
        states = _states(model, input_ids=pieces.ids, **options)
        return tuple(pieces.pack(each) for each in states)
    ids, positions = sequences.ids, sequences.positions
    if "flash" in str(model.config._attn_implementation):
        ids, positions = ids.reshape(1, -1), positions.reshape(1, -1)
    states = _states(model, input_ids=ids, position_ids=positions, **options)
    return tuple(each.reshape(*sequences.ids.shape, -1) for each in states)


def _states(model: PreTrainedModel, **inputs: Any) -> tuple[Tensor, ...]:
    """All hidden states if asked for, else the last ones alone."""
    output = model.base_model(attention_mask=None, use_cache=False, **inputs)
    return tuple(output.hidden_states or (output.last_hidden_state,))


@torch.no_grad()
def check_no_leak(model: PreTrainedModel) -> None:
    """Pack two documents and change the first: the second must not move, and must be what it is alone.

    Raises VerificationError where it is not so. The model is as it was afterwards.
    """
    lengths = [min(length, model.config.max_position_embeddings) for length in (5, 7)]
    generator = torch.Generator().manual_seed(0)
    first, other, second = (
        torch.randint(model.config.vocab_size, (2, length), generator=generator)  # two rows: some masks serve but one
        for length in (lengths[0], *lengths)
    )
    device = model.get_input_embeddings().weight.device
    training = model.training
    model.eval()  # dropout would move everything
    try:
        packed, changed, alone = (
            run_packed(model, _pack(*documents).to(device))[:, -lengths[1] :].float()
            for documents in ((first, second), (other, second), (second,))
        )
    finally:
        model.train(training)
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.dtype
    limit = _ROUNDING.get(dtype, 1e-4) * float(alone.abs().max())
    leak, difference = (float((packed - each).abs().max()) for each in (changed, alone))
    if not max(leak, difference) <= limit:
        raise VerificationError(
            f"{type(model).__name__} lets a packed document see the one before it",
            why=f"Its states move by {leak:.2g} when that one changes, and are {difference:.2g} from those it has "
            f"alone; rounding explains {limit:.1g}",
            fix="Choose another attention implementation (sdpa or eager), or another version of transformers",
        )


def _pack(*documents: Tensor) -> Sequences:
    """Documents (S, T_i) side by side."""
    numbers = torch.cat([torch.full_like(each, number) for number, each in enumerate(documents)], 1)
    positions = torch.cat([torch.arange(each.shape[1]).expand_as(each) for each in documents], 1)
    ids = torch.cat(documents, 1)
    return Sequences(ids, numbers, positions, torch.full_like(ids, IGNORE))
