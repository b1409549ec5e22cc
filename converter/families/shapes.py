"""Why tensors have other shapes than the config means: one fact that is another, or linears that lie transposed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from converter.blocks import EMBEDDINGS, HEAD, BlockRef, block_shapes
from converter.families import Family
from converter.spec import ModelSpec

Shapes = Mapping[str, tuple[int, ...]]

#: The facts that decide shapes.
_FACTS = ("head_dim", "num_kv_heads", "num_heads", "intermediate_size", "vocab_size", "context", "hidden_size")


def why_other_shapes(family: Family, spec: ModelSpec, config: Mapping[str, Any], found: Shapes) -> str | None:
    """What would make all shapes right that were found, by bare name; None where it is no single thing."""
    wanted = _shapes(family, spec)
    others = {name: shape for name, shape in wanted.items() if name in found and found[name] != shape}
    if all(len(shape) == 2 and found[name] == shape[::-1] for name, shape in others.items()):
        lie = ("(in, out)", "(out, in)") if family.transposed else ("(out, in)", "(in, out)")
        return f"the linears lie transposed: those of a {family.name} are {lie[0]}, and here they are {lie[1]}"
    for fact, value, other in _candidates(spec, {size for name in others for size in found[name]}):
        if all(found.get(name, shape) == shape for name, shape in _shapes(family, other).items()):
            key = family.fields.get(fact, (fact, None))[0]
            said = "the config says" if config.get(key) is not None else "the config has none and means"
            return f"every tensor fits where {key} is {value}, and {said} {getattr(spec, fact)}"
    return None


def _candidates(spec: ModelSpec, sizes: set[int]) -> Iterator[tuple[str, int, ModelSpec]]:
    """Specs with one fact changed to what could give some tensor one of these sizes."""
    parts = (1, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    values = sorted({size // part for size in sizes for part in parts} | {size - 2 for size in sizes})  # 2: OPT's table
    for fact in _FACTS:
        for value in (value for value in values if value > 0):
            yield fact, value, spec.replace(**{fact: value})
            if fact == "hidden_size" and value % spec.num_heads == 0:  # the heads share it
                yield fact, value, spec.replace(hidden_size=value, head_dim=value // spec.num_heads)
            if fact == "num_heads" and spec.num_kv_heads == spec.num_heads:
                yield fact, value, spec.replace(num_heads=value, num_kv_heads=value)


def _shapes(family: Family, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The tensors of the embeddings, of one layer and of the head, and the shapes that a spec gives them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for block in (EMBEDDINGS, BlockRef("layer", 0), HEAD):
        roles = block_shapes(spec, block)
        for mapping in family.mappings(spec, block):
            shapes.update(zip(mapping.names, mapping.name_shapes(roles), strict=True))
    return shapes
