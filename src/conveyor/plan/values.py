"""Values of a graph: what its tasks need and make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from conveyor.dag.parts import Key, key_label


class Part(NamedTuple):
    """A value that the executor gives: an argument of ``execute`` or a part of one, or (``None``) the
    whole input."""

    key: Key | None


class Made(NamedTuple):
    """A value that a task makes: its result, or one element of it."""

    task: int
    element: int | None


# These are no named tuples, which are equal to others with the same contents, whatever they mean.


class Start(Struct, frozen=True):
    """The news that an execution has begun, for ``actor``, which has a task that needs no value."""

    actor: int


class Items(Struct, frozen=True):
    """Items that a generator yields, each as it comes."""

    made: Made


class Done(Struct, frozen=True):
    """News that a task has run. The executor wants it of a task that runs for its effect."""

    made: Made


Value = Part | Made | Start


def value_label(value: Value, task_labels: Sequence[str]) -> str:
    """Name ``value`` in the user's words."""
    if isinstance(value, Part):
        return key_label(value.key, "input")
    if isinstance(value, Start):
        return "start"
    label = task_labels[value.task]
    return label if value.element is None else f"{label}[{value.element}]"


def few(items: Iterable[str], most: int = 6) -> str:
    """List ``items``, short even where there are many."""
    shown = list(items)
    return ", ".join(shown if len(shown) <= most else [*shown[: most - 1], "..."])
