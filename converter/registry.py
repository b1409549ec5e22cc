"""What can be plugged in, by name: families, ops and losses."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import TypeVar

T = TypeVar("T")


class Registry(dict[str, T]):
    """By name, what the files of a package register, and what others publish as entry points of its name."""

    def __init__(self, package: str) -> None:
        super().__init__()
        self._package, self._loaded = package, False

    def add(self, name: str, member: T) -> None:
        """Register one; raises ValueError where the name is taken."""
        if name in self:
            raise ValueError(f"two {self._package.rpartition('.')[2]} are called '{name}'")
        self[name] = member

    def load(self) -> Registry[T]:
        """Itself, with every file and entry point imported."""
        if not self._loaded:
            for module in pkgutil.iter_modules(importlib.import_module(self._package).__path__):
                importlib.import_module(f"{self._package}.{module.name}")
            for entry in entry_points(group=self._package):
                entry.load()
            self._loaded = True
        return self
