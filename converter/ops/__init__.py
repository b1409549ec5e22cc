"""Ops: one conversion step a file, found by decorator or entry point.

An op is a frozen dataclass whose fields are its parameters in a recipe; its `__post_init__` raises
ValueError for a value that it cannot take. `change` maps the spec, `apply` maps one block's roles;
both ask for roles and facts, never for a family's names. To add one, write a file here with a class
under `@op`, or publish it under the entry point group `converter.ops`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeVar

from converter.blocks import Block, BlockRef, Dropped
from converter.errors import UnsupportedError
from converter.registry import Registry
from converter.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor


class Calibration(ABC):
    """What a calibrated op may look at: activations of the calibration text at the depth of its block.

    The text lies in `count` windows of T = `length` tokens, addressed by `rows`, a 1-D tensor of window numbers.
    """

    count: int
    length: int
    #: Whether the source's norms stand behind its sublayers (post-LN), and the converted model's before them.
    moved_norms: bool = False
    #: The size, root mean square, of the stream that enters this block where it is free, as behind moved norms; else 1.
    stream_scale: float = 1.0

    @abstractmethod
    def batches(self) -> Iterator[Tensor]:
        """States (N, D) that enter this block in the model converted so far, padding left out."""

    @abstractmethod
    def inputs(self, rows: Tensor) -> Tensor:
        """The same (B, T, D) for some windows, padding included."""

    @abstractmethod
    def targets(self, rows: Tensor) -> Tensor:
        """The states (B, T, D) that leave the source's block; centred, where the converted model's are.

        For ops that set `follows_source`.
        """

    def as_read(self, states: Tensor) -> Tensor:
        """States that leave this block, to be compared with `targets`.

        They are what they are, unless `moved_norms`: then what leaves a layer is compared as the next one reads it,
        through the norm that was moved there.
        """
        return states

    @abstractmethod
    def mask(self, rows: Tensor) -> Tensor:
        """Where (B, T) there is a token and no padding."""

    @abstractmethod
    def source_block(self, ref: BlockRef) -> Block:
        """Any block of the source, as it is before all ops."""


@dataclass
class Notes:
    """What an op wants told in the report."""

    ref: BlockRef
    #: Role -> the tensor of the source that it came from, for messages.
    origins: Mapping[str, str] = field(default_factory=dict)
    #: The facts that the op noted of the blocks before this one, added up.
    earlier: Mapping[str, float] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)
    #: Figures that add up over the blocks.
    facts: dict[str, float] = field(default_factory=dict)
    #: Relative errors of this block, which do not.
    errors: dict[str, float] = field(default_factory=dict)
    #: To be told what is being done, how far it is, and how long it is; for work of more than a moment.
    progress: Callable[[str, int, int], None] = lambda what, done, total: None

    def name(self, role: str) -> str:
        """A role in words that a user of the source recognises."""
        origin = self.origins.get(role)
        return f"{self.ref}.{role}" + (f" (from {origin})" if origin else "")

    def drop(self, role: str, reason: str, tensor: Tensor) -> None:
        """A role that the result does not hold, with its norm (nothing on meta tensors)."""
        norm = None if tensor.is_meta else float(tensor.double().norm())
        self.dropped.append(Dropped(f"{self.ref}.{role}", reason, norm))


class Op(ABC):
    """One conversion step."""

    #: The name in recipes.
    name: ClassVar[str]
    #: One line for people.
    summary: ClassVar[str]
    #: Whether it needs activations; `apply` then gets a `Calibration`, but in a dry run.
    calibrated: ClassVar[bool] = False
    #: Whether it needs the source's activations beside the converted model's; for calibrated ops.
    follows_source: ClassVar[bool] = False

    def exact(self, spec: ModelSpec) -> bool:
        """Whether the function stays the same up to rounding, for a model of this spec."""
        return False

    def needed(self, spec: ModelSpec) -> bool:
        """Whether there is anything to do; an op that is not needed changes nothing."""
        return True

    @abstractmethod
    def change(self, spec: ModelSpec) -> ModelSpec:
        """The spec afterwards. Raises UnsupportedError where the op does not fit."""

    @abstractmethod
    def apply(self, block: Block, spec: ModelSpec, notes: Notes, calibration: Calibration | None) -> Block:
        """One block afterwards, `spec` being the one before. Works on meta tensors without calibration."""


O = TypeVar("O", bound=type[Op])  # noqa: E741 - an op
_REGISTRY: Registry[type[Op]] = Registry(__name__)


def op(cls: O) -> O:
    """Register an op under its name."""
    _REGISTRY.add(cls.name, cls)
    return cls


def ops() -> Mapping[str, type[Op]]:
    """Every op, by name."""
    return _REGISTRY.load()


def require(condition: bool, op_name: str, what: str, fix: str | None = None) -> None:
    """Refuse a spec that an op does not fit."""
    if not condition:
        raise UnsupportedError(f"{op_name} does not fit: {what}", fix=fix)
