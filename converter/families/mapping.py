"""Typed two-way mappings between a family's tensor names and roles.

A mapping is a small object that holds both directions: `to_roles` turns the family's tensors into
roles, `to_names` turns roles back. A family lists the mappings of each block; what none of them
claims must be covered by a `Drop`, which gives a reason, or it is an error. Nothing here imports
torch at the top: the tensors bring their own methods.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from converter.errors import UnsupportedError

Shape = tuple[int, ...]
RoleShapes = Mapping[str, Shape]

if TYPE_CHECKING:
    from torch import Tensor

    from converter.files.checkpoint import Checkpoint, TensorInfo
    from converter.spec import ModelSpec


@dataclass(frozen=True)
class Direct:
    """One tensor is one role, as it lies. The base of all others."""

    name: str
    role: str

    @property
    def names(self) -> tuple[str, ...]:
        """The family's tensor names, without the family's prefix."""
        return (self.name,)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that they become."""
        return (self.role,)

    def to_roles(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors in the order of `names` -> tensors in the order of `roles`."""
        return tensors

    def to_names(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `to_roles`; UnsupportedError for a mapping without one, which no target may use."""
        return tensors

    def name_shapes(self, roles: RoleShapes) -> tuple[Shape, ...]:
        """Shapes of `names`, from the shapes of the roles."""
        return (roles[self.role],)

    def __str__(self) -> str:
        return "as it lies"


#: Ties some tensor names to some roles, both ways.
TensorMapping = Direct


@dataclass(frozen=True)
class Transposed(Direct):
    """A linear stored as (in, out), as GPT-2's Conv1D does."""

    def to_roles(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (tensors[0].T,)

    def to_names(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (tensors[0].T,)

    def name_shapes(self, roles: RoleShapes) -> tuple[Shape, ...]:
        return (roles[self.role][::-1],)

    def __str__(self) -> str:
        return "transposed"


@dataclass(frozen=True)
class Shared(Direct):
    """One tensor that another role reads too, as GPT-J's one norm for attention and MLP."""

    also: str

    @property
    def roles(self) -> tuple[str, ...]:
        return (self.role, self.also)

    def to_roles(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors * 2

    def to_names(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        one, two = tensors
        assert one is two or one.equal(two), f"{self.roles} differ"
        return (one,)

    def __str__(self) -> str:
        return "read twice"


@dataclass(frozen=True)
class Skipped(Direct):
    """A table whose first `rows` rows no token ever reads, as OPT's positions."""

    rows: int

    def to_roles(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (tensors[0][self.rows :],)

    def to_names(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        import torch

        return (torch.cat([tensors[0].new_zeros(self.rows, *tensors[0].shape[1:]), tensors[0]]),)

    def name_shapes(self, roles: RoleShapes) -> tuple[Shape, ...]:
        rows, *rest = roles[self.role]
        return ((rows + self.rows, *rest),)

    def __str__(self) -> str:
        return f"from row {self.rows} on"


@dataclass(frozen=True)
class Projected(Direct):
    """An embedding (V, W) with a linear from W to D behind it, or a head (V, W) with one from D to W before it."""

    projection: str
    width: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.projection)

    @property
    def before(self) -> bool:
        """Whether the projection stands before the table."""
        return self.role == "head.weight"

    def to_roles(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        table, projection = tensors
        return (table @ (projection if self.before else projection.T),)

    def to_names(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        raise UnsupportedError(
            f"'{self.name}' and '{self.projection}' cannot be written",
            why="they are read as their product, and a product does not tell its factors",
        )

    def name_shapes(self, roles: RoleShapes) -> tuple[Shape, ...]:
        rows, hidden = roles[self.role]
        return (rows, self.width), (self.width, hidden) if self.before else (hidden, self.width)

    def __str__(self) -> str:
        return "multiplied"


@dataclass(frozen=True)
class Ones(Direct):
    """A gain that no tensor holds: a norm without parameters."""

    size: int

    @property
    def names(self) -> tuple[str, ...]:
        return ()

    def to_roles(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        import torch

        return (torch.ones(self.size),)

    def to_names(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        assert bool((tensors[0] == 1).all()), f"{self.role} has become a gain"
        return ()

    def name_shapes(self, roles: RoleShapes) -> tuple[Shape, ...]:
        return ()

    def __str__(self) -> str:
        return "ones"


class FusedLayout(str, Enum):
    """How the rows of q, k and v lie in one fused tensor, from the first to the last; the shapes do not tell."""

    STACKED = "stacked"  # all of q, all of k, all of v: GPT-2
    PER_HEAD = "per_head"  # q, k, v of head 0, then of head 1: GPT-NeoX, BLOOM


@dataclass(frozen=True)
class FusedQKV(Direct):
    """One tensor that holds q, k and v of as many heads each, weight or bias, by a declared layout; `role` is q's."""

    layout: FusedLayout
    head_dim: int
    transposed: bool = False

    @property
    def roles(self) -> tuple[str, ...]:
        return (self.role, *(self.role.replace("q", part, 1) for part in "kv"))

    def __str__(self) -> str:
        return f"fused, {self.layout.value}" + (", transposed" if self.transposed else "")

    def to_roles(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        rows = tensors[0].T if self.transposed else tensors[0]
        if self.layout is FusedLayout.STACKED:
            return tuple(rows.chunk(3))
        rest = rows.shape[1:]
        return tuple(part.reshape(-1, *rest) for part in rows.reshape(-1, 3, self.head_dim, *rest).unbind(1))

    def to_names(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        import torch

        rest = tensors[0].shape[1:]
        if self.layout is FusedLayout.STACKED:
            rows = torch.cat(tensors)
        else:
            rows = torch.stack([part.reshape(-1, self.head_dim, *rest) for part in tensors], dim=1).reshape(-1, *rest)
        return (rows.T if self.transposed else rows,)

    def name_shapes(self, roles: RoleShapes) -> tuple[Shape, ...]:
        rows, *rest = roles[self.role]
        shape = (3 * rows, *rest)
        return (shape[::-1] if self.transposed else shape,)


#: Says what is wrong with a tensor that was to be dropped, or nothing where it may go.
DropCheck = Callable[["Checkpoint", "TensorInfo", "ModelSpec"], "str | None"]


@dataclass(frozen=True)
class Drop:
    """Tensors that carry nothing: `pattern` matches the whole name, `check` looks at what is inside."""

    pattern: str
    reason: str
    check: DropCheck | None = None

    def matches(self, name: str) -> bool:
        """Whether this drop is for the tensor of this name."""
        return re.fullmatch(self.pattern, name) is not None
