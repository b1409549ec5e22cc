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

from converter import model
from converter.errors import UnsupportedError
from converter.source import SourceModel
from converter.spec import HEAD, Positions, blocks
from converter.text import Windows, windows
from converter.texts import source_documents
from converter.verification import Figures, Tally, batches, predictions

SHIFTS = (1, 4, 16, 64)
#: Tokens that each shift is measured on.
_TOKENS = 8192
_ROWS = 512


@dataclass(frozen=True)
class Shifted:
    """The source with its positions moved by `shift`, against itself; with `first_kept` position 0 stays."""

    shift: int
    first_kept: bool
    figures: Figures


def measure_yardstick(path: str | Path, text: Sequence[str | Path], device: str = "cpu") -> tuple[Shifted, ...]:
    """`yardstick` of a checkpoint folder on text files."""
    source = SourceModel.open(path)
    documents = source_documents(source, [Path(file) for file in text])
    return yardstick(source, windows(documents, source.spec.context, _TOKENS), device)


@torch.no_grad()
def yardstick(source: SourceModel, text: Windows, device: str = "cpu") -> tuple[Shifted, ...]:
    """Shifts by 1, 4, 16 and 64, as far as the context allows, with position 0 moved and with it kept.

    Windows are cut so that the largest shift stays within the context. Raises UnsupportedError for a
    model without learned positions: there a common shift changes nothing.
    """
    spec = source.spec
    if spec.positions is not Positions.LEARNED:
        raise UnsupportedError("a model with rotary positions does not change when all of them are shifted")
    shifts = [shift for shift in SHIFTS if shift <= spec.context // 4]
    length = min(text.ids.shape[1], spec.context - max(shifts, default=0))
    rows = max(1, _TOKENS // length)
    text = Windows(text.ids[:rows, :length], text.lengths[:rows].clip(max=length))
    variants = [(0, True), *((shift, kept) for shift in shifts for kept in (False, True))]
    streams = {variant: torch.empty(*text.ids.shape, spec.hidden_size) for variant in variants}
    for ref in blocks(spec):
        if ref == HEAD:
            break
        block = source.read_block(ref, torch.float32, device)
        for (shift, kept), states in streams.items():
            positions = torch.arange(length) + shift
            positions[0] = 0 if kept else shift
            for batch in batches(text):
                if ref.kind == "embeddings":
                    ids = torch.from_numpy(text.ids[batch]).to(device)
                    states[batch] = model.run_embeddings(block, spec, ids, positions.to(device)).cpu()
                else:
                    states[batch] = model.run_layer(block, spec, ref.index, states[batch].to(device)).cpu()
    head = source.read_block(HEAD, torch.float32, device)
    results = []
    for variant in variants[1:]:
        tally = Tally(length)
        for batch in batches(text):
            place, positions, targets = predictions(text, batch)
            for part in torch.arange(len(targets)).split(_ROWS):
                logits = [
                    model.run_head(head, spec, streams[v][batch][place[part], positions[part]].to(device))
                    for v in (variants[0], variant)
                ]
                tally.add(logits[0], logits[1], targets[part].to(device), positions[part])
        results.append(Shifted(*variant, tally.comparison().total))
    return tuple(results)
