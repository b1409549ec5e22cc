"""Compare two checkpoints on text. Each runs as transformers' own class, or by ours where transformers has none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from converter.errors import ConverterError
from converter.files.checkpoint import Checkpoint
from converter.files.record import digests, read_record
from converter.measure.metrics import Comparison, Tally, batches, predictions
from converter.measure.models import RunnableCheckpoint, pick_device
from converter.measure.vocabulary import common_ids
from converter.reference import RunningModel
from converter.text.documents import at_least, read
from converter.text.sources import Text, listed
from converter.text.windows import Windows, windows

#: Longest window that is taken where none is given.
LONGEST_WINDOW = 2048
#: Logits of one model that are held at once.
LOGITS = 60_000_000


def compare(source: RunningModel, other: RunningModel, windows: Windows) -> Comparison:
    """Run two models of the same tokens over the same windows, on one device."""
    length = windows.ids.shape[1]
    tally = Tally(length, windows.end_of_text)
    for batch in batches(windows, tokens=max(length, LOGITS // max(source.vocab_size, other.vocab_size))):
        ids = torch.from_numpy(windows.ids[batch]).to(source.device)
        rows, positions, targets = (t.to(source.device) for t in predictions(windows, batch))
        theirs, ours = (model.logits(ids)[rows, positions] for model in (source, other))
        tally.add(theirs, ours, targets, positions)
    return tally.comparison()


def verify(
    a: str | Path,
    b: str | Path,
    *,
    text: Text | Sequence[Text],
    tokens: int = 65536,
    context: int = 0,
    device: str = "auto",
) -> Comparison:
    """How far checkpoint `b` is from checkpoint `a` on text, by position bucket; each a path or a Hub id.

    At most `tokens` tokens, spread over the text, in windows of `context` (0: as long as both models were made for,
    up to 2048). Raises a ConverterError where the two cannot be compared. Padding rows of embeddings, which have no
    token, are left out of the KL where only one of the two has them.
    """
    device = pick_device(device)
    first, second = (RunnableCheckpoint(path, device) for path in (a, b))
    common = common_ids(first.vocabulary, second.vocabulary)
    read_in = first.tokens(common, second.tokenizer)
    documents = read(listed(text), read_in, at_least(tokens)).documents
    models = (first.model, second.model)
    longest = min((model.longest for model in models if model.longest is not None), default=context)
    if context > longest:
        raise ConverterError(
            f"the models see {longest} tokens at most", where=f"--context {context}", fix=f"Choose {longest} or less"
        )
    made_for = (model.context for model in models if model.context is not None)
    length = context or min([LONGEST_WINDOW, *made_for])
    return compare(*models, windows(documents, length, tokens, end_of_text=read_in.end_of_text))


def expected_kl(path: Path) -> float | None:
    """The KL to its source that a checkpoint's own record reports, if the record speaks of these weights."""
    record = read_record(path)
    kl = record.expected_kl if record is not None else None
    if record is None or kl is None or not record.speaks_of(digests(Checkpoint.open(path), ())):
        return None
    return kl
