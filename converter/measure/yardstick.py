"""How much a model cares where it stands: the source against itself with every position shifted.

A shift of learned positions changes nothing that a text means, so what it costs the source tells what
kind of model this is, and what a conversion of positions may be measured against. It is no bound: a
causal model can infer positions from its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from converter import reference
from converter.blocks import blocks
from converter.errors import UnsupportedError
from converter.families.opened import SourceModel
from converter.measure.metrics import Figures, Tally, batches, predictions
from converter.text.documents import at_least, read
from converter.text.gather import tokens_of
from converter.text.sources import Text
from converter.text.windows import Windows, windows

SHIFTS = (1, 4, 16, 64)
#: Tokens that each shift is measured on.
_TOKENS = 8192
#: Predictions whose logits are computed at once.
_ROWS = 512


@dataclass(frozen=True)
class Shifted:
    """The source with its positions moved by `shift`, against itself; with `first_kept` position 0 stays."""

    shift: int
    first_kept: bool
    figures: Figures


def measure_yardstick(path: str | Path, text: Sequence[Text], device: str = "cpu") -> tuple[Shifted, ...]:
    """`yardstick` of a checkpoint folder on text files."""
    source = SourceModel.open(path)
    documents = read(text, tokens_of(source), at_least(_TOKENS)).documents
    return yardstick(source, windows(documents, source.spec.context, _TOKENS), device)


@torch.no_grad()
def yardstick(source: SourceModel, text: Windows, device: str = "cpu") -> tuple[Shifted, ...]:
    """Shifts by 1, 4, 16 and 64, as far as the context allows, with position 0 moved and with it kept.

    Windows are cut so that the largest shift stays within the context. Raises UnsupportedError for a
    model without absolute positions: there a common shift changes nothing.
    """
    spec = source.spec
    if not spec.absolute_positions:
        raise UnsupportedError(
            "a model with rotary positions has no such yardstick", why="it does not change when all of them are shifted"
        )
    shifts = [shift for shift in SHIFTS if shift <= spec.context // 4]
    length = min(text.ids.shape[1], spec.context - max(shifts, default=0))
    rows = max(1, _TOKENS // length)
    text = text.rows(slice(rows), length)
    variants = [(0, True), *((shift, kept) for shift in shifts for kept in (False, True))]
    parts = list(batches(text))
    states: dict[tuple[int, bool], list[torch.Tensor]] = {}
    for ref in blocks(spec):
        roles = source.read_block(ref, torch.float32, device)
        if ref.kind == "embeddings":
            ids = [torch.from_numpy(text.ids[part]).to(device) for part in parts]
            for variant in variants:
                shifted = _positions(length, *variant).to(device)
                states[variant] = [reference.run_embeddings(roles, spec, each, shifted) for each in ids]
        elif ref.kind == "layer":
            for each in states.values():
                each[:] = [reference.run_layer(roles, spec, ref.index, part) for part in each]
    results = []
    for variant in variants[1:]:
        tally = Tally(length, text.end_of_text)
        for number, part in enumerate(parts):
            rows, positions, targets = predictions(text, part)
            for some in torch.arange(len(targets)).split(_ROWS):
                own, moved = (
                    reference.run_head(roles, spec, states[each][number][rows[some], positions[some]])
                    for each in (variants[0], variant)
                )
                tally.add(own, moved, targets[some].to(device), positions[some])
        results.append(Shifted(*variant, tally.comparison().total))
    return tuple(results)


def _positions(length: int, shift: int, first_kept: bool) -> torch.Tensor:
    """0 to length - 1, shifted; with `first_kept` all but the first."""
    positions = torch.arange(length) + shift
    positions[0] = 0 if first_kept else shift
    return positions
