"""Find out from the weights alone which rows of q and k are rotated together.

What is looked for. Turn both rows of one rotary pair by 180 degrees, in q and in k of one head: the
model computes the same, so training from a random start makes either sign equally likely, head by head
and pair by pair. Hence for rows a and b of *different* pairs q_a.k_b - q_b.k_a has the mean 0. For the
two rows of *one* pair both factors change sign and the product stays: it is the coefficient of sin in
the attention logit q_a k_a cos + q_b k_b cos + (q_a k_b - q_b k_a) sin (Su et al. 2021, eq. 34), and a
causal model looks into one direction only, the past. So its sign is the same from head to head, and
changes slowly from one frequency to the next. A model without RoPE, or an untrained one, has no such rows.

Each hypothesis on the order of the rows (either layout, and what the common mistakes make of it) says
which rows are pairs, and in which order their frequencies are. For each the products are summed over
heads and layers against the `_WAVES` slowest cosines along the frequencies; each sum, divided by the root of its
sum of squares, has the variance 1 where the hypothesis is wrong, whatever the sizes are. The sum of
their squares is the score. `docs/rope.md` has the calibration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from converter.errors import UnsupportedError
from converter.mapping import TensorMapping
from converter.rope.layout import head_order, other_layout
from converter.source import SourceModel
from converter.spec import BlockRef, ModelSpec, RopeLayout

if TYPE_CHECKING:
    from converter.text import Windows

#: Cosines along the frequencies. Fewer lose half of the signal, more add noise (docs/rope.md).
_WAVES = 4
#: Columns of q and k that are looked at; the inputs of a layer are alike, and more than these tell nothing new.
_COLUMNS = 256
#: Least score of the winner, and least distance to any other verdict (docs/rope.md).
LEAST_SCORE = 28.0
LEAST_MARGIN = 4.0
#: What a mistake's score is lowered by: a priori it is less likely than none. Less than half of LEAST_MARGIN, so
#: that a layout is never named where a mistake explains the rows better.
PENALTY = 1.9
#: A loss lower by this many nats a token decides between the readings of a text.
LEAST_LOSS_DIFFERENCE = 0.02


@dataclass(frozen=True)
class Order:
    """A hypothesis on the rows of q or of k: component p of the half-split order lies at `rows[p]` of its head."""

    name: str
    rows: tuple[int, ...]
    #: The layout; None where it is what a mistake makes of one.
    layout: RopeLayout | None = None
    #: Rows of a unit that the mistake took for a head, where that is wider than a head.
    across: tuple[int, RopeLayout] | None = None


@dataclass(frozen=True)
class Detection:
    """What the weights, or the losses, say."""

    layout: str  # "interleaved", "half_split", "none" or "unknown"
    confidence: float
    #: The mistake that explains the rows, where one does.
    fault: str | None
    q: str
    k: str
    score: float
    margin: float
    #: Tensor kind -> hypothesis -> the best score with it.
    evidence: dict[str, dict[str, float]] = field(default_factory=dict)
    #: Nats per token under either reading of the rows, with a text.
    losses: dict[str, float] | None = None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def detect(path: str | Path) -> Detection:
    """The layout of a checkpoint, from its headers, q and k. Raises a ConverterError where it cannot be opened."""
    return detect_source(SourceModel.open(path))


def detect_source(source: SourceModel) -> Detection:
    """The layout of an opened checkpoint."""
    if source.spec.rope is None:
        return Detection("none", 1.0, None, "none", "none", 0.0, 0.0, reason="the family has no RoPE")
    with _one_thread():
        return detect_layers(query_key_layers(source), source.spec)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The products are small: beside other work two threads took ten times as long as one, waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def query_key_layers(source: SourceModel) -> Iterator[tuple[Tensor, Tensor]]:
    """`_COLUMNS` columns of q and k of each layer that rotates, with their biases as one more column."""
    assert source.spec.rope is not None
    for index in range(source.spec.num_layers):
        if not source.spec.rope.rotates(index):
            continue
        found: dict[str, Tensor] = {}
        for mapping in source.family.mappings(source.spec, BlockRef("layer", index)):
            if any(role.split(".")[0] in ("q", "k") for role in mapping.roles):
                found.update(_read_mapping(source, mapping))
        q, k = (
            torch.cat([found[f"{part}.weight"], found[f"{part}.bias"][:, None]], dim=1)
            if f"{part}.bias" in found
            else found[f"{part}.weight"]
            for part in ("q", "k")
        )
        yield q, k


def _read_mapping(source: SourceModel, mapping: TensorMapping) -> dict[str, Tensor]:
    tensors = [source.checkpoint.read(source.names[name]) for name in mapping.names]
    if not all(tensor.is_floating_point() for tensor in tensors):
        raise UnsupportedError(
            f"'{source.names[mapping.names[0]]}' is quantised", why="its values are not the weights, so nothing is seen"
        )
    return {
        role: tensor[:, :_COLUMNS] if tensor.ndim == 2 else tensor
        for role, tensor in zip(mapping.roles, mapping.to_roles(*tensors), strict=True)
        if role in ("q.weight", "k.weight", "q.bias", "k.bias")
    }


def detect_layers(layers: Iterable[tuple[Tensor, Tensor]], spec: ModelSpec) -> Detection:
    """The layout of q (H * d, D) and k (K * d, D) of some layers, ranked over all of them at once."""
    assert spec.rope is not None
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    orders = {
        "q": hypotheses(spec.head_dim, spec.rope.rotary_dim, heads, {"k": kv_heads}),
        "k": hypotheses(spec.head_dim, spec.rope.rotary_dim, kv_heads, {"q": heads, "a group": heads // kv_heads}),
    }
    wide = {part: sorted({o.across for o in orders[part] if o.across}) for part in ("q", "k")}
    products: dict[tuple[Any, Any], list[Tensor]] = {}
    for q, k in layers:
        queries = {across: _group(_undo(q.float(), across), spec) for across in (None, *wide["q"])}
        keys = {across: _undo(k.float(), across) for across in (None, *wide["k"])}
        for pair in ((a, b) for a in queries for b in keys if a is None or b is None):
            products.setdefault(pair, []).append(_products(queries[pair[0]], keys[pair[1]], spec))
    if not products:
        return Detection("none", 1.0, None, "none", "none", 0.0, 0.0, reason="no layer rotates")
    stacked = {key: torch.cat(parts) for key, parts in products.items()}
    scores = {
        (a, b): _score(stacked[a.across, b.across], a, b)
        for a in orders["q"]
        for b in orders["k"]
        if (a.across, b.across) in stacked
    }
    return _decide(scores)


def _undo(rows: Tensor, across: tuple[int, RopeLayout] | None) -> Tensor:
    """Take back a permutation over units that are wider than a head."""
    if across is None:
        return rows
    unit, to = across
    order = torch.tensor(head_order(unit, unit, to)).argsort()
    return rows.reshape(-1, unit, rows.shape[1])[:, order].reshape(rows.shape)


def _group(q: Tensor, spec: ModelSpec) -> Tensor:
    """(H * d, D) -> (K, d, D): the query heads of each key-value head added up."""
    return q.reshape(spec.num_kv_heads, -1, spec.head_dim, q.shape[1]).sum(dim=1)


def _products(q: Tensor, k: Tensor, spec: ModelSpec) -> Tensor:
    """q_a.k_b for all rows of each key-value head, (K, d, d), each of mean square 1."""
    products = torch.bmm(q, k.reshape(spec.num_kv_heads, spec.head_dim, -1).transpose(1, 2))
    size = products.pow(2).mean(dim=(1, 2), keepdim=True).sqrt()
    return products / size.clamp_min(torch.finfo(size.dtype).tiny)


def _score(products: Tensor, q: Order, k: Order) -> float:
    """How much the coefficients of the pairs that a hypothesis names agree in sign.

    Those of sin say which rows are pairs; those of cos, with half the weight, which row of q goes with which of k.
    """
    half = len(q.rows) // 2
    (aq, bq), (ak, bk) = ((torch.tensor(order.rows[:half]), torch.tensor(order.rows[half:])) for order in (q, k))
    sines = products[:, aq, bk] - products[:, bq, ak]
    cosines = products[:, aq, ak] + products[:, bq, bk]
    frequencies = (torch.arange(half, dtype=torch.float64) + 0.5) / half
    waves = torch.stack([torch.cos(math.pi * wave * frequencies) for wave in range(min(_WAVES, half))])
    score = 0.0
    for signed, weight in ((sines.double(), 1.0), (cosines.double(), 0.5)):
        signed = signed.sign() * signed.abs().sqrt()  # single heads of great size must not speak for all
        sums = waves @ signed.sum(dim=0)
        squares = waves.pow(2) @ signed.pow(2).sum(dim=0)
        score += weight * float((sums.pow(2) / squares.clamp_min(1e-30)).sum())
    return score


def hypotheses(head_dim: int, rotary_dim: int, num_heads: int, others: dict[str, int]) -> list[Order]:
    """The two layouts, and what a permutation done wrongly makes of them; `others` are head counts taken by mistake."""
    found: list[Order] = []
    seen: set[tuple[tuple[int, ...], Any]] = set()

    def add(order: Order) -> None:
        if (order.rows, order.across) not in seen:
            seen.add((order.rows, order.across))
            found.append(order)

    native = {
        RopeLayout.HALF_SPLIT: tuple(range(rotary_dim)),
        RopeLayout.INTERLEAVED: tuple(head_order(head_dim, rotary_dim, RopeLayout.HALF_SPLIT)[:rotary_dim]),
    }
    for layout, rows in native.items():
        add(Order(layout.value, rows, layout))
    for layout, rows in native.items():
        for to in RopeLayout:
            moved = f"{layout.value}, moved to {to.value}"
            if layout is to:
                add(Order(f"{moved} once more", _after(rows, head_order(head_dim, rotary_dim, to))))
            if rotary_dim < head_dim:
                whole = head_order(head_dim, head_dim, to)
                add(Order(f"{moved} by whole heads instead of their {rotary_dim} rotary rows", _after(rows, whole)))
            for whose, count in others.items():
                unit = num_heads * head_dim // count
                if count == num_heads or (num_heads * head_dim) % count or unit % 2 or rotary_dim < head_dim:
                    continue
                name = f"{moved} by the head count of {whose} ({count} instead of {num_heads})"
                if head_dim % unit == 0 and unit < head_dim:
                    inner = head_order(unit, unit, to)
                    order = [start + row for start in range(0, head_dim, unit) for row in inner]
                    add(Order(name, _after(rows, order)))
                elif unit % head_dim == 0:
                    add(Order(name, rows, across=(unit, to)))
    return found


def _after(rows: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Where rows are after a tensor was permuted: row n of it is row `order[n]` of before."""
    places = {row: place for place, row in enumerate(order)}
    return tuple(places[row] for row in rows)


def _decide(scores: dict[tuple[Order, Order], float]) -> Detection:
    """The verdict: a layout, a mistake, or neither where the score is low or another verdict is near."""
    ranked = sorted(((score - _penalty(*pair), *pair) for pair, score in scores.items()), key=lambda each: -each[0])
    best, q, k = ranked[0]
    verdict = _verdict(q, k)
    other = next((each for each in ranked if _verdict(*each[1:]) is not verdict), ranked[-1])
    margin = best - other[0]
    evidence: dict[str, dict[str, float]] = {"q": {}, "k": {}}
    for score, *pair in ranked:
        for part, order in zip(("q", "k"), pair, strict=True):
            evidence[part].setdefault(order.name, round(score, 2))
    evidence = {part: dict(list(by_name.items())[:6]) for part, by_name in evidence.items()}
    confidence = round(1 / (1 + math.exp((LEAST_MARGIN - margin) / 2) + math.exp((LEAST_SCORE - best) / 2)), 4)
    if best < LEAST_SCORE or margin < LEAST_MARGIN:
        reason = (
            "no order of the rows stands out, as in a model that is untrained or without RoPE"
            if best < LEAST_SCORE
            else f"'{_words(q, k)}' and '{_words(*other[1:])}' explain the rows nearly as well"
        )
        return Detection("unknown", confidence, None, "unknown", "unknown", best, margin, evidence, reason=reason)
    if verdict is not None:
        reason = "the pairs of this layout, and of no other order, agree in sign over heads and layers"
        return Detection(verdict.value, confidence, None, q.name, k.name, best, margin, evidence, reason=reason)
    near = [each[1:] for each in ranked if best - each[0] < LEAST_MARGIN and _verdict(*each[1:]) is None]
    fault = ", or ".join(_words(*pair) for pair in near)
    reason = "q and k are in no single layout"
    return Detection("unknown", confidence, fault, q.name, k.name, best, margin, evidence, reason=reason)


def _verdict(q: Order, k: Order) -> RopeLayout | None:
    """The layout of both, or None for a mistake."""
    return q.layout if q.layout is k.layout else None


def _penalty(q: Order, k: Order) -> float:
    return 0.0 if _verdict(q, k) is not None else PENALTY


def _words(q: Order, k: Order) -> str:
    if q.name == k.name:
        return f"q and k are {q.name}"
    words = f"q is {q.name}; k is {k.name}"
    return f"only one of q and k was moved: {words}" if q.layout and k.layout else words


def detect_by_loss(source: SourceModel, windows: Windows) -> Detection:
    """Decide by the loss on a text under both readings of the rows; the weights are told beside it."""
    found = detect_source(source)
    if source.spec.rope is None:
        return found
    losses = {layout.value: reading_loss(source, windows, layout) for layout in RopeLayout}
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


@torch.no_grad()
def reading_loss(source: SourceModel, windows: Windows, layout: RopeLayout) -> float:
    """Nats per token of the reference model, the rows of q and k read in this layout."""
    import dataclasses

    from converter import model
    from converter.spec import EMBEDDINGS, HEAD
    from converter.verification import batches, predictions

    assert source.spec.rope is not None
    spec = source.spec.replace(rope=dataclasses.replace(source.spec.rope, layout=layout))
    block = source.read_block(EMBEDDINGS, torch.float32)
    parts = list(batches(windows))
    states = [model.run_embeddings(block, spec, torch.from_numpy(windows.ids[part])) for part in parts]
    for index in range(spec.num_layers):
        block = source.read_block(BlockRef("layer", index), torch.float32)
        states = [model.run_layer(block, spec, index, each) for each in states]
    block = source.read_block(HEAD, torch.float32)
    total, count = 0.0, 0
    for part, each in zip(parts, states, strict=True):
        rows, positions, targets = predictions(windows, part)
        for chosen in torch.arange(len(targets)).split(1024):
            logits = model.run_head(block, spec, each[rows[chosen], positions[chosen]])
            total += float(torch.nn.functional.cross_entropy(logits.double(), targets[chosen], reduction="sum"))
        count += len(targets)
    return total / count
