"""Structure of a value: its tensors and arrays, and the containers and objects that they are in."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import cloudpickle

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


#: These are themselves: nothing is looked for in them, nor are they loaded again.
_WHOLE = (type, FunctionType, BuiltinFunctionType, ModuleType)
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, bytearray, range, slice))
_ATOMS = (*_WHOLE, *_PLAIN)


def has_objects(value: Any) -> bool:
    """Whether ``value`` has anything in it but lists, tuples, mappings, tensors, arrays and plain values."""
    seen: set[int] = set()
    ahead = [value]
    while ahead:
        one = ahead.pop()
        if is_leaf(one) or isinstance(one, _ATOMS) or _is_scalar(one) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            ahead.extend(one.values())
        elif isinstance(one, (list, tuple)):
            ahead.extend(one)
        else:
            return True
    return False


def is_data(value: Any) -> bool:
    """Whether ``value`` has nothing in it but dicts, lists, tuples, tensors, arrays and plain values: no
    tensor and no array is anywhere but in one of these."""
    attributes: list[Any] = []
    return _is_data([value], attributes, True) and _is_data(attributes, attributes, False)


def _is_data(ahead: list[Any], attributes: list[Any], takes_leaves: bool) -> bool:
    seen: set[int] = set()
    while ahead:
        one = ahead.pop()
        kind = type(one)
        if is_leaf(one):
            if not takes_leaves:
                return False
            continue
        if kind in _PLAIN or id(one) in seen or _is_scalar(one):
            continue
        seen.add(id(one))
        if kind is dict or kind is OrderedDict:
            if not _PLAIN.issuperset(map(type, one)):
                return False
            ahead.extend(one.values())
            if kind is OrderedDict:
                attributes.append(vars(one))  # as those of modules have
        elif kind is list or kind is tuple:
            ahead.extend(one)
        else:
            return False
    return True


def _is_scalar(value: Any) -> bool:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return (numpy is not None and isinstance(value, numpy.generic)) or (
        torch is not None and isinstance(value, (torch.dtype, torch.device))
    )


class Walked:
    """A value of lists, tuples and mappings that has been taken apart: ``leaves`` are its tensors and arrays,
    with their paths. ``fresh``: nobody else has it. ``unseen``: why its objects were not looked into."""

    def __init__(self, value: Any, fresh: bool = False, unseen: str = "") -> None:
        self.leaves: list[tuple[Path, Any]] = list(leaves_of(value))
        self.unseen = unseen
        self._value = value
        self._fresh = fresh

    def put_together(self, leaves: Sequence[Any]) -> Any:
        """Return the value with these leaves in the places of its own."""
        ahead = iter(leaves)
        return with_leaves(self._value, lambda _: next(ahead), self._fresh)


class Pickled:
    """Value with objects that has been taken apart by its pickler; see :class:`Walked`."""

    unseen = ""

    def __init__(self, value: Any) -> None:
        """Raises whatever pickling does."""
        self.leaves: list[tuple[Path, Any]] = []
        self._held: list[Any] = []
        self._value = value  # so that what it is made of is known by its address
        file = io.BytesIO()
        _Taking(file, self.leaves, self._held).dump(value)
        self._rest = file.getbuffer()

    def put_together(self, leaves: Sequence[Any]) -> Any:
        """Return the value with these leaves in the places of its own. A parameter stays one, over the
        memory of the leaf that takes its place: modules take nothing else."""
        return _Putting(io.BytesIO(self._rest), self.leaves, leaves, self._held).load()


class _Taking(cloudpickle.CloudPickler):  # type: ignore[misc]
    def __init__(self, file: Any, leaves: list[tuple[Path, Any]], held: list[Any]) -> None:
        super().__init__(file, protocol=5)
        self._leaves = leaves
        self._held = held

    def persistent_id(self, one: Any) -> tuple[bool, int] | None:
        """Name the objects that are not pickled: leaves, and those that stay themselves."""
        if is_leaf(one):
            self._leaves.append((Nth(len(self._leaves)), one))
            return True, len(self._leaves) - 1
        # References and handles are themselves, too.
        if isinstance(one, _WHOLE) or type(one).__module__.startswith("conveyor."):
            self._held.append(one)
            return False, len(self._held) - 1
        return None


class _Putting(pickle.Unpickler):
    def __init__(
        self, file: Any, before: list[tuple[Path, Any]], leaves: Sequence[Any], held: list[Any]
    ) -> None:
        super().__init__(file)
        self._before = before
        self._after = leaves
        self._held = held
        self._known: dict[tuple[int, int], Any] = {}

    def persistent_load(self, name: Any) -> Any:
        is_one, number = name
        if not is_one:
            return self._held[number]
        before, after = self._before[number][1], self._after[number]
        tied = id(before), id(after)  # what is tied stays so
        if tied not in self._known:
            self._known[tied] = _like(before, after)
        return self._known[tied]


def _like(before: Any, after: Any) -> Any:
    torch = sys.modules.get("torch")
    if (
        torch is None
        or not isinstance(before, torch.nn.Parameter)
        or isinstance(after, torch.nn.Parameter)
    ):
        return after
    return torch.nn.Parameter(after.detach(), requires_grad=before.requires_grad)


def unpacked(value: Any, fresh: bool = False) -> Walked | Pickled:
    """Take ``value`` apart into the leaves that its pickler reaches."""
    if not has_objects(value):
        return Walked(value, fresh)
    try:
        return Pickled(value)
    except Exception as error:  # of the user's, or what no pickler takes
        return Walked(value, fresh, f"{type(error).__name__}: {error}")
