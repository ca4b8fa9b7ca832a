"""A part of what another ref gives."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

from conveyor.codec import direct
from conveyor.runtime.refs.derived import DerivedRef
from conveyor.runtime.refs.ref import Ref


def _unshared(index: Any) -> Any:
    """``index``, or a copy where it is a list or an array."""
    if isinstance(index, (int, str, slice)):
        return index
    is_fixed = isinstance(index, Hashable) and not hasattr(index, "__array__")
    return index if is_fixed else copy.deepcopy(index)


class PartRef(DerivedRef):
    """``ref[index]``: of an array or a tensor that has stayed where it was made, only the part is fetched."""

    __slots__ = ("_index",)

    def __init__(self, whole: Ref, index: Any) -> None:
        super().__init__(whole)
        # It is looked at later, and lists and arrays may be changed until then.
        several = index if isinstance(index, tuple) else (index,)
        self._index = tuple([_unshared(one) for one in several])

    def _got(self, timeout: float | None) -> Any:
        if self._is_received():
            return self._received(timeout)
        self._settled(timeout)  # before: who waits may be doing something else meanwhile
        value = self._whole._unfetched()
        if isinstance(value, direct.Unfetched):
            return value.part(self._index)
        return self._of(value)

    def _unfetched(self) -> Any:
        value = self._whole._unfetched()
        if isinstance(value, direct.Unfetched):
            part = value.where_part(self._index)
            if part is not None:
                return value.moved(part)
            value = value.fetch()
        return self._of(value)

    def _of(self, value: Any) -> Any:
        index = self._index
        return value[index[0] if len(index) == 1 else index]

    def __repr__(self) -> str:
        return f"<PartRef {self._index!r} of {self._whole!r}>"

    def parts(self) -> tuple[Ref, ...]:
        return self._whole.parts()
