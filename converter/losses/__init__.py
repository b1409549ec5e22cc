"""What healing minimises: one loss a file, found by decorator or entry point.

A loss is a frozen dataclass: its weight, which is `heal.<name>` in a recipe, and its parameters, which are settings of
the same section by their own names. It gives a value for each token, and the gradient of that value by the student's
logits. To add one, write a file here with a class under `@loss`, or publish it under the entry point group
`converter.losses`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeVar

from converter.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

#: The target of a token that has none.
IGNORE = -100


@dataclass(frozen=True, eq=False)
class Top:
    """The k likeliest tokens of a teacher: ids and log p, (N, k) each.

    No NamedTuple: FSDP goes into those, and would round log p to the dtype of the parameters.
    """

    ids: Tensor
    log_p: Tensor

    def __getitem__(self, chosen: Tensor | slice) -> Top:
        """Those of some tokens."""
        return Top(self.ids[chosen], self.log_p[chosen])

    def filled(self, log_q: Tensor) -> Tensor:
        """log p (n, V) of all tokens: those that are not among the k share the rest as the student's do.

        KL and gradient are then those between two distributions of k + 1 outcomes, the last one being "another token".
        That is at most the KL over all tokens (the rest taken together tells less).
        """
        rest_q = log_q.scatter(-1, self.ids, -float("inf")).logsumexp(-1, keepdim=True)
        rest_p = (1 - self.log_p.exp().sum(-1, keepdim=True)).clamp_min(1e-9).log()
        return (log_q + (rest_p - rest_q)).scatter(-1, self.ids, self.log_p.to(log_q.dtype))


@dataclass(frozen=True, eq=False)
class Rows:
    """What a loss may look at: n tokens with the student's `logits` (n, V) and the ids `targets` (n,) that follow.

    `teacher` is the teacher's logits (n, V) or its likeliest tokens; None without a teacher. `answered` (n,) says for
    which tokens the teacher has an answer; None: for all.
    """

    logits: Tensor
    targets: Tensor
    teacher: Tensor | Top | None = None
    answered: Tensor | None = None
    _log_q: dict[float, Tensor] = field(default_factory=dict)

    def log_q(self, temperature: float = 1.0) -> Tensor:
        """The student's log-probabilities (n, V). Several losses read them, so none may change them."""
        if temperature not in self._log_q:
            logits = self.logits if temperature == 1.0 else self.logits / temperature
            self._log_q[temperature] = logits.log_softmax(-1)
        return self._log_q[temperature]

    def log_p(self, temperature: float = 1.0) -> Tensor:
        """The teacher's log-probabilities (n, V)."""
        assert self.teacher is not None
        if isinstance(self.teacher, Top):
            return self.teacher.filled(self.log_q(temperature))
        return (self.teacher if temperature == 1.0 else self.teacher / temperature).log_softmax(-1)


@dataclass(frozen=True)
class Loss(ABC):
    """One loss. Its `__post_init__` raises ValueError for values that it cannot take."""

    #: Its share in what is minimised; 0: not learnt from.
    weight: float = 0.0

    #: The name of its weight in recipes, and of its figures in metrics and reports.
    name: ClassVar[str]
    #: In words for people; {source} stands for what it compares with.
    label: ClassVar[str]
    #: Whether it compares with the teacher's logits; its mean is then over the tokens that the teacher answers.
    asks_teacher: ClassVar[bool] = False
    #: Whether evaluations measure it even where it is not learnt from.
    watched: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (self.weight >= 0 and math.isfinite(self.weight)):
            raise ValueError("a weight must be a number that is not negative")

    @abstractmethod
    def value_and_gradient(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """The loss of each token (n,), unweighted, and the gradient (n, V) of their sum by the student's logits.

        The gradient is a tensor of its own, which the caller changes.
        """

    def against_recorded(self) -> str | None:
        """Why a teacher's likeliest tokens are not enough; None where they are."""
        return None

    def kernel(self) -> Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor] | None:
        """A fused kernel for CUDA, from states, head's weight, head's bias and targets to the sum of the loss.

        It serves runs that minimise this loss alone; None where there is none.
        """
        return None


L = TypeVar("L", bound=type[Loss])
_REGISTRY: Registry[type[Loss]] = Registry(__name__)


def loss(cls: L) -> L:
    """Register a loss under its name."""
    _REGISTRY.add(cls.name, cls)
    return cls


def losses() -> Mapping[str, type[Loss]]:
    """Every loss, by name: first those that are learnt from by default."""
    ordered = sorted(_REGISTRY.load().values(), key=lambda each: (-each().weight, each.name))
    return {each.name: each for each in ordered}
