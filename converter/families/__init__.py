"""Families: one small file for each checkpoint format, found by decorator or entry point.

A family says how its `config.json` becomes a `ModelSpec` and which tensor is which role, mostly in data: `fields`,
`facts` and `modules`. To add one, write a file here that defines a class under `@family`, or publish it from another
package under the entry point group `converter.families` (docs/plug-ins.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from converter.blocks import LINEARS, BlockRef, block_shapes
from converter.errors import CheckpointError, UnsupportedError, did_you_mean, near_spelling
from converter.families.config import ConfigReader
from converter.families.fields import ACTIVATIONS, Fields, read_facts
from converter.families.holding import ANY_DECODER, refuse_others
from converter.families.mapping import Direct, Drop, FusedLayout, FusedQKV, Shared, TensorMapping, Transposed
from converter.families.unknown import what_it_is
from converter.registry import Registry
from converter.spec import Activation, ModelSpec, Norm, RopeLayout

if TYPE_CHECKING:
    from torch import Tensor


class Family(ABC):
    """One checkpoint format. A source family reads its config; a target family also writes one."""

    #: The name in recipes, and `model_type` in the config.
    name: ClassVar[str]
    #: What stands before every tensor name but those in `unprefixed`. Files without it are read too.
    prefix: ClassVar[str] = ""
    unprefixed: ClassVar[tuple[str, ...]] = ("lm_head.weight",)
    #: Fact of the spec -> the config's field and its default (`fields.Fields`).
    fields: ClassVar[Fields] = {}
    #: Facts of the spec that are the same for every checkpoint of the family.
    facts: ClassVar[Mapping[str, Any]] = {}
    #: Other names of config fields: the `attribute_map` of transformers' config class.
    aliases: ClassVar[Mapping[str, str]] = {}
    #: Config fields that do not change the function, with the reason.
    ignored: ClassVar[Mapping[str, str]] = {}
    activations: ClassVar[Mapping[str, Activation]] = ACTIVATIONS
    #: How rotary rows are paired, where the model has RoPE.
    layout: ClassVar[RopeLayout] = RopeLayout.HALF_SPLIT
    #: Part of a block, as "q" or "final_norm" -> the module that holds it, without the prefix; `{}` is the layer's
    #: number. Two norms that name one module share it, and "qkv" holds all three.
    modules: ClassVar[Mapping[str, str]] = {}
    #: How "qkv" holds them.
    fused: ClassVar[FusedLayout] = FusedLayout.STACKED
    #: Whether linears lie as (in, out).
    transposed: ClassVar[bool] = False
    #: Tensors that carry nothing, with the reason.
    drops: ClassVar[tuple[Drop, ...]] = ()
    #: Whether a config without `tie_word_embeddings` means that the head is the embedding.
    ties_by_default: ClassVar[bool] = False
    #: bos, eos and pad where the config does not say them: the defaults of transformers' config class.
    default_token_ids: ClassVar[Mapping[str, int | None]] = {}
    #: The recipe that `convert` takes when none is named, where the format decides it and not the facts.
    default_recipe: ClassVar[str | None] = None
    #: transformers' class that runs this family. A family without one is run by that of its stand-in.
    model_class: ClassVar[str | None] = None
    #: The target family whose class runs this one, its tensors written under that family's names.
    stand_in: ClassVar[str | None] = None

    @property
    def embedding(self) -> str:
        """Name, without the prefix, of the embedding."""
        return f"{self.modules['embed']}.weight"

    @property
    def head(self) -> str:
        """Name, without the prefix, of the output head."""
        return f"{self.modules.get('head', 'lm_head')}.weight"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a config is of this family."""
        return config.get("model_type") == self.name

    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        """The facts that a config states; whether the head is tied was decided from the tensors."""
        config.ignore(self.ignored)
        return read_facts(config, self.fields, self.activations, **{**self.facts, "tied_head": tied})

    def mappings(self, spec: ModelSpec, block: BlockRef) -> list[TensorMapping]:
        """Which tensors, by names without the prefix, hold the roles of a block."""
        found: dict[str, TensorMapping] = {}
        for role in block_shapes(spec, block):
            if role not in found:
                mapping = self.mapping(spec, block, role)
                found |= dict.fromkeys(mapping.roles, mapping)
        return list(dict.fromkeys(found.values()))

    def mapping(self, spec: ModelSpec, block: BlockRef, role: str) -> TensorMapping:
        """The tensor that holds a role."""
        part, kind = role.split(".")
        linear = part in LINEARS and kind == "weight"
        if part in ("q", "k", "v") and "qkv" in self.modules:
            name = f"{self.modules['qkv']}.{kind}".format(block.index)
            return FusedQKV(name, f"q.{kind}", self.fused, spec.head_dim, self.transposed and linear)
        if role == "head.weight":
            return Direct(self.embedding if spec.tied_head else self.head, role)
        module = self.modules[part]
        name = f"{module}.{kind}".format(block.index)
        sharing = [other for other, own in self.modules.items() if own == module and other != part]
        if sharing:
            return Shared(name, role, f"{sharing[0]}.{kind}")
        return (Transposed if self.transposed and linear else Direct)(name, role)

    def recipe_for(self, spec: ModelSpec) -> str | None:
        """The recipe that `convert` takes for a checkpoint of these facts when none is named."""
        if self.default_recipe is not None or spec.norm is not Norm.LAYERNORM:
            return self.default_recipe
        if spec.parallel_residual or not spec.absolute_positions:
            return None
        return "gpt2-to-llama" if spec.pre_norm else "postln-to-llama"

    def rope_config(self, spec: ModelSpec) -> dict[str, Any]:
        """The fields of a config that state RoPE; none where the family has none for it."""
        return {}

    def remarks(self, config: Mapping[str, Any], tokens: int | None) -> list[str]:
        """What a user should know about a checkpoint of this config, whose tokenizer has so many tokens."""
        return []

    def bare_name(self, name: str) -> str:
        """A tensor's name without the family's prefix."""
        return name.removeprefix(self.prefix)

    def full_name(self, bare: str) -> str:
        """A tensor's name as the family's files have it."""
        return bare if bare in self.unprefixed else self.prefix + bare


class TargetFamily(Family):
    """A family that can be written."""

    #: What messages call it.
    label: ClassVar[str | None] = None
    #: Facts that a model must have to be written so.
    holds: ClassVar[Mapping[str, object]] = ANY_DECODER
    #: Linears that have biases together or not at all.
    biased: ClassVar[tuple[frozenset[str], ...]] = ()
    #: Whether all of them always have biases.
    always_biased: ClassVar[bool] = False
    #: Whether its files are others than config.json and safetensors: `write_container` makes them.
    own_container: ClassVar[bool] = False

    def accept(self, spec: ModelSpec) -> ModelSpec:
        """The spec as this family holds it; roles that it adds are filled with zeros.

        Raises UnsupportedError where the family cannot hold the architecture.
        """
        refuse_others(spec, self.label or self.name, self.holds, frozenset().union(*self.biased))
        groups = [group for group in self.biased if self.always_biased or spec.biases & group]
        return spec.replace(biases=frozenset().union(*groups))

    @abstractmethod
    def write_config(self, spec: ModelSpec) -> dict[str, Any]:
        """The architecture's part of `config.json`; token ids and dtype are added by the caller."""

    def stated(self, spec: ModelSpec) -> dict[str, Any]:
        """The config's fields of `fields`."""
        return {key: getattr(spec, fact) for fact, (key, _) in self.fields.items()}

    def write_container(self, written: Path, folder: Path, spec: ModelSpec) -> None:
        """Write the files of a family with an `own_container` into `folder`, in the place of those of an earlier try.

        `written` holds config.json and safetensors, and stays as it is.
        """

    def write_block(self, spec: ModelSpec, block: BlockRef, roles: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a block by their full names, zeros for the roles that only this family has.

        `spec` is one that `accept` gave. Works on meta tensors.
        """
        shapes = block_shapes(spec, block)
        some = next(iter(roles.values()))
        filled = {role: roles[role] if role in roles else some.new_zeros(shape) for role, shape in shapes.items()}
        named: dict[str, Tensor] = {}
        for mapping in self.mappings(spec, block):
            if block.kind == "head" and spec.tied_head and mapping.names == (self.embedding,):
                continue
            tensors = mapping.to_names(*(filled[role] for role in mapping.roles))
            named.update({self.full_name(name): t for name, t in zip(mapping.names, tensors, strict=True)})
        return named


F = TypeVar("F", bound=type[Family])
_REGISTRY: Registry[Family] = Registry(__name__)


def family(cls: F) -> F:
    """Register a family under its name."""
    _REGISTRY.add(cls.name, cls())
    return cls


def families() -> Mapping[str, Family]:
    """Every family, by name."""
    return _REGISTRY.load()


def get_family(name: str) -> Family:
    """The family of this name; an error that names the nearest one otherwise."""
    if name not in families():
        raise UnsupportedError(f"there is no family '{name}'", fix=did_you_mean(name, families()))
    return families()[name]


def find_family(config: Mapping[str, Any], where: str) -> Family:
    """The family that a config belongs to. An unknown one is refused, never guessed.

    A config without a model_type belongs to the family whose class its `architectures` names.
    """
    for known in families().values():
        if known.recognises(config):
            return known
    kind = config.get("model_type")
    if kind is None:
        named = config.get("architectures")
        for known in families().values():
            if known.model_class is not None and named == [known.model_class]:
                return known
        raise CheckpointError(
            "the config has no model_type",
            where=where,
            why=f"its architectures are {named}, which is no class that is known here" if named else _NO_GUESS,
            fix=f"Add the model_type that the weights are of. Known: {', '.join(families())}",
        )
    what = what_it_is(str(kind), config)
    near = None if what is not None else near_spelling(str(kind), families())
    raise UnsupportedError(
        f"model_type '{kind}' is not a family that we know",
        where=where,
        why=f"it is {what}" if what is not None else _NO_GUESS,
        fix=near or f"Known: {', '.join(families())}",
    )


_NO_GUESS = "tensor names and shapes alone do not say how a model computes, so nothing is guessed"
