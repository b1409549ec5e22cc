"""Compare two models on text: KL and loss in nats per token, top-1 agreement, by position bucket.

KL(A || B) is summed over the vocabulary and averaged over tokens, with softmaxes in fp64: near 1e-9 fp32
alone shows differences between equal logits. `F.kl_div(reduction="mean")` divides by the vocabulary
and is not used. A and B run as transformers' own classes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from converter.blocks import blocks
from converter.errors import CheckpointError, ConverterError, UnsupportedError
from converter.families import Family, TargetFamily, get_family
from converter.families.opened import SourceModel
from converter.files.hub import local_path
from converter.files.tokenizer import load_tokenizer, same_ids
from converter.rope.moves import stored_orders
from converter.text.windows import Windows, as_paths, read_documents, windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: First positions of the buckets that figures are split by.
_BUCKET_STARTS = (0, 1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192)
#: Logits of one model whose fp64 distributions are held at once: 4 MB, which stays in a processor's cache.
_CACHED = 1 << 19


@dataclass(frozen=True)
class Figures:
    """Nats per token over `tokens` predictions at the positions `first` to `last`."""

    first: int
    last: int
    tokens: int
    kl: float
    source_loss: float
    loss: float
    agreement: float

    @property
    def loss_increase(self) -> float:
        """Loss above the source's."""
        return self.loss - self.source_loss


@dataclass(frozen=True)
class Comparison:
    """How far model B is from model A (the source)."""

    total: Figures
    buckets: tuple[Figures, ...]
    #: Largest difference of two logits, and the largest logit of A.
    max_difference: float
    max_logit: float

    @property
    def relative_difference(self) -> float:
        """Largest logit difference over the largest logit."""
        return self.max_difference / max(self.max_logit, 1e-300)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"relative_difference": self.relative_difference}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Comparison:
        """The inverse of `to_dict`."""
        buckets = tuple(Figures(**each) for each in saved["buckets"])
        return cls(Figures(**saved["total"]), buckets, saved["max_difference"], saved["max_logit"])


class Tally:
    """Adds up a comparison, position by position."""

    def __init__(self, context: int) -> None:
        #: Rows: count, KL, source loss, loss, top-1 agreement.
        self.sums = torch.zeros(5, context, dtype=torch.float64)
        self.max_difference = 0.0
        self.max_logit = 0.0

    def add(self, source: Tensor, other: Tensor, targets: Tensor, positions: Tensor) -> None:
        """Logits (N, V) of both models for the tokens `targets` (N,) that follow `positions` (N,)."""
        rows = max(1, _CACHED // source.shape[1])
        for part in zip(*(each.split(rows) for each in (source, other, targets, positions)), strict=True):
            self._add(*part)

    def _add(self, source: Tensor, other: Tensor, targets: Tensor, positions: Tensor) -> None:
        log_p, log_q = source.double().log_softmax(-1), other.double().log_softmax(-1)
        rows = torch.stack(
            [
                torch.ones(len(targets), dtype=torch.float64, device=source.device),
                (log_p.exp() * (log_p - log_q)).sum(-1),
                -log_p.gather(1, targets[:, None])[:, 0],
                -log_q.gather(1, targets[:, None])[:, 0],
                (log_p.argmax(-1) == log_q.argmax(-1)).double(),
            ]
        )
        self.sums.index_add_(1, positions.cpu(), rows.cpu())
        self.max_difference = larger(self.max_difference, (source - other).abs().max())
        self.max_logit = larger(self.max_logit, source.abs().max())

    def comparison(self) -> Comparison:
        """What was added up."""
        context = self.sums.shape[1]
        starts = [start for start in _BUCKET_STARTS if start < context]
        edges = zip(starts, [*starts[1:], context], strict=True)
        buckets = [self._figures(first, end) for first, end in edges if self.sums[0, first:end].sum() > 0]
        return Comparison(self._figures(0, context), tuple(buckets), self.max_difference, self.max_logit)

    def _figures(self, first: int, end: int) -> Figures:
        sums = self.sums[:, first:end].sum(dim=1)
        used = self.sums[0, first:end].nonzero()
        count = sums[0].item()
        kl, source_loss, loss, agreement = (sums[1:] / count).tolist()
        last = first + int(used.max()) if len(used) else end - 1
        return Figures(first, last, int(count), kl, source_loss, loss, agreement)


def larger(a: float, b: Tensor) -> float:
    """The larger of two numbers, and NaN where one of them is: `max` would lose it, and a gate would pass."""
    return float(torch.maximum(torch.tensor(a, dtype=torch.float64), b.double().cpu()))


def predictions(windows: Windows, batch: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Which (row, position) of a batch of windows predicts which token: three (N,) tensors."""
    ids = torch.from_numpy(windows.ids[batch])
    lengths = torch.from_numpy(windows.lengths[batch])
    rows, positions = torch.nonzero(torch.arange(ids.shape[1])[None] < lengths[:, None] - 1, as_tuple=True)
    return rows, positions, ids[rows, positions + 1]


def batches(windows: Windows, tokens: int = 4096) -> Iterator[slice]:
    """Slices of windows that hold about this many tokens each."""
    count, context = windows.ids.shape
    size = max(1, tokens // context)
    yield from (slice(start, min(start + size, count)) for start in range(0, count, size))


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


def tokens_per_second(model: PreTrainedModel, windows: Windows, device: str = "cpu") -> float:
    """Speed of a forward over full windows on this machine, the best of three after a warm-up."""
    ids = torch.from_numpy(windows.ids[next(batches(windows))]).to(device)
    times = []
    with torch.no_grad():
        for _ in range(4):
            started = time.perf_counter()
            float(model(input_ids=ids, use_cache=False).logits[0, 0, 0])
            times.append(time.perf_counter() - started)
    return ids.numel() / min(times[1:])


def load_transformers(source: SourceModel) -> PreTrainedModel:
    """A checkpoint as transformers' own class in fp32, by clean names and strictly: nothing stays random.

    transformers itself would silently leave weights random whose names carry a wrapper such as
    `module.` or `_orig_mod.`. A family that it has no class for runs as its stand-in.
    """
    quiet_transformers()
    if source.family.model_class is None and source.family.stand_in is None:
        from converter.measure.reference_model import ReferenceModel

        return cast("PreTrainedModel", ReferenceModel(source).eval())
    if source.family.stand_in is None:
        family, config, state = _as_stored(source)
    else:
        family, config, state = _as_stand_in(source, source.family.stand_in)
    config.tie_word_embeddings = source.spec.tied_head
    model: PreTrainedModel = _class_of(family)(config).float()
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    tied = {family.full_name(family.head)} if source.spec.tied_head else set()
    if set(missing) - tied or unexpected:
        raise CheckpointError(
            f"transformers' {family.model_class} has other tensors than our mapping",
            where=str(source.checkpoint.opened),
            why=f"missing: {sorted(set(missing) - tied)}, unexpected: {sorted(unexpected)}",
        )
    return model.eval()


def _as_stored(source: SourceModel) -> tuple[Family, Any, dict[str, Tensor]]:
    """The config as transformers itself reads it, and the tensors under their own names."""
    family, checkpoint = source.family, source.checkpoint
    try:
        config = _class_of(family).config_class.from_pretrained(checkpoint.path, local_files_only=True)
    except Exception as error:
        raise CheckpointError("transformers refuses this config", where=source.where, why=str(error)) from error
    for key, token in source.token_ids().items():
        setattr(config, key, token)
    state = {family.full_name(bare): checkpoint.read(source.names[bare]).float() for bare in source.used}
    if source.declared_layout is not None and source.stamp not in (None, source.declared_layout):
        for bare, order in stored_orders(source, source.declared_layout):
            state[family.full_name(bare)] = state[family.full_name(bare)][torch.from_numpy(order)]
    return family, config, state


def _as_stand_in(source: SourceModel, name: str) -> tuple[Family, Any, dict[str, Tensor]]:
    """Config and tensors as another family writes them."""
    family = get_family(name)
    assert isinstance(family, TargetFamily), f"{source.family.name}'s stand-in {name} cannot be written"
    spec = family.accept(source.spec)
    config = _class_of(family).config_class.from_dict(family.write_config(spec) | source.token_ids())
    state: dict[str, Tensor] = {}
    for ref in blocks(source.spec):
        state |= family.write_block(spec, ref, source.read_block(ref, torch.float32))
    return family, config, state


def _class_of(family: Family) -> Any:
    import transformers

    assert family.model_class is not None, f"{family.name} has neither a model_class nor a stand_in"
    return getattr(transformers, family.model_class)


def load_plain(path: Path) -> PreTrainedModel:
    """A folder as anybody would load it; raises where a tensor is missing, left over or of another shape."""
    from transformers import AutoModelForCausalLM

    quiet_transformers()
    if not (path / "config.json").exists():  # a format that transformers does not read
        return load_transformers(SourceModel.open(path))
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True, local_files_only=True, trust_remote_code=False
    )
    faults = {kind: info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info.get(kind)}
    if faults:
        raise CheckpointError("transformers does not find its tensors in the files", where=str(path), why=str(faults))
    loaded: PreTrainedModel = model.eval()
    return loaded


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


def pick_device(device: str) -> str:
    """cuda where there is one, for "auto"."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConverterError("there is no CUDA device", where="--device cuda", fix="Use --device cpu")
    return device


def is_rotary(model: PreTrainedModel) -> bool:
    """Whether a model of transformers rotates q and k: positions have no end then."""
    return hasattr(model.base_model, "rotary_emb")


def load_any(path: Path) -> PreTrainedModel:
    """Through our family where we know it, plainly otherwise."""
    try:
        return load_transformers(SourceModel.open(path))
    except UnsupportedError as error:
        try:
            return load_plain(path)
        except ConverterError:
            raise
        except Exception:
            raise error from None


def quiet_transformers() -> None:
    """No progress bars and no advice from transformers between our own lines."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


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
