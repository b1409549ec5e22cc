"""How a config states RoPE: in the old schema (`rope_theta`, `rope_scaling`) or in the new one (`rope_parameters`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converter.errors import CheckpointError, UnsupportedError, did_you_mean, near_spelling
from converter.spec import RopeLayout, RopeSpec

if TYPE_CHECKING:
    from converter.families.config import ConfigReader

#: Divisors of frequencies are below this.
_HUGE = 1 << 62
_LISTS = ("short_factor", "long_factor")
#: Facts that may be 0. transformers takes its default for a beta of 0.
_FROM_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")

#: Kind of RoPE -> the facts that it needs, and those that it may have: `ROPE_INIT_FUNCTIONS` of transformers.
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "yarn": (("factor", "original_max_position_embeddings"), ("attention_factor", *_FROM_ZERO, "truncate")),
    "longrope": ((*_LISTS, "original_max_position_embeddings"), ("factor", "attention_factor")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "proportional": ((), ("factor",)),
}

#: Facts and kinds under other names. The second column is what transformers reads.
_OTHER_NAMES = {"attn_factor": "attention_factor"}
_OTHER_KINDS = {"su": "longrope"}

_OLD_AND_NEW = "old readers would take the one and new readers the other"


def read_rope(
    config: ConfigReader,
    head_dim: int,
    layout: RopeLayout,
    *,
    theta_names: tuple[str, ...] = ("rope_theta",),
    partial_names: tuple[str, ...] = ("partial_rotary_factor",),
    default_partial: float = 1.0,
) -> RopeSpec:
    """The rotary facts of a config, from either schema.

    `theta_names` and `partial_names` are the config's own fields for theta and for the rotary part of a head; where
    several are stated they must agree. Without any the default is theta 10000.

    Raises CheckpointError where the schemas disagree, where a fact is missing or no number, and where
    `rope_parameters` has no theta: readers would silently assume 10000.
    """
    theta, partial = _one_of(config, theta_names), _one_of(config, partial_names)
    old, new = (_facts(config, key) for key in ("rope_scaling", "rope_parameters"))
    for schema, facts in (("rope_scaling", old), ("rope_parameters", new)):
        theta = _agreed(config, facts, schema, "rope_theta", theta)
        partial = _agreed(config, facts, schema, "partial_rotary_factor", partial)
    if new is not None and theta is None:
        raise CheckpointError(
            "rope_parameters has no rope_theta (None), and readers would assume 10000.0",
            where=config.where,
            why="a theta that is wrong is invisible in short texts",
            fix="Write the theta that the model was trained with into rope_parameters",
        )
    width = (default_partial if partial is None else partial[1]) * head_dim
    if partial is not None and (not 2 <= int(width) <= head_dim or int(width) % 2):
        raise CheckpointError(
            f"config field '{partial[0]}' gives a rotary width of {width:g} of a head of {head_dim}",
            where=config.where,
            why="rotary rows come in pairs, at least one and at most as many as the head has",
            fix="Write the part of a head that the model rotates, at most 1",
        )
    if int(width) < head_dim and "proportional" in (facts.get("rope_type") for facts in (old, new) if facts):
        raise UnsupportedError(
            f"RoPE of rope_type 'proportional' rotates {width:g} of {head_dim} rows of a head",
            where=config.where,
            why="that kind pairs rows of the whole head and leaves the slow pairs standing, which no family here reads",
            fix="No recipe converts such a model",
        )
    read = [
        None if facts is None else _scaling(config, facts, schema, int(width))
        for schema, facts in (("rope_scaling", old), ("rope_parameters", new))
    ]
    if old is not None and new is not None and read[0] != read[1]:
        raise CheckpointError(
            f"rope_scaling is {read[0]} and rope_parameters is {read[1]}",
            where=config.where,
            why=_OLD_AND_NEW,
            fix="Keep the scaling that the model was trained with in both",
        )
    return RopeSpec(10000.0 if theta is None else theta[1], int(width), layout, read[1] or read[0])


def rope_fields(rope: RopeSpec) -> dict[str, Any]:
    """RoPE in both schemas, as configs are written: transformers 5 reads the last field, older readers the others."""
    scaling = dict(rope.scaling or {})
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": rope.theta},
    }


def _one_of(config: ConfigReader, names: tuple[str, ...]) -> tuple[str, float] | None:
    """The field among `names` that the config states, with its value."""
    stated = [(name, value) for name in names if (value := config.optional(name, float)) is not None]
    for name, value in stated[1:]:
        if value != stated[0][1]:
            raise CheckpointError(
                f"config field '{stated[0][0]}' is {stated[0][1]} and '{name}' is {value}",
                where=config.where,
                why="they are two names of one fact",
                fix="Keep the one that the model was trained with",
            )
    return stated[0] if stated else None


def _facts(config: ConfigReader, key: str) -> dict[str, Any] | None:
    """A rope dict under the names that transformers reads; a null is an absent fact."""
    value = config.optional(key, dict)
    if value is None:
        return None
    nested = [name for name, each in value.items() if isinstance(each, dict)]
    if nested:
        raise UnsupportedError(
            f"{key} states RoPE for each kind of layer by itself ({', '.join(nested)})",
            where=config.where,
            why="every layer of the families here is rotated alike",
            fix="No recipe converts such a model",
        )
    facts = dict(value)
    if "type" in facts:  # the spelling of transformers before 4.43
        facts.setdefault("rope_type", facts["type"])
        del facts["type"]
    for other, name in _OTHER_NAMES.items():
        if facts.get(other) is not None and facts.get(name) is not None and facts[other] != facts[name]:
            raise CheckpointError(
                f"{key}: {other} is {facts[other]} and {name} is {facts[name]}",
                where=config.where,
                why="they are two names of one fact",
                fix="Keep the one that the model was trained with",
            )
        stated = facts.pop(other, None)
        if stated is not None:
            facts[name] = stated
            config.note(f"{key}: '{other}' is read as {name}, which is the name that transformers knows")
    return {name: each for name, each in facts.items() if each is not None}


def _agreed(
    config: ConfigReader, facts: dict[str, Any] | None, schema: str, name: str, outer: tuple[str, float] | None
) -> tuple[str, float] | None:
    """A fact that stands in a rope dict, or beside it, or in both with one value; it is taken out of the dict."""
    if facts is None or name not in facts:
        return outer
    inner = (f"{schema}.{name}", config.checked(f"{schema}.{name}", facts.pop(name), float))
    if outer is not None and outer[1] != inner[1]:
        raise CheckpointError(
            f"{outer[0]} is {outer[1]} and {inner[0]} is {inner[1]}",
            where=config.where,
            why=_OLD_AND_NEW,
            fix="Keep the one that the model was trained with in both",
        )
    return inner


def _scaling(config: ConfigReader, facts: dict[str, Any], schema: str, width: int) -> dict[str, Any] | None:
    """A scaled kind of RoPE with its facts, checked; None for the plain one."""
    kind = facts.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in _KINDS:
        other = _OTHER_KINDS.get(str(kind))
        raise UnsupportedError(
            f"{schema} has rope_type '{kind}', which no conversion knows",
            where=config.where,
            why=f"it is an old name of {other}" if other else f"the kinds are {', '.join(_KINDS)}",
            fix=f"Write '{other}'" if other else near_spelling(str(kind), _KINDS) or "Write the kind that is meant",
        )
    needed, optional = _KINDS[kind]
    extra = [name for name in facts if name not in (*needed, *optional, "rope_type")]
    if kind == "default" and extra:
        raise CheckpointError(
            f"{schema} scales RoPE ({', '.join(extra)}) and says no rope_type that does so",
            where=config.where,
            why="readers would take the plain RoPE and ignore the rest",
            fix="Write the rope_type that the model was trained with",
        )
    missing = [name for name in needed if name not in facts]
    if missing:
        raise CheckpointError(
            f"{schema} of rope_type '{kind}' has no '{missing[0]}'",
            where=config.where,
            why=f"that kind of RoPE needs {', '.join(needed)}, and none of them may be null",
            fix=did_you_mean(missing[0], extra) if extra else "Write the one that the model was trained with",
        )
    for name in extra:
        config.note(
            f"{schema}.{name} = {facts[name]!r} is left out: transformers' RoPE of type '{kind}' reads no such fact"
        )
    kept = {name: value for name, value in facts.items() if name not in extra}
    for name in kept.keys() - {"rope_type"}:
        _check_fact(config, f"{schema}.{name}", name, kept[name], width)
    _check_together(config, schema, kind, kept)
    return None if kind == "default" else kept


def _check_fact(config: ConfigReader, what: str, name: str, value: Any, width: int) -> None:
    """A fact of the right type and range."""
    if name in _LISTS:
        numbers = isinstance(value, list) and all(isinstance(each, (int, float)) for each in value)
        if not numbers or len(value) != width // 2 or not all(0 < each < _HUGE for each in value):
            found = f"has {len(value)} entries" if isinstance(value, list) else f"is {value!r}"
            raise CheckpointError(
                f"config field '{what}' {found}",
                where=config.where,
                why=f"it must hold one number above 0 for each of the {width // 2} rotary frequencies",
                fix="Take the list from the original config",
            )
    elif name == "truncate":
        config.checked(what, value, bool)
    elif name == "original_max_position_embeddings":
        config.checked(what, value, int)
    elif not (name in _FROM_ZERO and value == 0 and not isinstance(value, bool)):
        config.checked(what, value, float)


def _check_together(config: ConfigReader, schema: str, kind: str, facts: dict[str, Any]) -> None:
    """Facts that must fit each other."""
    if kind == "llama3" and not facts["high_freq_factor"] > facts["low_freq_factor"]:
        raise CheckpointError(
            f"{schema} has low_freq_factor {facts['low_freq_factor']} and high_freq_factor {facts['high_freq_factor']}",
            where=config.where,
            why="frequencies between the two are blended, so the second must be larger",
            fix="Write those that the model was trained with: Llama 3.1 has 1 and 4",
        )
    if kind != "yarn":
        return
    factor, original = facts["factor"], facts["original_max_position_embeddings"]
    context = config.config.get("max_position_embeddings")
    if context is None or float(factor) * original != context:
        raise CheckpointError(
            f"YaRN has factor {factor} and original_max_position_embeddings {original}, and "
            f"max_position_embeddings is {context}",
            where=config.where,
            why="the context must be factor times the original one, or readers differ in the frequencies",
            fix="Write all three",
        )
