"""What healing changes about positions, a longer context and another theta, found sound before the first step.

The config of the result is made first, and read back by its family: what it says must be what is trained.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from converter.errors import ConverterError, UnsupportedError
from converter.families import Family
from converter.families.config import ConfigReader
from converter.healing.schedules import rotary_embeddings
from converter.spec import ModelSpec, RopeSpec

#: Positions at which two rotations are compared, the last included.
_COMPARED = 64


def healed_config(
    family: Family, spec: ModelSpec, config: Mapping[str, Any], theta: float | None, context: int
) -> dict[str, Any]:
    """What config.json says of a model after healing at `context` tokens, with rotary base `theta` (None: no RoPE).

    Raises ConverterError for what its family cannot state, and for a rotation that would not be the trained one.
    """
    longer = context > spec.context
    if longer and spec.absolute_positions:
        raise UnsupportedError(
            f"a {family.name} has a vector for each of {spec.context} positions, and none for more",
            where="heal.context",
            fix=f"Choose at most {spec.context}",
        )
    wanted = spec.replace(context=max(context, spec.context))
    if spec.rope is not None and theta is not None:
        _refuse_two_knobs(spec.rope, theta)
        wanted = wanted.replace(rope=dataclasses.replace(spec.rope, theta=theta))
    config = dict(config)
    if wanted.rope is not None:
        config |= family.rope_config(wanted)
    trained = dict(config)
    if longer:
        config[family.fields["context"][0]] = wanted.context
    reader = ConfigReader(config, "the config that would be written")
    found = family.read_spec(reader, spec.tied_head)
    reader.read("tie_word_embeddings", bool, spec.tied_head)  # what the tensors said at opening
    reader.finish()
    for fact in ("context", "rope"):
        if _plain(getattr(found, fact)) != _plain(getattr(wanted, fact)):
            raise UnsupportedError(
                f"the config of a {family.name} cannot say what would be trained: its {fact} is read as "
                f"{getattr(found, fact)}, and would be {getattr(wanted, fact)}",
                where="heal.context" if fact == "context" else "heal.rope_theta",
                fix="Leave the setting out",
            )
    if longer:
        _refuse_another_rotation(family, spec, trained, config, context)
    return config


def _refuse_two_knobs(rope: RopeSpec, theta: float) -> None:
    """A scaling was made for one theta: what the two do together nobody has trained."""
    if theta != rope.theta and rope.scaling:
        raise UnsupportedError(
            f"the model's RoPE is scaled already ({rope.scaling.get('rope_type')})",
            where="heal.rope_theta",
            why=f"Its scaling was made for theta {rope.theta:g}, and would stretch positions a second time",
            fix="Leave rope_theta out, and choose heal.context alone",
        )


def _plain(fact: Any) -> Any:
    """A fact to be compared; the layout is a matter of the rows, and no config states it."""
    if isinstance(fact, RopeSpec):
        return fact.theta, fact.rotary_dim, dict(fact.scaling or {}), fact.skipped_layers
    return fact


def _refuse_another_rotation(
    family: Family, spec: ModelSpec, trained: Mapping[str, Any], written: Mapping[str, Any], context: int
) -> None:
    """Raise ConverterError where a longer context in the config changes how transformers rotates.

    Dynamic NTK does so, longrope without `factor`, and YaRN where a factor is missing.
    """
    positions = torch.linspace(0, context - 1, min(context, _COMPARED)).round().long()[None]
    angles = [[module(torch.zeros(1), positions) for module in _rotary(family, each)] for each in (trained, written)]
    for (cos, sin), (other_cos, other_sin) in zip(*angles, strict=True):
        if not (torch.equal(cos, other_cos) and torch.equal(sin, other_sin)):
            kind = (spec.rope.scaling or {}).get("rope_type") if spec.rope else None
            raise ConverterError(
                f"a context of {context} in the config changes the rotation itself, of rope_type {kind}",
                where="heal.context",
                why=f"Its frequencies or their scale follow from the length, so a model trained with those of "
                f"{spec.context} would be run with others",
                fix=f"Choose at most {spec.context}, or write `factor` and `attention_factor` into the config's "
                "rope_parameters where its rope_type knows them",
            )


def _rotary(family: Family, config: Mapping[str, Any]) -> list[nn.Module]:
    """The rotary embeddings of transformers' class under a config, without its weights."""
    import transformers

    assert family.model_class is not None
    model_class: Any = getattr(transformers, family.model_class)
    parsed = model_class.config_class.from_dict(copy.deepcopy(dict(config)))  # it changes what it is given
    with torch.device("meta"):
        skeleton = model_class(parsed)
    return [type(module)(config=parsed) for module in rotary_embeddings(skeleton)]
