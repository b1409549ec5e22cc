"""Find out the layout by the loss on a text, under either reading of the rows."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict

import torch

from converter import reference
from converter.blocks import EMBEDDINGS, HEAD, BlockRef
from converter.families.opened import SourceModel
from converter.layout import other_layout
from converter.measure.metrics import batches, predictions
from converter.rope.detect import Detection, detect_source
from converter.spec import RopeLayout
from converter.text.documents import at_least, read
from converter.text.gather import tokens_of
from converter.text.sources import Text
from converter.text.windows import Windows, windows

#: A loss lower by this many nats a token decides between the readings of a text.
LEAST_LOSS_DIFFERENCE = 0.02


def detect_by_loss(source: SourceModel, text: Windows) -> Detection:
    """Decide by the loss on a text under both readings of the rows; the weights are told beside it."""
    found = detect_source(source)
    if source.spec.rope is None:
        return found
    losses = {layout.value: reading_loss(source, text, layout) for layout in RopeLayout}
    low, high = sorted(losses, key=lambda name: losses[name])
    difference = losses[high] - losses[low]
    facts = asdict(found) | {"losses": losses}
    if difference < LEAST_LOSS_DIFFERENCE:
        reason = f"the text does not decide: the losses differ by {difference:.4f} nats per token"
        return Detection(**facts | {"layout": "unknown", "reason": reason})
    reason = f"read as {low} the loss is lower by {difference:.3f} nats per token"
    if found.fault:
        return Detection(**facts | {"reason": f"{reason}, and the weights say that {found.fault}"})
    if found.layout == other_layout(RopeLayout(low)).value:
        reason += f"; the weights alone say {found.layout}"
    return Detection(**facts | {"layout": low, "confidence": 1.0, "reason": reason})


def text_windows(source: SourceModel, text: Text, tokens: int = 8192) -> Windows:
    """Windows of a text, as long as the model allows, up to 512 tokens: a wrong layout shows late in a window."""
    documents = read([text], tokens_of(source), at_least(tokens)).documents
    return windows(documents, min(source.spec.context, 512), tokens)


@torch.no_grad()
def reading_loss(source: SourceModel, text: Windows, layout: RopeLayout) -> float:
    """Nats per token of the reference model, the rows of q and k read in this layout."""
    assert source.spec.rope is not None
    spec = source.spec.replace(rope=dataclasses.replace(source.spec.rope, layout=layout))
    block = source.read_block(EMBEDDINGS, torch.float32)
    parts = list(batches(text))
    states = [reference.run_embeddings(block, spec, torch.from_numpy(text.ids[part])) for part in parts]
    for index in range(spec.num_layers):
        block = source.read_block(BlockRef("layer", index), torch.float32)
        states = [reference.run_layer(block, spec, index, each) for each in states]
    block = source.read_block(HEAD, torch.float32)
    total, count = 0.0, 0
    for part, each in zip(parts, states, strict=True):
        rows, positions, targets = predictions(text, part)
        for chosen in torch.arange(len(targets)).split(1024):
            logits = reference.run_head(block, spec, each[rows[chosen], positions[chosen]])
            total += float(torch.nn.functional.cross_entropy(logits.double(), targets[chosen], reduction="sum"))
        count += len(targets)
    return total / count
