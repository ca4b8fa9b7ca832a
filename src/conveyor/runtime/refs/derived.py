"""What the refs share that give something of another ref's value."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from conveyor import _core
from conveyor.codec import direct
from conveyor.runtime.refs.itself import Itself
from conveyor.runtime.refs.ref import Ref


class DerivedRef(Ref):
    """A ref that settles as ``whole`` does, and gives what ``_unfetched`` makes of its value."""

    __slots__ = ("_whole",)

    def __init__(self, whole: Ref) -> None:
        super().__init__(whole._source, -1)
        self._whole = whole

    def get(self, timeout: float | None = None) -> Any:
        return _core.with_fetch_limit(timeout, self._got, timeout)

    def _got(self, timeout: float | None) -> Any:
        raise NotImplementedError

    def _unfetched(self) -> Any:
        raise NotImplementedError

    def to_send(self) -> Any:
        self._settled(None)
        value = self._unfetched()
        if isinstance(value, direct.Unfetched):  # whoever gets it fetches it
            return value.kept_by(self._whole)
        return Itself.of(value)

    def _settled(self, timeout: float | None) -> Any:
        return self._whole._settled(timeout)

    def _settled_now(self) -> Any:
        return self._whole._settled_now()

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
