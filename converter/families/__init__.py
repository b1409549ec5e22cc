"""Families: one small file for each checkpoint format, found by decorator or entry point.

A family says how its `config.json` becomes a `ModelSpec` and which tensor is which role. To add one,
write a file here that defines a class under `@family`, or publish it from another package under the
entry point group `converter.families`.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from converter.blocks import BlockRef, block_shapes
from converter.errors import CheckpointError, UnsupportedError, did_you_mean
from converter.families.config import ConfigReader
from converter.families.mapping import Drop, TensorMapping
from converter.spec import ModelSpec, Norm

if TYPE_CHECKING:
    from torch import Tensor


class Family(ABC):
    """One checkpoint format. A source family reads its config; a target family also writes one."""

    #: The name in recipes, and `model_type` in the config.
    name: ClassVar[str]
    #: What stands before every tensor name but those in `unprefixed`. Files without it are read too.
    prefix: ClassVar[str]
    unprefixed: ClassVar[tuple[str, ...]] = ("lm_head.weight",)
    #: Names, without the prefix, of the embedding and of the output head.
    embedding: ClassVar[str]
    head: ClassVar[str] = "lm_head.weight"
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

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a config is of this family."""
        return config.get("model_type") == self.name

    @abstractmethod
    def read_spec(self, config: ConfigReader, tied: bool) -> ModelSpec:
        """The facts that a config states; whether the head is tied was decided from the tensors."""

    @abstractmethod
    def mappings(self, spec: ModelSpec, block: BlockRef) -> list[TensorMapping]:
        """Which tensors, by names without the prefix, hold the roles of a block."""

    def recipe_for(self, spec: ModelSpec) -> str | None:
        """The recipe that `convert` takes for a checkpoint of these facts when none is named."""
        if self.default_recipe is not None or spec.norm is not Norm.LAYERNORM:
            return self.default_recipe
        if spec.parallel_residual or not spec.absolute_positions:
            return None
        return "gpt2-to-llama" if spec.pre_norm else "postln-to-llama"

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

    @abstractmethod
    def accept(self, spec: ModelSpec) -> ModelSpec:
        """The spec as this family holds it; roles that it adds are filled with zeros.

        Raises UnsupportedError where the family cannot hold the architecture.
        """

    @abstractmethod
    def write_config(self, spec: ModelSpec) -> dict[str, Any]:
        """The architecture's part of `config.json`; token ids and dtype are added by the caller."""

    def finish(self, folder: Path, spec: ModelSpec) -> None:
        """Turn a written folder, config.json and safetensors, into the family's own container."""

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
_REGISTRY: dict[str, Family] = {}


def family(cls: F) -> F:
    """Register a family under its name."""
    if cls.name in _REGISTRY:
        raise ValueError(f"two families are called '{cls.name}'")
    _REGISTRY[cls.name] = cls()
    return cls


@cache
def _load_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    for entry in entry_points(group="converter.families"):
        entry.load()


def families() -> Mapping[str, Family]:
    """Every family, by name."""
    _load_all()
    return _REGISTRY


def get_family(name: str) -> Family:
    """The family of this name; an error that names the nearest one otherwise."""
    if name not in families():
        raise UnsupportedError(f"there is no family '{name}'", fix=did_you_mean(name, families()))
    return families()[name]


def find_family(config: Mapping[str, Any], where: str) -> Family:
    """The family that a config belongs to. An unknown one is refused, never guessed."""
    for known in families().values():
        if known.recognises(config):
            return known
    kind = config.get("model_type")
    if kind is None:
        raise CheckpointError("the config has no model_type", where=where, fix=f"Known: {', '.join(families())}")
    raise UnsupportedError(
        f"model_type '{kind}' is not a family that we know",
        where=where,
        why="tensor names and shapes alone do not say how a model computes, so nothing is guessed",
        fix=did_you_mean(str(kind), families()),
    )


def only_biases(spec: ModelSpec, allowed: Iterable[str]) -> None:
    """Refuse a spec with other biases than these; for target families."""
    extra = sorted(spec.biases - set(allowed))
    if extra:
        raise UnsupportedError(
            f"the target has no place for the biases of {', '.join(extra)}",
            fix="Add an op that takes them away to the recipe, or choose a target that holds them",
        )
