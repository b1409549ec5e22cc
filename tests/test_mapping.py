"""Fused q, k and v: layouts of the same shape, told apart by the family's declaration alone (case S1)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from converter.families.mapping import Direct, FusedLayout, FusedQKV, Transposed

HEADS, D, HIDDEN = 6, 4, 24

#: Rows from top to bottom, as (part, head).
ORDERS = {
    FusedLayout.STACKED: [(part, head) for part in "qkv" for head in range(HEADS)],
    FusedLayout.PER_HEAD: [(part, head) for head in range(HEADS) for part in "qkv"],
}


def logical(kind: str) -> dict[str, Tensor]:
    """Random q, k and v, rows head by head."""
    generator = torch.Generator().manual_seed(0)
    shape = (HEADS * D, HIDDEN) if kind == "weight" else (HEADS * D,)
    return {part: torch.randn(shape, generator=generator) for part in "qkv"}


def fuse(parts: dict[str, Tensor], layout: FusedLayout) -> Tensor:
    """The fused tensor, put together head by head."""
    return torch.cat([parts[part][head * D : (head + 1) * D] for part, head in ORDERS[layout]])


@pytest.mark.parametrize(("kind", "transposed"), [("weight", False), ("weight", True), ("bias", False)])
@pytest.mark.parametrize("layout", FusedLayout)
def test_every_fused_layout_holds_the_same_q_k_v(layout: FusedLayout, kind: str, transposed: bool) -> None:
    parts = logical(kind)
    fused = fuse(parts, layout).T if transposed else fuse(parts, layout)
    mapping = FusedQKV("qkv", f"q.{kind}", layout, D, transposed)
    assert mapping.roles == (f"q.{kind}", f"k.{kind}", f"v.{kind}")
    for found, wanted in zip(mapping.to_roles(fused), parts.values(), strict=True):
        assert torch.equal(found, wanted)
    (back,) = mapping.to_names(*parts.values())
    assert torch.equal(back, fused)
    shapes = {f"{part}.{kind}": tuple(tensor.shape) for part, tensor in parts.items()}
    assert mapping.name_shapes(shapes) == (tuple(fused.shape),)


def test_a_wrong_layout_has_the_same_shapes_and_other_values() -> None:
    parts = logical("weight")
    for right, wrong in ((FusedLayout.STACKED, FusedLayout.PER_HEAD), (FusedLayout.PER_HEAD, FusedLayout.STACKED)):
        found = FusedQKV("qkv", "q.weight", wrong, D).to_roles(fuse(parts, right))
        assert [x.shape for x in found] == [x.shape for x in parts.values()]
        assert not any(torch.equal(x, y) for x, y in zip(found, parts.values(), strict=True))


def test_direct_and_transposed_go_both_ways() -> None:
    tensor = torch.randn(3, 5)
    for mapping, wanted in ((Direct("a", "b"), tensor), (Transposed("a", "b"), tensor.T)):
        assert torch.equal(mapping.to_roles(tensor)[0], wanted)
        assert torch.equal(mapping.to_names(wanted)[0], tensor)
        assert mapping.name_shapes({"b": tuple(wanted.shape)}) == ((3, 5),)
