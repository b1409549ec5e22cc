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
their squares is `rotation`.

The coefficients of cos say which row of q goes with which of k, in a model without RoPE too: attention looks for
like content, so q_a.k_a leans to one sign. Summed in the same way they are `match`. It tells mistakes apart that
moved q and k differently, but it is no sign of rotation, and taken for coefficients of sin by a wrong
hypothesis it looks like one. So a verdict needs enough of `rotation` by itself, and no hypothesis with far more of
`match` beside it. `docs/rope.md` has the calibration.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from converter.families.rotating import Opened
from converter.rope.columns import Columns, layer_columns
from converter.rope.hypotheses import Order, query_key_hypotheses, undone
from converter.spec import ModelSpec, RopeLayout

#: Cosines along the frequencies. Fewer lose half of the signal, more add noise (docs/rope.md).
_WAVES = 4
#: Columns of q and k that are looked at; the inputs of a layer are alike, and more than these tell nothing new.
COLUMNS = 256
#: Least score of the winner, and least distance to any other verdict (docs/rope.md).
LEAST_SCORE = 28.0
LEAST_MARGIN = 4.0
#: Least rotation of the winner, in all and for each key-value head: it grows with their number where there is any, and
#: chance does not. And the least part of the best match that the winner has to have.
LEAST_ROTATION = 20.0
LEAST_ROTATION_PER_HEAD = 0.5
LEAST_MATCH = 0.7
#: What a mistake's score is lowered by: a priori it is less likely than none. Less than half of LEAST_MARGIN, so
#: that a layout is never named where a mistake explains the rows better.
PENALTY = 1.9


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
    rotation: float
    #: Tensor kind -> hypothesis -> the best score with it.
    evidence: dict[str, dict[str, float]] = field(default_factory=dict)
    #: Nats per token under either reading of the rows, with a text.
    losses: dict[str, float] | None = None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def detect_source(source: Opened) -> Detection:
    """The layout of an opened checkpoint."""
    if source.spec.rope is None:
        return Detection("none", 1.0, None, "none", "none", 0.0, 0.0, 0.0, reason="the family has no RoPE")
    return detect_layers(query_key_layers(source), source.spec)


def query_key_layers(source: Opened) -> Iterator[tuple[Columns, Columns]]:
    """`COLUMNS` columns of q and k of each layer that rotates, with their biases as one more column."""
    for _, roles in layer_columns(source, lambda layer: slice(0, COLUMNS)):
        q, k = (
            np.concatenate([roles[f"{part}.weight"], roles[f"{part}.bias"][:, None]], axis=1)
            if f"{part}.bias" in roles
            else roles[f"{part}.weight"]
            for part in ("q", "k")
        )
        yield q, k


def detect_layers(layers: Iterable[tuple[Columns, Columns]], spec: ModelSpec) -> Detection:
    """The layout of q (H * d, D) and k (K * d, D) of some layers, ranked over all of them at once."""
    statistics = _statistics(*query_key_hypotheses(spec))
    heads = 0
    with threadpool_limits(
        1
    ):  # the products are small: beside other work threads wait for each other ten times as long
        for q, k in layers:
            heads += spec.num_kv_heads
            for (q_across, k_across), statistic in statistics.items():
                statistic.add(_products(_taken_back(q, q_across), _taken_back(k, k_across), spec))
    if not heads:
        return Detection("none", 1.0, None, "none", "none", 0.0, 0.0, 0.0, reason="no layer rotates")
    explanations = [explanation for statistic in statistics.values() for explanation in statistic.explanations()]
    return _decide(explanations, max(LEAST_ROTATION, LEAST_ROTATION_PER_HEAD * heads))


def _taken_back(rows: Columns, across: tuple[int, RopeLayout] | None) -> Columns:
    return rows if across is None else rows[undone(across, len(rows))]


def _products(q: Columns, k: Columns, spec: ModelSpec) -> Columns:
    """q_a.k_b for all rows of each key-value head, (K, d, d), each of mean square 1; its query heads are added up."""
    groups = q.reshape(spec.num_kv_heads, -1, spec.head_dim, q.shape[1]).sum(axis=1)
    products: Columns = groups @ k.reshape(spec.num_kv_heads, spec.head_dim, -1).transpose(0, 2, 1)
    size = np.sqrt(np.square(products).mean(axis=(1, 2), keepdims=True))
    products /= np.maximum(size, np.finfo(size.dtype).tiny)
    return products


def _statistics(q_orders: list[Order], k_orders: list[Order]) -> dict[tuple[Any, Any], _Statistic]:
    """Pairs of hypotheses, by the products that they are tested on. Of q and k one at most was moved over heads."""
    pairs: defaultdict[tuple[Any, Any], list[tuple[Order, Order]]] = defaultdict(list)
    for q in q_orders:
        for k in k_orders:
            if q.across is None or k.across is None:
                pairs[q.across, k.across].append((q, k))
    return {key: _Statistic(found) for key, found in pairs.items()}


@dataclass(frozen=True)
class _Explanation:
    """One order of q with one of k, and what the weights say for it."""

    q: Order
    k: Order
    rotation: float
    match: float

    @property
    def verdict(self) -> RopeLayout | None:
        """The layout of both, or None for a mistake."""
        return self.q.layout if self.q.layout is self.k.layout else None

    @property
    def score(self) -> float:
        """What it is ranked by."""
        return self.rotation + 0.5 * self.match - (0.0 if self.verdict is not None else PENALTY)

    def __str__(self) -> str:
        if self.q.name == self.k.name:
            return f"q and k are {self.q.name}"
        words = f"q is {self.q.name}; k is {self.k.name}"
        return f"only one of q and k was moved: {words}" if self.q.layout and self.k.layout else words


class _Statistic:
    """How much the coefficients of the pairs that each hypothesis names agree in sign."""

    def __init__(self, pairs: list[tuple[Order, Order]]) -> None:
        self.pairs = pairs
        self._half = half = len(pairs[0][0].rows) // 2
        q, k = (np.array([pair[part].rows for pair in pairs]) for part in (0, 1))
        #: For each hypothesis and frequency the rows of q and of k that are its first and its second.
        self._q, self._k = (q[:, :half], q[:, half:]), (k[:, :half], k[:, half:])
        self._sums = np.zeros((2, len(pairs), half))
        self._squares = np.zeros((2, len(pairs), half))

    def add(self, products: Columns) -> None:
        """Take in some heads, (n, d, d)."""
        (aq, bq), (ak, bk) = self._q, self._k
        for kind, found in enumerate(
            (products[:, aq, bk] - products[:, bq, ak], products[:, aq, ak] + products[:, bq, bk])
        ):
            size = np.abs(found)
            self._sums[kind] += (np.sign(found) * np.sqrt(size)).sum(axis=0)  # the root: no single head speaks for all
            self._squares[kind] += size.sum(axis=0)

    def explanations(self) -> Iterator[_Explanation]:
        """Each pair of hypotheses, by everything that was taken in."""
        frequencies = (np.arange(self._half) + 0.5) / self._half
        waves = np.cos(np.pi * np.arange(min(_WAVES, self._half))[:, None] * frequencies)
        sums, squares = self._sums @ waves.T, self._squares @ np.square(waves).T
        rotation, match = (np.square(sums) / np.maximum(squares, 1e-30)).sum(axis=-1)
        for (q, k), *scores in zip(self.pairs, rotation.tolist(), match.tolist(), strict=True):
            yield _Explanation(q, k, *scores)


def _decide(explanations: list[_Explanation], least_rotation: float) -> Detection:
    """The verdict: a layout, a mistake, or neither where little speaks for the best or as much for another."""
    ranked = sorted(explanations, key=lambda each: -each.score)
    best = ranked[0]
    other = next((each for each in ranked if each.verdict is not best.verdict), ranked[-1])
    matching = max(ranked, key=lambda each: each.match)
    margin = best.score - other.score
    lacks = (LEAST_SCORE - best.score, least_rotation - best.rotation, LEAST_MARGIN - margin)
    facts: dict[str, Any] = {
        "confidence": round(1 / (1 + sum(math.exp(min(lack, 100) / 2) for lack in lacks)), 4),
        "score": best.score,
        "margin": margin,
        "rotation": best.rotation,
        "evidence": _evidence(ranked),
    }
    doubt = None
    if lacks[0] > 0 or lacks[1] > 0:
        doubt = "no order of the rows stands out, as in a model that is untrained or without RoPE"
    elif best.match < LEAST_MATCH * matching.match:
        doubt = f"by their pairs {best}, but their rows match each other as if {matching}"
    elif lacks[2] > 0:
        doubt = f"'{best}' and '{other}' explain the rows nearly as well"
    if doubt is not None:
        return Detection(layout="unknown", fault=None, q="unknown", k="unknown", reason=doubt, **facts)
    facts |= {"q": best.q.name, "k": best.k.name}
    if best.verdict is not None:
        reason = "the pairs of this layout, and of no other order, agree in sign over heads and layers"
        return Detection(layout=best.verdict.value, fault=None, reason=reason, **facts)
    near = [each for each in ranked if best.score - each.score < LEAST_MARGIN and each.verdict is None]
    fault = ", or ".join(str(each) for each in near)
    return Detection(layout="unknown", fault=fault, reason="q and k are in no single layout", **facts)


def _evidence(ranked: list[_Explanation]) -> dict[str, dict[str, float]]:
    """The best six orders of q and of k, with the score of the best explanation that has them."""
    found: dict[str, dict[str, float]] = {"q": {}, "k": {}}
    for each in ranked:
        for part, order in (("q", each.q), ("k", each.k)):
            if len(found[part]) < 6:
                found[part].setdefault(order.name, round(each.score, 2))
    return found
