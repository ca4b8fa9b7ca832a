"""Refs that are arguments of a method which says itself where their values go (``receive_into``): what they
stand for is not fetched before it runs."""

from __future__ import annotations

from pickle import PickleBuffer
from typing import Any

from conveyor import _core
from conveyor.codec import SENT, add_reducers
from conveyor.codec.direct import Unfetched, keep_beside
from conveyor.codec.frames import decode
from conveyor.runtime.refs.derived import DerivedRef
from conveyor.runtime.refs.holding import Holding, same
from conveyor.runtime.refs.ref import Ref
from conveyor.runtime.refs.staying import located, stays_afar


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
    """What is sent for a ref whose value has stayed elsewhere."""

    __slots__ = ("sent",)

    def __init__(self, sent: Any) -> None:
        self.sent = sent


class Arriving:
    """An argument that has not been fetched. It keeps the value until :meth:`fetched`.

    value: what has not been fetched.
    """

    __slots__ = ("_frame", "value")

    def __init__(self, meta: bytes, frame: Any) -> None:
        self.value = Unfetched(meta, decode)
        self._frame = frame

    def fetched(self) -> None:
        """It is needed no more."""
        self._frame = None


def _make_reducers(notes: dict[Any, Any]) -> dict[type, Any]:
    def reduce(unread: _Unread) -> Any:
        sent = notes.get(SENT)
        what = unread.sent
        if sent is None or sent.in_band or (sent.elsewhere() and not stays_afar(what)):
            return same, (what,)  # nobody would keep it, or its readers cannot get all of it
        # What keeps it, where the frame does not do so by itself.
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
