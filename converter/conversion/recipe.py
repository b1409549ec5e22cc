"""Recipes: strict YAML that names a target and the ops that lead there.

    name: gpt2-to-llama
    description: ...
    target: llama
    steps:
      - untie_head
      - gelu_to_swiglu: {units: 2}
    verify: {tokens: 16384}

It names no source: a recipe fits every model whose facts its ops and its target take.

An unknown key, a repeated one or a value of the wrong type is an error that names the file, the line and the
nearest right word, before any weight is read.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from converter.conversion.settings import CalibrationSettings, HealSettings, VerifySettings, parameters_of
from converter.errors import RecipeError, did_you_mean
from converter.families import TargetFamily, families
from converter.ops import Op, ops

#: Settings of a recipe beside its steps.
_SECTIONS = ("verify", "calibration", "heal")


@dataclass(frozen=True)
class Recipe:
    """An ordered list of ops with their parameters."""

    name: str
    target: str
    steps: tuple[Op, ...]
    description: str = ""
    verify: VerifySettings = field(default_factory=VerifySettings)
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    heal: HealSettings = field(default_factory=HealSettings)
    #: Where each step stands, as "file:line".
    places: tuple[str, ...] = ()

    @property
    def calibrated(self) -> bool:
        """Whether some op needs text."""
        return any(step.calibrated for step in self.steps)

    def fingerprint(self) -> dict[str, Any]:
        """Everything that the result depends on, by the names that `--set` has for it."""
        facts: dict[str, Any] = {"recipe": self.name, "steps": [step.name for step in self.steps]}
        for number, step in enumerate(self.steps):
            name = step.name if facts["steps"].index(step.name) == number else f"step {number + 1} {step.name}"
            facts |= {f"{name}.{parameter}": value for parameter, value in _parameters(step).items()}
        for section in ("calibration", "verify"):
            facts |= {f"{section}.{name}": value for name, value in vars(getattr(self, section)).items()}
        return facts | {f"heal.{name}": value for name, value in self.heal.fingerprint().items()}

    def to_yaml(self) -> str:
        """The recipe with every parameter written out."""
        facts: dict[str, Any] = {"name": self.name}
        if self.description:
            facts["description"] = self.description
        facts["target"] = self.target
        facts["steps"] = [{step.name: _parameters(step)} if _parameters(step) else step.name for step in self.steps]
        facts["calibration"] = dataclasses.asdict(self.calibration)
        facts["verify"] = dataclasses.asdict(self.verify)
        facts["heal"] = self.heal.to_dict()
        return yaml.safe_dump(facts, sort_keys=False, allow_unicode=True, width=100)


def _parameters(step: Op) -> dict[str, Any]:
    return {field.name: getattr(step, field.name) for field in dataclasses.fields(typing.cast(Any, step))}


def shipped_recipes() -> dict[str, str]:
    """Name -> text of the recipes that come with the package."""
    package = Path(__file__).parents[1]
    installed, cloned = package / "recipes", package.parent / "recipes"
    folder = installed if installed.is_dir() else cloned
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.yaml"))}


def recipe_text(name_or_file: str) -> tuple[str, str]:
    """The text of a recipe and where it came from; a path wins over a shipped name."""
    path = Path(name_or_file)
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError("the recipe cannot be read", where=str(path), why=str(error)) from error
    shipped = shipped_recipes()
    if name_or_file not in shipped:
        looks_like_path = path.suffix in (".yaml", ".yml") or len(path.parts) > 1
        raise RecipeError(
            f"there is no recipe {'file' if looks_like_path else ''} '{name_or_file}'".replace("  ", " "),
            fix=did_you_mean(path.stem, shipped),
        )
    return shipped[name_or_file], f"recipe {name_or_file}"


def load_recipe(name_or_file: str, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe by shipped name or file, with `step.param=value` overrides applied."""
    text, where = recipe_text(name_or_file)
    return parse_recipe(text, where, overrides)


def parse_recipe(text: str, where: str, overrides: Iterable[str] = ()) -> Recipe:
    """Parse and check a recipe's text; raises RecipeError with file and line."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise RecipeError("this is nested too deeply", where=where, why="a recipe has three levels") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark else where
        raise RecipeError("this is not YAML", where=place, why=getattr(error, "problem", None) or str(error)) from error
    reader = _Reader(where)
    top = reader.mapping(root, "recipe")
    reader.known_keys(top, {"name", "description", "target", "steps", *_SECTIONS}, "recipe")
    for key in ("name", "target", "steps"):
        if key not in top:
            raise RecipeError(
                f"the recipe has no '{key}'",
                where=where,
                fix="`converter recipes show gpt2-to-llama` prints a whole one",
            )
    nodes = reader.sequence(top["steps"][1], "steps")
    recipe = Recipe(
        name=reader.value(top["name"][1], str, "name"),
        target=reader.target(top["target"][1]),
        description=reader.value(top["description"][1], str, "description") if "description" in top else "",
        steps=tuple(reader.step(node) for node in nodes),
        places=tuple(reader.place(node) for node in nodes),
        verify=reader.settings(top.get("verify"), VerifySettings, "verify"),
        calibration=reader.settings(top.get("calibration"), CalibrationSettings, "calibration"),
        heal=reader.settings(top.get("heal"), HealSettings, "heal"),
    )
    return with_overrides(recipe, overrides)


def with_overrides(recipe: Recipe, overrides: Iterable[str]) -> Recipe:
    """A recipe with `step.param=value` applied, one after the other."""
    for override in overrides:
        recipe = _override(recipe, override)
    return recipe


def _override(recipe: Recipe, override: str) -> Recipe:
    """Apply one `step.param=value`."""
    where = f"--set {override}"
    target, equals, text = override.partition("=")
    step_name, dot, parameter = target.strip().partition(".")
    if not equals or not dot:
        raise RecipeError(
            "an override has the form step.param=value", where=where, fix="Write for example gelu_to_swiglu.units=2"
        )
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise RecipeError(f"'{text}' is not a value", where=where, why=getattr(error, "problem", None)) from error
    reader = _Reader(where, lines=False)
    if step_name in _SECTIONS:
        return dataclasses.replace(
            recipe, **{step_name: reader.replace(getattr(recipe, step_name), step_name, {parameter: node})}
        )
    places = [index for index, step in enumerate(recipe.steps) if step.name == step_name]
    if not places:
        raise RecipeError(
            f"recipe '{recipe.name}' has no step '{step_name}'",
            where=where,
            fix=did_you_mean(step_name, {step.name for step in recipe.steps} | set(_SECTIONS)),
        )
    steps = list(recipe.steps)
    for index in places:
        steps[index] = reader.replace(steps[index], step_name, {parameter: node})
    return dataclasses.replace(recipe, steps=tuple(steps))


Node = yaml.Node | None
S = typing.TypeVar("S")


class _Reader:
    """Turns YAML nodes into checked values; every complaint has a line."""

    def __init__(self, where: str, lines: bool = True) -> None:
        self.where, self.lines = where, lines

    def error(self, node: Node, what: str, fix: str | None = None) -> RecipeError:
        return RecipeError(what, where=self.place(node), fix=fix)

    def place(self, node: Node) -> str:
        return f"{self.where}:{node.start_mark.line + 1}" if node is not None and self.lines else self.where

    def mapping(self, node: Node, what: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Key -> (key node, value node)."""
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, f"{what} must be a mapping of names to values")
        found: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            name = str(key.value)
            if name in found:
                raise self.error(key, f"'{name}' stands twice in {what}")
            found[name] = (key, value)
        return found

    def sequence(self, node: Node, what: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(node, f"{what} must be a list")
        return list(node.value)

    def known_keys(self, found: Mapping[str, tuple[yaml.Node, yaml.Node]], known: set[str], what: str) -> None:
        for name, (key, _) in found.items():
            if name == "source":
                fix = "Delete the line: a recipe fits every model whose facts its ops and its target take"
                raise self.error(key, f"{what} names a source family", fix)
            if name not in known:
                raise self.error(key, f"unknown key '{name}' in {what}", did_you_mean(name, known))

    def step(self, node: yaml.Node) -> Op:
        """`- name` or `- name: {parameter: value}`."""
        if isinstance(node, yaml.ScalarNode):
            name, parameters = str(node.value), {}
        else:
            entries = self.mapping(node, "a step")
            if len(entries) != 1:
                raise self.error(node, "a step is one op's name, with its parameters under it")
            [(name, (_, inner))] = entries.items()
            empty = isinstance(inner, yaml.ScalarNode) and inner.value in ("", "null", "~")
            parameters = {} if empty else self.mapping(inner, f"the parameters of {name}")
        if name not in ops():
            raise self.error(node, f"there is no op '{name}'", did_you_mean(name, ops()))
        values = {key: value for key, (_, value) in parameters.items()}
        return self.replace(ops()[name](), name, values)

    def settings(self, entry: tuple[yaml.Node, yaml.Node] | None, kind: type[S], what: str) -> S:
        if entry is None:
            return kind()
        values = {key: value for key, (_, value) in self.mapping(entry[1], what).items()}
        return self.replace(kind(), what, values)

    def replace(self, instance: S, what: str, values: Mapping[str, Node]) -> S:
        """A copy of a dataclass with fields from nodes, each checked against its annotation."""
        known = parameters_of(instance)
        for name, node in values.items():
            if name not in known:
                fix = did_you_mean(name, known) if known else f"{what} has no parameters"
                raise self.error(node, f"unknown parameter '{name}' of {what}", fix)
            value = self.value(node, known[name], f"{what}.{name}")
            try:
                instance = _changed(instance, name, value)
            except ValueError as error:  # the dataclass knows its own ranges
                raise self.error(node, f"{what}.{name} is {value!r}, and {error}") from error
        return instance

    def target(self, node: yaml.Node) -> str:
        """The name of a family that can be written."""
        name: str = self.value(node, str, "target")
        known = {name for name, family in families().items() if isinstance(family, TargetFamily)}
        if name not in known:
            raise self.error(node, f"there is no target family '{name}'", did_you_mean(name, known))
        return name

    def value(self, node: Node, kind: Any, what: str) -> Any:
        """A scalar of the annotated type: bool, int, float, str or a Literal of some of them."""
        value = self.plain(node, what)
        if kind is int and isinstance(value, str):
            value = _count(value)
        if get_origin(kind) is Literal:
            choices = get_args(kind)
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                listed = ", ".join(map(str, choices))
                raise self.error(node, f"{what} is {value!r}, and must be one of: {listed}", _near(value, choices))
            return value
        if kind is float and isinstance(value, str):  # YAML 1.1 reads 1e6 as text
            try:
                value = float(value)
            except ValueError:
                raise self.error(node, f"{what} is {value!r}, and must be a number") from None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            words = {int: "a whole number, like 64k or 2M", float: "a number", str: "text", bool: "true or false"}
            raise self.error(node, f"{what} is {value!r}, and must be {words.get(kind, kind)}")
        if kind is int and value < 0:
            raise self.error(node, f"{what} is {value}, and must not be negative")
        return value

    def plain(self, node: Node, what: str) -> Any:
        """What YAML makes of a node; nothing for no node."""
        try:
            return None if node is None else yaml.SafeLoader("").construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:  # a foreign tag, a 13th month
            why = getattr(error, "problem", None) or str(error)
            raise self.error(node, f"the value of {what} cannot be read ({why})") from error


def _changed(instance: S, name: str, value: Any) -> S:
    if isinstance(instance, HealSettings):
        return typing.cast(S, instance.replace(**{name: value}))
    return typing.cast(S, dataclasses.replace(typing.cast(Any, instance), **{name: value}))


def _count(text: str) -> int | str:
    """The number that a text like 64k, 2M or 2_000_000 means; the text where it means none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMG])", text)
    return round(float(match[1]) * {"k": 10**3, "M": 10**6, "G": 10**9}[match[2]]) if match else text


def _near(value: object, choices: tuple[Any, ...]) -> str | None:
    texts = [choice for choice in choices if isinstance(choice, str)]
    return did_you_mean(value, texts) if isinstance(value, str) and texts else None
