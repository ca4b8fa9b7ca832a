"""The tensors and arrays in a value: in lists, tuples and mappings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from conveyor.direct.memory import is_array, is_tensor

#: Keys and indices that lead to one of them.
Path = tuple[Any, ...]

_NAMED = 5


def is_leaf(value: Any) -> bool:
    """Whether it is a tensor or an array."""
    return is_tensor(value) or is_array(value)


def leaves_of(
    value: Any, path: Path = (), inside: frozenset[int] = frozenset()
) -> Iterator[tuple[Path, Any]]:
    """Each of them with its path. What a container has of itself is left out."""
    if is_leaf(value):
        yield path, value
        return
    if id(value) in inside:
        return
    for key, one in _items(value):
        yield from leaves_of(one, (*path, key), inside | {id(value)})


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else ()


def with_leaves(value: Any, instead: Callable[[Any], Any], fresh: bool) -> Any:
    """``value`` with ``instead(leaf)`` in the place of each, which is called in the order of
    :func:`leaves_of`. ``fresh``: nobody else has it, so that its own containers can be changed."""
    return _with_leaves(value, instead, fresh, frozenset())


def _with_leaves(
    value: Any, instead: Callable[[Any], Any], fresh: bool, inside: frozenset[int]
) -> Any:
    if is_leaf(value):
        return instead(value)
    if id(value) in inside:
        return value
    inside |= {id(value)}
    found = [(key, one, _with_leaves(one, instead, fresh, inside)) for key, one in _items(value)]
    if all(one is new for _, one, new in found):
        return value
    if isinstance(value, tuple):
        made = [new for _, _, new in found]
        make = getattr(type(value), "_make", None)
        return make(made) if make is not None else tuple(made)
    target = value if fresh else copy.copy(value)
    for key, one, new in found:
        if one is not new:
            target[key] = new
    return target


class Nth(tuple[int]):
    """The path of one that no keys and indices lead to: its number, in the order of the pickler."""

    def __new__(cls, number: int) -> Nth:
        """``number`` counts from 0."""
        return super().__new__(cls, (number,))


def _named(path: Path) -> str:
    if type(path) is Nth:
        return f"number {path[0]}"
    return "".join(f"[{key!r}]" for key in path) or "the value itself"


def named(paths: Iterable[Path]) -> str:
    """Paths in words, the first few of them."""
    found = [_named(path) for path in paths]
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")
