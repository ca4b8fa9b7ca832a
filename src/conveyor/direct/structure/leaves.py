"""The tensors and arrays in a value: in lists, tuples and mappings."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from conveyor.direct.memory import is_array_type, is_tensor_type

#: Keys and indices that lead to one of them.
Path = tuple[Any, ...]

_NAMED = 5


def is_leaf(value: Any) -> bool:
    """Whether ``value`` is a tensor or an array."""
    cls: Any = type(value)
    return _is_leaf_type(cls)


@functools.lru_cache(maxsize=256)
def _is_leaf_type(cls: type) -> bool:
    return is_tensor_type(cls) or is_array_type(cls)


def leaves_of(value: Any) -> list[tuple[Path, Any]]:
    """Return each tensor and array of a value with its path. Other contents of a container are left out."""
    found: list[tuple[Path, Any]] = []
    if is_leaf(value):
        found.append(((), value))
    else:
        _add_leaves(found, value, (), frozenset())
    return found


def _add_leaves(
    found: list[tuple[Path, Any]], value: Any, path: Path, inside: frozenset[int]
) -> None:
    if id(value) in inside:
        return
    inside |= {id(value)}
    for key, one in _items(value):
        if is_leaf(one):
            found.append(((*path, key), one))
        else:
            _add_leaves(found, one, (*path, key), inside)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else ()


def with_leaves(value: Any, instead: Callable[[Any], Any], fresh: bool) -> Any:
    """Return ``value`` with ``instead(leaf)`` in the place of each leaf; it is called in the order of
    :func:`leaves_of`. ``fresh``: nobody else has the value, so that its own containers can be changed."""
    return _with_leaves(value, instead, fresh, frozenset())


def _with_leaves(
    value: Any, instead: Callable[[Any], Any], fresh: bool, inside: frozenset[int]
) -> Any:
    if is_leaf(value):
        return instead(value)
    if id(value) in inside:
        return value
    inside |= {id(value)}
    found = [
        (key, one, instead(one) if is_leaf(one) else _with_leaves(one, instead, fresh, inside))
        for key, one in _items(value)
    ]
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
    """Path of a leaf that no keys and indices lead to: its number, in the order of the pickler."""

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
