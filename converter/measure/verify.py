"""Compare two checkpoints on text. Both run as transformers' own classes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from converter.errors import CheckpointError, ConverterError, UnsupportedError
from converter.files.hub import local_path
from converter.files.tokenizer import load_tokenizer, same_ids
from converter.text.windows import Windows, as_paths, read_documents, windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel
from converter.measure.metrics import Comparison, Tally, batches, predictions
from converter.measure.models import load_any, pick_device


def compare(source: PreTrainedModel, other: PreTrainedModel, windows: Windows, device: str = "cpu") -> Comparison:
    """Run two transformers models over the same windows."""
    tally = Tally(windows.ids.shape[1])
    models = [model.to(device).eval() for model in (source, other)]
    vocabularies = {model.config.vocab_size for model in models}
    if len(vocabularies) > 1:
        raise UnsupportedError(
            f"the two models have vocabularies of {' and '.join(map(str, sorted(vocabularies)))} tokens",
            why="a KL needs the same tokens on both sides",
        )
    with torch.no_grad():
        for batch in batches(windows, tokens=max(windows.ids.shape[1], 60_000_000 // vocabularies.pop())):
            ids = torch.from_numpy(windows.ids[batch]).to(device)
            rows, positions, targets = (t.to(device) for t in predictions(windows, batch))
            logits = [model(input_ids=ids, use_cache=False).logits for model in models]
            tally.add(logits[0][rows, positions], logits[1][rows, positions], targets, positions)
    return tally.comparison()


def verify(
    a: str | Path,
    b: str | Path,
    *,
    text: str | Path | Sequence[str | Path],
    tokens: int = 65536,
    context: int = 0,
    device: str = "auto",
) -> Comparison:
    """How far checkpoint `b` is from checkpoint `a` on text, by position bucket; each a path or a Hub id.

    At most `tokens` tokens, spread over the text, in windows of `context` (0: as long as both models
    allow, up to 2048). Raises a ConverterError where the two cannot be compared.
    """
    device = pick_device(device)
    paths = [local_path(a), local_path(b)]
    tokenizers = [load_tokenizer(path if path.is_dir() else path.parent) for path in paths]
    if tokenizers[0] is not None and tokenizers[1] is not None:
        same_ids(tokenizers[0], tokenizers[1])
    models = [load_any(path) for path in paths]
    config = models[0].config
    longest = min(2048, *(model.config.max_position_embeddings for model in models))
    if context > longest:
        raise ConverterError(f"the models see {longest} tokens at most", where=f"--context {context}")
    opening = config.bos_token_id if config.bos_token_id is not None else config.eos_token_id
    documents = read_documents(
        as_paths(text),
        tokenizers[0] or tokenizers[1],
        vocab_size=config.vocab_size,
        end_of_text=opening if isinstance(opening, int) and opening < config.vocab_size else None,
    )
    return compare(models[0], models[1], windows(documents, context or longest, tokens), device)


def expected_kl(path: Path) -> float | None:
    """The KL to its source that a converted checkpoint's own `conversion.json` reports."""
    record = path / "conversion.json"
    if not record.is_file():
        return None
    try:
        verification = json.loads(record.read_text(encoding="utf-8")).get("verification")
        return float(verification["total"]["kl"]) if verification else None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError("conversion.json is damaged", where=str(record), why=str(error)) from error
