"""The refs of a call that has several results (``num_returns``), which come as one value."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from conveyor.codec import direct
from conveyor.runtime.refs.ref import Itself, Ref
from conveyor.runtime.sights import PassingOn


def elements_of(whole: Ref, count: int) -> Any:
    """The refs of ``count`` results: ``whole`` itself, where there is one."""
    return whole if count == 1 else [ElementRef(whole, i) for i in range(count)]


class ElementRef(Ref):
    """One of them."""

    __slots__ = ("_index", "_whole")

    def __init__(self, whole: Ref, index: int) -> None:
        super().__init__(whole._source, -1)
        self._whole = whole
        self._index = index

    def get(self, timeout: float | None = None) -> Any:
        self._settled(timeout)  # before: who waits may be doing something else meanwhile
        return direct.fetched(self._unfetched())

    def to_send(self) -> Any:
        self._settled(None)
        with PassingOn():
            element = self._unfetched()
        if isinstance(element, direct.Unfetched):  # whoever gets it fetches it
            return element.kept_by(self._whole)
        return Itself.of(element)

    def _settled(self, timeout: float | None) -> Any:
        return self._whole._settled(timeout)

    def _unfetched(self) -> Any:
        return self._whole._unfetched()[self._index]

    def done(self) -> bool:
        return self._whole.done()

    def has_failed(self) -> bool:
        return self._whole.has_failed()

    def cancel(self) -> bool:
        return self._whole.cancel()

    def cancelled(self) -> bool:
        return self._whole.cancelled()

    def _awaited_as(self) -> Hashable:
        return self._whole._awaited_as()

    def parts(self) -> tuple[Ref, ...]:
        return (self._whole,)
