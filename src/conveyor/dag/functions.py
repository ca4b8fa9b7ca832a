"""Functions as tasks of a graph: run by a worker that the graph gets for it, or by an actor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from msgspec import Struct


class Function(Struct, frozen=True):
    """A function that a task calls instead of a method. ``options`` are those of its worker."""

    call: Callable[..., Any]
    options: tuple[tuple[str, Hashable], ...]
    is_async: bool
    is_generator: bool

    @property
    def name(self) -> str:
        name: str = getattr(self.call, "__name__", type(self.call).__name__)
        return name

    @property
    def worker(self) -> Hashable:
        """Functions with equal ones may share a worker."""
        return self.is_async, self.options


class Unplaced(Struct, frozen=True):
    """Stands for the actor of a function that has no worker yet."""

    index: int = -1
    name: str = "worker"


UNPLACED = Unplaced()


def function_of(call: Callable[..., Any], options: Mapping[str, Hashable]) -> Function:
    """Describe ``call`` as a task. ``options``: of a worker that runs it."""
    is_async = inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call)
    generator = inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call)
    return Function(call, tuple(sorted(options.items())), is_async, generator)
