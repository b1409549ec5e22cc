"""Tensors that carry nothing, each checked to be what it is taken for before it is left out."""

from __future__ import annotations

from converter.families.mapping import Drop
from converter.files.checkpoint import Checkpoint, TensorInfo
from converter.spec import ModelSpec


def causal_mask(pattern: str) -> Drop:
    """The plain lower triangle (1, 1, N, N); a windowed or prefix mask changes the function."""
    return Drop(pattern, "causal mask buffer", _not_a_causal_mask)


def fill_value(pattern: str) -> Drop:
    """The single number that masked attention logits were set to."""
    return Drop(pattern, "mask fill value", _not_a_fill_value)


def _not_a_causal_mask(checkpoint: Checkpoint, info: TensorInfo, spec: ModelSpec) -> str | None:
    import torch

    if len(info.shape) != 4 or info.shape != (1, 1, *info.shape[3:] * 2):
        return f"its shape is {list(info.shape)}, and a mask is [1, 1, N, N]"
    mask = checkpoint.read(info.name)[0, 0]
    if not torch.equal(mask != 0, torch.ones_like(mask, dtype=torch.bool).tril()):
        return "its mask is not the plain causal triangle, so attention is windowed or prefixed, which no op represents"
    return None


def _not_a_fill_value(checkpoint: Checkpoint, info: TensorInfo, spec: ModelSpec) -> str | None:
    return None if info.shape in ((), (1,)) else f"its shape is {list(info.shape)}, and the fill value is one number"


def position_ids(pattern: str = r"position_ids") -> Drop:
    """The numbers from 0 on, (N,) or (1, N), that old code stored to look positions up with."""
    return Drop(pattern, "table of the numbers from 0 on", _not_counting)


def _not_counting(checkpoint: Checkpoint, info: TensorInfo, spec: ModelSpec) -> str | None:
    found = checkpoint.read(info.name).flatten().tolist()
    return None if found == list(range(len(found))) else "its numbers do not count from 0 on, so positions are moved"


def version(pattern: str) -> Drop:
    """A version number of the code that wrote the file, as fairseq stores it."""
    return Drop(pattern, "version number of the code", _not_a_version)


def _not_a_version(checkpoint: Checkpoint, info: TensorInfo, spec: ModelSpec) -> str | None:
    return None if info.shape in ((), (1,)) else f"its shape is {list(info.shape)}, and a version is one number"


def frequencies(pattern: str) -> Drop:
    """The angle per position of each rotary pair, (rotary_dim / 2,), as the config gives it."""
    return Drop(pattern, "table of rotary frequencies that follows from theta", _other_frequencies)


#: Frequencies are stored in 16 bits by some; the smallest of them are then below what fp16 tells apart.
_RELATIVE, _ABSOLUTE = 0.01, 1e-7


def _other_frequencies(checkpoint: Checkpoint, info: TensorInfo, spec: ModelSpec) -> str | None:
    """Why a table is neither the plain frequencies of the spec nor the scaled ones: old code stored either."""
    import dataclasses

    import torch

    from converter.reference import rope_frequencies

    rope = spec.rope
    assert rope is not None
    pairs = rope.rotary_dim // 2
    if info.shape != (pairs,):
        return f"its shape is {list(info.shape)}, and there are {pairs} rotary pairs"
    found = checkpoint.read(info.name).double()
    for known in (dataclasses.replace(rope, scaling=None), rope):
        wanted = rope_frequencies(known, spec.context)[0].double()
        if torch.allclose(found, wanted, rtol=_RELATIVE, atol=_ABSOLUTE):
            return None
    steepest = float(found[1]) if pairs > 1 else 1.0
    theta = steepest ** -float(pairs) if 0 < steepest < 1 else float("nan")
    return (
        f"its frequencies are those of a theta of {theta:.6g}, and the config says {rope.theta:.6g}, so one of the two "
        "is not what the model was trained with"
    )
