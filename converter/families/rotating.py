"""Which rows of which stored tensors are head rows of q or k, and their order in another RoPE layout.

A stored tensor may hold q, k and more (fused qkv), so its order is found by sending the numbers of its rows through
the family's mapping.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from converter.blocks import BlockRef
from converter.errors import UnsupportedError
from converter.families.mapping import Direct, TensorMapping
from converter.files.record import Digests, digests
from converter.layout import Rows, check_rows, head_counts, row_order
from converter.spec import ModelSpec, RopeLayout

if TYPE_CHECKING:
    from converter.families import Family
    from converter.files.checkpoint import Checkpoint


class Opened(Protocol):
    """What is asked of an opened checkpoint here, and by the detection of layouts: `SourceModel` has it."""

    @property
    def spec(self) -> ModelSpec:
        """Its facts."""

    @property
    def family(self) -> Family:
        """What its config and its names mean."""

    @property
    def checkpoint(self) -> Checkpoint:
        """Its files."""

    @property
    def dtype(self) -> str:
        """The dtype that most parameters are stored in."""

    @property
    def names(self) -> Mapping[str, str]:
        """The family's name of each tensor -> the name in the files."""


def stored_order(mapping: TensorMapping, spec: ModelSpec, to: RopeLayout, rows: int, name: str) -> Rows | None:
    """The order of the rows of a stored tensor in layout `to`; None where it holds nothing that rotates."""
    assert spec.rope is not None
    heads = head_counts(spec)
    if not any(role in heads for role in mapping.roles):
        return None
    held = stored_rows(mapping, rows)
    order = np.arange(rows)
    for role, places in held.items():
        if role in heads:
            count = heads[role]
            check_rows((len(places),), count, spec.head_dim, name=name)
            order[places] = places[row_order(count, spec.head_dim, spec.rope.rotary_dim, to)]
    return order


def stored_rows(mapping: TensorMapping, rows: int) -> dict[str, Rows]:
    """Role -> the rows of the stored tensor that it is."""
    if type(mapping) is Direct:
        return {mapping.role: np.arange(rows)}
    if getattr(mapping, "transposed", False) or len(mapping.names) != 1:
        raise UnsupportedError(
            f"'{mapping.names[0]}' does not have head rows as it is stored",
            why="rows can only be moved in a file where they are rows",
            fix="Convert the checkpoint instead, which writes every tensor anew",
        )
    import torch

    numbers = torch.arange(rows)
    parts = mapping.to_roles(numbers)
    return {role: part.reshape(-1).numpy() for role, part in zip(mapping.roles, parts, strict=True)}


def rotating_mappings(source: Opened) -> Iterator[tuple[int, TensorMapping]]:
    """Layer and mapping of every tensor that a swap touches."""
    rope = source.spec.rope
    assert rope is not None
    heads = head_counts(source.spec)
    for index in range(source.spec.num_layers):
        if rope.rotates(index):
            for mapping in source.family.mappings(source.spec, BlockRef("layer", index)):
                if any(role in heads for role in mapping.roles):
                    yield index, mapping


def stored_orders(source: Opened, to: RopeLayout) -> Iterator[tuple[str, Rows]]:
    """Family's name of each tensor that a swap to layout `to` touches, and the order of its rows."""
    for _, mapping in rotating_mappings(source):
        for bare in mapping.names:
            info = source.checkpoint.tensors[source.names[bare]]
            order = stored_order(mapping, source.spec, to, info.shape[0], info.name)
            if order is not None:
                yield bare, order


def source_digests(source: Opened) -> Digests:
    """What a record has to say in order to speak of this checkpoint's weights."""
    names = [name for _, mapping in rotating_mappings(source) for name in mapping.names] if source.spec.rope else []
    return digests(source.checkpoint, [source.names[name] for name in names])


def described(source: Opened, content: Mapping[str, Any], layout: RopeLayout | None) -> dict[str, Any]:
    """The content of a record, brought up to date with what a checkpoint's files are; its head rows are in `layout`."""
    rope = source.spec.rope
    if rope is None or layout is None:
        return {**content, "dtype": source.dtype, "spec": source.spec.to_dict()}
    spec = source.spec.replace(rope=dataclasses.replace(rope, layout=layout)).to_dict()
    return {**content, "dtype": source.dtype, "rope": spec["rope"], "spec": spec}
