"""Fused q, k and v: five layouts of the same shape, told apart by the family's declaration alone (case S1)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from converter.families.mapping import Direct, FusedLayout, FusedQKV, Transposed

HEADS, KV_HEADS, D, HIDDEN = 8, 2, 16, 24

#: Rows from top to bottom, as (part, head), for h query heads on k key-value heads.
ORDERS = {
    FusedLayout.STACKED: lambda h, k: [*heads("q", h), *heads("k", k), *heads("v", k)],
    FusedLayout.STACKED_KVQ: lambda h, k: [*heads("k", k), *heads("v", k), *heads("q", h)],
    FusedLayout.PER_HEAD: lambda h, k: [(part, head) for head in range(h) for part in "qkv"],
    FusedLayout.PER_GROUP: lambda h, k: [
        row for g in range(k) for row in (*heads("q", h // k, g * (h // k)), ("k", g), ("v", g))
    ],
    # Blocks of two heads: their q, then their v, then their k.
    FusedLayout.CODEGEN: lambda h, k: [
        row for b in range(4) for part in "qvk" for row in heads(part, h // 4, b * h // 4)
    ],
}
GROUPED = (FusedLayout.STACKED, FusedLayout.STACKED_KVQ, FusedLayout.PER_GROUP)
CASES = [(layout, HEADS) for layout in FusedLayout] + [(layout, KV_HEADS) for layout in GROUPED]


def heads(part: str, count: int, first: int = 0) -> list[tuple[str, int]]:
    return [(part, first + head) for head in range(count)]


def logical(kv_heads: int, kind: str) -> dict[str, Tensor]:
    """Random q, k and v, rows head by head."""
    generator = torch.Generator().manual_seed(0)
    shapes = {part: (count * D, HIDDEN) for part, count in (("q", HEADS), ("k", kv_heads), ("v", kv_heads))}
    return {
        part: torch.randn(shape if kind == "weight" else shape[:1], generator=generator)
        for part, shape in shapes.items()
    }


def fuse(parts: dict[str, Tensor], layout: FusedLayout, kv_heads: int) -> Tensor:
    """The fused tensor, put together head by head."""
    return torch.cat([parts[part][head * D : (head + 1) * D] for part, head in ORDERS[layout](HEADS, kv_heads)])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize(("layout", "kv_heads"), CASES)
def test_every_fused_layout_holds_the_same_q_k_v(
    layout: FusedLayout, kv_heads: int, kind: str, transposed: bool
) -> None:
    parts = logical(kv_heads, kind)
    fused = fuse(parts, layout, kv_heads)
    if transposed and kind == "weight":
        fused = fused.T
    mapping = FusedQKV("qkv", kind, layout, HEADS, kv_heads, D, transposed)
    assert mapping.roles == (f"q.{kind}", f"k.{kind}", f"v.{kind}")
    for found, wanted in zip(mapping.to_roles(fused), parts.values(), strict=True):
        assert torch.equal(found, wanted)
    (back,) = mapping.to_names(*parts.values())
    assert torch.equal(back, fused)
    shapes = {f"{part}.{kind}": tuple(tensor.shape) for part, tensor in parts.items()}
    assert mapping.name_shapes(shapes) == (tuple(fused.shape),)


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS])
def test_a_wrong_layout_has_the_same_shapes_and_other_values(kv_heads: int) -> None:
    parts = logical(kv_heads, "weight")
    layouts = [layout for layout, count in CASES if count == kv_heads]
    for right in layouts:
        for wrong in set(layouts) - {right}:
            found = FusedQKV("qkv", "weight", wrong, HEADS, kv_heads, D).to_roles(fuse(parts, right, kv_heads))
            assert [x.shape for x in found] == [x.shape for x in parts.values()]
            if {right, wrong} != {FusedLayout.PER_HEAD, FusedLayout.PER_GROUP}:  # groups of one are heads
                assert not all(torch.equal(x, y) for x, y in zip(found, parts.values(), strict=True))


@pytest.mark.parametrize(
    ("layout", "num_heads", "kv_heads", "words"),
    [
        (FusedLayout.PER_HEAD, 8, 2, "as many key-value heads as query heads"),
        (FusedLayout.CODEGEN, 8, 2, "as many key-value heads as query heads"),
        (FusedLayout.CODEGEN, 6, 6, "a multiple of 4 heads"),
        (FusedLayout.STACKED, 8, 3, "a multiple of key-value heads"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_when_declared(
    layout: FusedLayout, num_heads: int, kv_heads: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        FusedQKV("qkv", "weight", layout, num_heads, kv_heads, D)


def test_direct_and_transposed_go_both_ways() -> None:
    tensor = torch.randn(3, 5)
    for mapping, wanted in ((Direct("a", "b"), tensor), (Transposed("a", "b"), tensor.T)):
        assert torch.equal(mapping.to_roles(tensor)[0], wanted)
        assert torch.equal(mapping.to_names(wanted)[0], tensor)
        assert mapping.name_shapes({"b": tuple(wanted.shape)}) == ((3, 5),)
