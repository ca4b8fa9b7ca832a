"""Frozen dataclasses go to other processes."""

from __future__ import annotations

from typing import Any


class Portable:
    """Pickles a dataclass as its class and its fields, all of which ``__init__`` takes by position.

    The way that dataclasses have looks for the fields of each object at both ends. A graph's plan is many
    small objects, and that was a third of what a compile costs.
    """

    __slots__ = ()
    __match_args__: tuple[str, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        cls = type(self)
        return cls, tuple([getattr(self, name) for name in cls.__match_args__])
