"""Interface to the store that keeps direct values here and fetches those of others, and their stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from conveyor import _core
from conveyor.codec.direct.located import Located
from conveyor.codec.direct.routes import Route
from conveyor.codec.direct.value import Direct
from conveyor.codec.encoded import DIRECT, KEPT, SENT
from conveyor.later import import_later


class Unfetched:
    """Stand-in for a value that has not been fetched."""

    __slots__ = ("_decode_any", "_keeper", "meta")

    def __init__(self, meta: bytes, decode_any: Callable[..., Any], keeper: Any = None) -> None:
        self.meta = meta
        self._decode_any = decode_any
        self._keeper = keeper

    @property
    def where(self) -> Located:
        """Place of the value."""
        return Located.unpack(self.meta)

    def here(self) -> Any:
        """Return the object that keeps the value, if this process keeps it, else ``None``."""
        return holder().find(self.where.number)

    def fetch(self) -> Any:
        """Fetch the value."""
        return holder().fetch(self.where, self._decode_any)

    def decode_with(self, buffers: list[Any]) -> Any:
        """Decode the value over ``buffers``, whose memory may be filled later."""
        where = self.where
        return self._decode_any(where.codec, where.meta, buffers)

    def where_part(self, index: tuple[Any, ...]) -> Located | None:
        """Return the place of a part of the value; ``None``: only the whole can be fetched.

        Raises:
            IndexError: there is no such part.
        """
        return holder().part(self.where, index)

    def part(self, index: tuple[Any, ...]) -> Any:
        """Return a part of the value, fetched alone where possible."""
        part = self.where_part(index) if self.here() is None else None
        if part is not None:
            return holder().fetch(part, self._decode_any)
        return self.fetch()[index[0] if len(index) == 1 else index]

    def moved(self, where: Located) -> Unfetched:
        """Return the same stand-in with another place."""
        return Unfetched(where.pack(), self._decode_any, self._keeper)

    def kept_by(self, keeper: Any) -> Unfetched:
        """Return the same stand-in, to be sent. The value is kept as long as ``keeper``, so that whoever
        receives the stand-in can fetch it."""
        return Unfetched(self.meta, self._decode_any, keeper)

    def reduced(self, notes: dict[Any, Any]) -> Any:
        """Reduce this for a pickle."""
        sent = notes.get(SENT)
        if sent is None or sent.in_band or (sent.elsewhere() and self.where.beside):
            return itself, (
                self.fetch(),
            )  # nobody would keep it, or its readers cannot get all of it
        keep_beside(notes, self._keeper)
        return self._decode_any, (DIRECT, self.meta)


def fetched(value: Any) -> Any:
    """Return ``value``, or the value that it stands for, fetched."""
    return value.fetch() if type(value) is Unfetched else value


def itself(value: Any) -> Any:
    return value


class Holder(Protocol):
    """Interface to this process's store of direct values, which is in a higher layer."""

    def route(self, direct: Direct) -> Route | None:
        """Return the route by which others get those tensors of the value that they cannot read; ``None``:
        there is none."""
        ...

    def keep(
        self,
        direct: Direct,
        codec: int,
        meta: bytes,
        buffers: list[Any],
        route: Route | None,
        tensors: list[Any],
    ) -> tuple[bytes, Any] | None:
        """Keep ``direct.value``, which was encoded as ``codec``, ``meta`` and ``buffers``, except for
        ``tensors``, which others get by ``route``. Returns the packed place of the value, and the object
        that keeps it: the value goes when that object is garbage. ``None``: no other process could get it."""
        ...

    def begin(self) -> None:
        """Prepare for keeping something here as long as somebody has a frame."""
        ...

    def find(self, number: int) -> Any:
        """Return the object that keeps the value of that number here, with its ``value``; ``None``: it is
        elsewhere."""
        ...

    def part(self, where: Located, index: tuple[Any, ...]) -> Located | None:
        """Return the place of a part of a value; see :meth:`Unfetched.where_part`."""
        ...

    def fetch_small(self, meta: bytes) -> tuple[int, bytes, list[Any]] | None:
        """Fetch a small value of another process, found by the meta bytes of its frame. Returns the codec,
        meta bytes and buffers to be decoded; ``None``: :meth:`fetch` may get it all the same."""
        ...

    def fetch(
        self, where: Located, decode: Callable[..., Any], sure: _core.InPlace | None = None
    ) -> Any:
        """Fetch a value, which is decoded with ``decode(codec, meta, buffers)``. ``sure``: a lease that
        keeps the value in place."""
        ...


_holder: Holder | None = None


def holder() -> Holder:
    """Return this process's holder, which is imported from above at the first need."""
    global _holder
    if _holder is None:
        _holder = import_later("conveyor.direct").HOLDER
    return _holder


def keep_beside(notes: dict[Any, Any], what: Any) -> None:
    """Keep ``what`` as long as anybody has the frame of the value that is being pickled with these notes."""
    holder().begin()
    notes.setdefault(KEPT, []).append(what)
