"""The refs of a call that has several results (``num_returns``), which come as one value."""

from __future__ import annotations

from typing import Any

from conveyor.codec import direct
from conveyor.runtime.refs.derived import DerivedRef
from conveyor.runtime.refs.ref import Ref


def elements_of(whole: Ref, count: int) -> Any:
    """The refs of ``count`` results: ``whole`` itself, where there is one."""
    return whole if count == 1 else [ElementRef(whole, i) for i in range(count)]


class ElementRef(DerivedRef):
    """One of them."""

    __slots__ = ("_index",)

    def __init__(self, whole: Ref, index: int) -> None:
        super().__init__(whole)
        self._index = index

    def _got(self, timeout: float | None) -> Any:
        if self._is_received():
            return self._received(timeout)
        self._settled(timeout)  # before: who waits may be doing something else meanwhile
        return direct.fetched(self._unfetched())

    def _unfetched(self) -> Any:
        return self._whole._unfetched()[self._index]

    def parts(self) -> tuple[Ref, ...]:
        return (self._whole,)

    def __repr__(self) -> str:
        return f"<ElementRef {self._index} of {self._whole!r}>"
