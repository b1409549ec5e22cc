"""What the order of the rows of q or k may be: either layout, or what a permutation done wrongly makes of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from converter.layout import Rows, head_order
from converter.spec import ModelSpec, RopeLayout


@dataclass(frozen=True)
class Order:
    """A hypothesis on the rows of q or of k: component p of the half-split order lies at `rows[p]` of its head."""

    name: str
    rows: tuple[int, ...]
    #: The layout; None where it is what a mistake makes of one.
    layout: RopeLayout | None = None
    #: Rows of a unit that the mistake took for a head, where that is wider than a head.
    across: tuple[int, RopeLayout] | None = None


def query_key_hypotheses(spec: ModelSpec) -> tuple[list[Order], list[Order]]:
    """Those for q and those for k."""
    assert spec.rope is not None
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    q = hypotheses(spec.head_dim, spec.rope.rotary_dim, heads, {"k": kv_heads})
    k = hypotheses(spec.head_dim, spec.rope.rotary_dim, kv_heads, {"q": heads, "a group": heads // kv_heads})
    return q, k


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


def undone(across: tuple[int, RopeLayout] | None, rows: int) -> Rows:
    """Where each of so many rows was before a permutation over units that are wider than a head, if there was one."""
    if across is None:
        return np.arange(rows)
    unit, to = across
    places = np.argsort(head_order(unit, unit, to))
    order: Rows = (np.arange(0, rows, unit)[:, None] + places).reshape(-1)
    return order
