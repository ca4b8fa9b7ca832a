"""Refs that give something of another ref's value."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from pickle import PickleBuffer
from typing import Any

from conveyor import _core
from conveyor.codec import SENT, add_reducers, direct
from conveyor.codec.direct import Unfetched, keep_beside
from conveyor.codec.frames import decode
from conveyor.refs.holding import Holding, same
from conveyor.refs.ref import Ref
from conveyor.refs.staying import located, stays_afar


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


class Itself:
    """A ref that, as an argument, does not stand for its value."""

    __slots__ = ("_ref",)

    def __init__(self, ref: Ref) -> None:
        self._ref = ref

    @classmethod
    def of(cls, value: Any) -> Any:
        """``value``, to be an argument as it is."""
        return cls(value) if isinstance(value, Ref) else value

    def __reduce__(self) -> Any:
        return same, (self._ref,)


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


class UnreadRef(DerivedRef):
    """Stands in the place of ``whole`` among the arguments of a call."""

    __slots__ = ()

    def to_send(self) -> Any:
        sent = self._whole.to_send()
        return sent if located(sent) is None else _Unread(sent)

    def get(self, timeout: float | None = None) -> Any:
        return self._whole.get(timeout)

    def _unfetched(self) -> Any:
        return self._whole._unfetched()

    def parts(self) -> tuple[Ref, ...]:
        return self._whole.parts()


class _Unread:
    """Value to send for a ref whose value has stayed elsewhere."""

    __slots__ = ("sent",)

    def __init__(self, sent: Any) -> None:
        self.sent = sent


class Arriving:
    """Argument that has not been fetched. It keeps the value until :meth:`fetched`.

    value: the stand-in for the value.
    """

    __slots__ = ("_frame", "value")

    def __init__(self, meta: bytes, frame: Any) -> None:
        self.value = Unfetched(meta, decode)
        self._frame = frame

    def fetched(self) -> None:
        """Let go of the value: it is needed no more."""
        self._frame = None


def _make_reducers(notes: dict[Any, Any]) -> dict[type, Any]:
    def reduce(unread: _Unread) -> Any:
        sent = notes.get(SENT)
        what = unread.sent
        if sent is None or sent.in_band or (sent.elsewhere() and not stays_afar(what)):
            return same, (what,)  # nobody would keep it, or its readers cannot get all of it
        # The object that keeps the value, where the frame does not do so by itself.
        if type(what) is Unfetched:
            keeper, meta = what._keeper, what.meta
        elif type(what) is Holding:
            keeper, meta = what.ref, what.snapshot.meta
        else:
            assert type(what) is _core.Snapshot
            keeper, meta = what, what.meta
        keep_beside(notes, keeper)
        # Memory of the frame: who has it, has the frame.
        return Arriving, (meta, PickleBuffer(bytes(8)))

    return {_Unread: reduce}


add_reducers(_make_reducers)


def elements_of(whole: Ref, count: int) -> Any:
    """Return the refs of ``count`` results: ``whole`` itself, where there is one."""
    return whole if count == 1 else [ElementRef(whole, i) for i in range(count)]


class ElementRef(DerivedRef):
    """Ref of one of several results."""

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
