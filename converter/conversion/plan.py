"""The plan: a recipe resolved against one checkpoint and run on meta tensors.

Everything that can be known without reading a weight is known here: whether each op fits, which
tensors and config fields are used, dropped or ignored, every shape and dtype of the result, its size,
and the memory that the walk needs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

import torch

from converter.blocks import HEAD, Block, BlockRef, Dropped, block_shapes, blocks
from converter.conversion.recipe import Recipe
from converter.errors import ConverterError, RecipeError, UnsupportedError, did_you_mean, paragraph
from converter.families import TargetFamily, families
from converter.families.companions import with_ids
from converter.families.config import ConfigReader
from converter.families.opened import SourceModel
from converter.files.json_text import to_json
from converter.files.safetensors import num_bytes
from converter.measure.vocabulary import Vocabulary
from converter.ops import Notes, Op
from converter.ops.cast import Cast
from converter.ops.trim_vocabulary import TrimVocabulary
from converter.spec import ModelSpec

DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class PlannedStep:
    """One op with the specs on both sides of it."""

    op: Op
    before: ModelSpec
    after: ModelSpec

    @property
    def exact(self) -> bool:
        """Whether the function stays the same up to rounding."""
        return self.op.exact(self.before) or not self.needed

    @property
    def needed(self) -> bool:
        """Whether the op changes anything here."""
        return self.op.needed(self.before)


@dataclass(frozen=True)
class Plan:
    """What a conversion will do."""

    source: SourceModel
    recipe: Recipe
    target: TargetFamily
    steps: tuple[PlannedStep, ...]
    target_spec: ModelSpec
    dtype: DtypeName
    #: Target tensor name -> shape and dtype, in the order in which they are written.
    tensors: dict[str, tuple[tuple[int, ...], str]]
    #: Parts of the model that the ops drop, without norms: those need the weights.
    dropped: tuple[Dropped, ...]
    #: Bytes of the weights that the walk holds at most.
    weight_bytes: int
    #: The steps that change another block than the head: each has a stream of its own from there on.
    changing: tuple[int, ...] = ()

    @property
    def output_bytes(self) -> int:
        """Bytes of all tensors of the result."""
        return sum(map(self.tensor_bytes, self.tensors))

    def tensor_bytes(self, name: str) -> int:
        """Bytes of one tensor of the result."""
        return num_bytes(*self.tensors[name])

    @property
    def parameters(self) -> int:
        """Parameters of the result."""
        return sum(math.prod(shape) for shape, _ in self.tensors.values())

    def named(self, ref: BlockRef, block: Block) -> dict[str, torch.Tensor]:
        """The tensors of a converted block by the target's names; roles that only the target has are zeros."""
        return self.target.write_block(self.target_spec, ref, block)

    def config(self) -> dict[str, Any]:
        """The result's `config.json`."""
        return with_ids(self.source, self.target.write_config(self.target_spec), self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """A dry run, for JSON."""
        return {
            "recipe": self.recipe.name,
            "steps": [
                {
                    "name": step.op.name,
                    "parameters": dict(vars(step.op)),
                    "exact": step.exact,
                    "needed": step.needed,
                    "calibrated": step.op.calibrated,
                }
                for step in self.steps
            ],
            "used": self.source.used,
            "dropped": [asdict(each) for each in (*self.source.dropped, *self.dropped)],
            "ignored": {key: why for key, why in self.source.config_accounts.items() if why != "read"},
            "target": self.target.name,
            "tensors": {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in self.tensors.items()},
            "parameters": self.parameters,
            "bytes": self.output_bytes,
        }


def make_plan(source: SourceModel, recipe: Recipe, dtype: DtypeName | None = None) -> Plan:
    """Resolve a recipe against a checkpoint; raises where they do not fit, before any weight is read.

    `dtype` is that of the result; None keeps the source's.
    """
    if dtype is not None and dtype not in get_args(DtypeName):
        raise ConverterError(f"'{dtype}' is no dtype of a result", fix=did_you_mean(dtype, get_args(DtypeName)))
    target = families().get(recipe.target)
    if not isinstance(target, TargetFamily):
        known = [name for name, family in families().items() if isinstance(family, TargetFamily)]
        raise RecipeError(f"'{recipe.target}' is not a target family", fix=did_you_mean(recipe.target, known))
    recipe = _with_cast(recipe, dtype, source.dtype)
    try:
        steps = _resolve_steps(source.spec, recipe)
        target_spec = target.accept(steps[-1].after)
    except UnsupportedError as error:
        error.where = error.where or f"recipe '{recipe.name}'"
        own = source.family.recipe_for(source.spec)
        if own not in (None, recipe.name):
            error.fix = paragraph(error.fix, f"The recipe for this checkpoint is '{own}'")
        raise
    final_dtype = cast(DtypeName, getattr(recipe.steps[-1], "dtype", "float32"))
    plan = Plan(source, recipe, target, steps, target_spec, final_dtype, {}, (), 0)
    return _dry_run(plan)


def without_padding(recipe: Recipe, source: SourceModel) -> Recipe:
    """The recipe with a first step that drops the rows of embeddings and head that have no token.

    Raises ConverterError where no tokenizer says which those are, or where the config names one of them.
    """
    tokens = Vocabulary.of(source).tokens
    if tokens is None:
        raise ConverterError(
            "the checkpoint has no tokenizer, so which rows are padding is not known",
            where="--trim-vocab",
            fix="Put the tokenizer's files beside the weights",
        )
    for name, value in source.token_ids().items():
        if any(token >= tokens for token in (value if isinstance(value, list) else [value]) if token is not None):
            raise ConverterError(
                f"{name} is {value}, and the tokenizer has {tokens} tokens",
                where="--trim-vocab",
                why="the row of that token would go as padding",
                fix="Correct the id in config.json and generation_config.json",
            )
    if tokens == source.spec.vocab_size:
        return recipe
    places = list(recipe.places) or [recipe.name] * len(recipe.steps)
    steps = (TrimVocabulary(tokens), *recipe.steps)
    return dataclasses.replace(recipe, steps=steps, places=("--trim-vocab", *places))


def check_config(plan: Plan) -> None:
    """Read the result's config back, by the target's own reader and by transformers' class, before any work.

    Raises UnsupportedError where it says something else than the plan. Meta's format has no such class, and leaves
    facts out that its readers know.
    """
    if plan.target.own_container:
        return
    where, config = "the config.json to be written", json.loads(to_json(plan.config()))
    reader = ConfigReader(config, where)
    found = plan.target.read_spec(reader, reader.read("tie_word_embeddings", bool, plan.target.ties_by_default))
    reader.finish()
    for fact, wanted in vars(plan.target_spec).items():
        if fact != "ranks" and getattr(found, fact) != wanted:
            raise UnsupportedError(
                f"a {plan.target.name} cannot state the result: its {fact} would be read as {getattr(found, fact)}, "
                f"and is {wanted}",
                where=where,
                fix="Choose another target, or report this with the output of inspect",
            )
    if plan.target.model_class is None:
        return
    import transformers

    model_class = getattr(transformers, plan.target.model_class)
    try:
        model_class.config_class.from_dict(config)
    except Exception as error:  # of many kinds
        raise UnsupportedError("transformers would refuse it", where=where, why=" ".join(str(error).split())) from error


def _with_cast(recipe: Recipe, dtype: DtypeName | None, source_dtype: str) -> Recipe:
    """The recipe with a cast as its last step: the one asked for, its own, or to the source's dtype."""
    steps = list(recipe.steps)
    places = list(recipe.places) or [recipe.name] * len(steps)
    for step, place in zip(steps[:-1], places, strict=False):
        if isinstance(step, Cast):
            raise RecipeError("cast must be the last step", where=place, why="the ops work in fp32")
    if steps and isinstance(steps[-1], Cast):
        if dtype is not None:
            steps[-1] = Cast(dtype)
    else:
        kept = source_dtype if source_dtype in get_args(DtypeName) else "float32"
        steps.append(Cast(dtype or cast(DtypeName, kept)))
        places.append("--dtype")
    return dataclasses.replace(recipe, steps=tuple(steps), places=tuple(places))


def _resolve_steps(spec: ModelSpec, recipe: Recipe) -> tuple[PlannedStep, ...]:
    steps = []
    for op, place in zip(recipe.steps, recipe.places, strict=True):
        try:
            after = op.change(spec)
        except ConverterError as error:
            error.where = error.where or place
            raise
        steps.append(PlannedStep(op, spec, after))
        spec = after
    return tuple(steps)


def _dry_run(plan: Plan) -> Plan:
    """Run every op on meta tensors: shapes, dtypes, drops and memory."""
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    dropped: list[Dropped] = []
    peak, changing = 0, set()
    for ref in blocks(plan.source.spec):
        shapes = block_shapes(plan.source.spec, ref)
        block = Block({role: torch.empty(shape, device="meta") for role, shape in shapes.items()})
        notes = Notes(ref)
        for number, step in enumerate(plan.steps):
            result = step.op.apply(block, step.before, notes, None)
            found = {role: tuple(tensor.shape) for role, tensor in result.items()}
            if found != block_shapes(step.after, ref):
                raise UnsupportedError(
                    f"op '{step.op.name}' gives {ref} other roles or shapes than its own spec says",
                    why=f"it says {block_shapes(step.after, ref)} and gives {found}",
                )
            fresh = [tensor for role, tensor in result.items() if tensor is not block.get(role)]
            peak = max(peak, _bytes(block.values()) + _bytes(fresh))
            fitted = step.op.follows_source and step.needed  # which it is to activations, and here are none
            if ref != HEAD and (fresh or fitted or result.keys() != block.keys() or _other_facts(step)):
                changing.add(number)
            block = result
        dropped += notes.dropped
        for name, tensor in plan.named(ref, block).items():
            tensors[name] = (tuple(tensor.shape), plan.dtype)
    return dataclasses.replace(
        plan, tensors=tensors, dropped=tuple(dropped), weight_bytes=peak, changing=tuple(sorted(changing))
    )


def _other_facts(step: PlannedStep) -> bool:
    """Whether a layer computes something else by other facts; where the head's weights come from is none of them."""
    return step.before.replace(tied_head=False) != step.after.replace(tied_head=False)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Their size in the working dtype, fp32."""
    return sum(tensor.numel() * 4 for tensor in tensors)
