"""Collections that keep nothing alive, and have no finalizer in Python.

``weakref.WeakSet`` and ``weakref.WeakValueDictionary`` hear of an object's end in Python code, which runs
wherever that is, in the middle of a garbage collection too. A signal's handler may raise there, and what it
raises is printed and lost: Ctrl-C, most often. These hear of it in native code alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

from conveyor import _core

T = TypeVar("T")
ValueT = TypeVar("ValueT")
KeyT = TypeVar("KeyT", bound=Hashable)


class WeakSet(Generic[T]):
    """Set of objects that others keep alive. They are compared by identity, and each operation is one step,
    which no other thread comes between."""

    __slots__ = ("_refs", "_table")

    def __init__(self) -> None:
        self._table = _core.WeakTable()
        self._refs: dict[int, weakref.ref[Any]] = self._table.known

    def add(self, obj: T) -> None:
        key = id(obj)
        self._refs[key] = self._table.ref(obj, key)

    def discard(self, obj: T) -> None:
        self._refs.pop(id(obj), None)

    def clear(self) -> None:
        self._refs.clear()

    def pop(self) -> T:
        """Take any out; ``KeyError`` if there is none."""
        while True:
            _, ref = self._refs.popitem()
            obj: T | None = ref()
            if obj is not None:
                return obj

    def __contains__(self, obj: object) -> bool:
        ref = self._refs.get(id(obj))
        return ref is not None and ref() is obj

    def __len__(self) -> int:
        return len(self._refs)

    def __iter__(self) -> Iterator[T]:
        """Iterate over the objects that are there now, whatever becomes of the set."""
        living = [ref() for ref in list(self._refs.values())]
        return iter([obj for obj in living if obj is not None])


class WeakValues(Generic[KeyT, T]):
    """Dictionary of values that others keep alive."""

    __slots__ = ("_refs", "_table")

    def __init__(self) -> None:
        self._table = _core.WeakTable()
        self._refs: dict[KeyT, weakref.ref[Any]] = self._table.known

    def __setitem__(self, key: KeyT, value: T) -> None:
        self._refs[key] = self._table.ref(value, key)

    def __getitem__(self, key: KeyT) -> T:
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def get(self, key: KeyT) -> T | None:
        ref = self._refs.get(key)
        return None if ref is None else ref()

    def setdefault(self, key: KeyT, value: T) -> T:
        """Return the value of ``key``, which becomes ``value`` if it has none."""
        ref = self._table.ref(value, key)
        while True:
            found = self._refs.setdefault(key, ref)
            known: T | None = found()
            if known is not None:
                return known
            if self._refs.get(key) is found:  # and not what another thread has put there meanwhile
                self._refs.pop(key, None)  # garbage, and it has not been heard of yet

    def values(self) -> list[T]:
        living = [ref() for ref in list(self._refs.values())]
        return [value for value in living if value is not None]

    def clear(self) -> None:
        self._refs.clear()

    def __len__(self) -> int:
        return len(self._refs)


class WeakKeys(Generic[T, ValueT]):
    """Dictionary by keys that others keep alive, and that are compared by identity."""

    __slots__ = ("_known", "_table")

    def __init__(self) -> None:
        self._table = _core.WeakTable()
        self._known: dict[int, tuple[weakref.ref[Any], Any]] = self._table.known

    def __setitem__(self, obj: T, value: ValueT) -> None:
        key = id(obj)
        self._known[key] = self._table.ref(obj, key), value

    def get(self, obj: T) -> ValueT | None:
        found = self._known.get(id(obj))
        return None if found is None or found[0]() is not obj else found[1]

    def pop(self, obj: T) -> ValueT | None:
        value = self.get(obj)
        self._known.pop(id(obj), None)
        return value
