"""Who keeps values here, and fetches those of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from conveyor import _core
from conveyor.codec.direct.located import Located
from conveyor.codec.direct.routes import Route
from conveyor.codec.direct.value import Direct
from conveyor.codec.encoded import KEPT
from conveyor.later import import_later


class Holder(Protocol):
    """This process's, which is in a higher layer."""

    def route(self, direct: Direct) -> Route | None:
        """How others get those tensors of the value that they cannot read; ``None``: it has none."""
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
        """Keep ``direct.value``, which was encoded as ``codec``, ``meta`` and ``buffers``, and but for
        ``tensors``, which others get by ``route``. Returns where it is, packed, and what keeps
        it: the value goes when that is garbage. ``None``: no other process could get it."""
        ...

    def begin(self) -> None:
        """Something is about to be kept here as long as somebody has a frame."""
        ...

    def find(self, number: int) -> Any:
        """What keeps the value of that number here, with its ``value``; ``None``: it is elsewhere."""
        ...

    def part(self, where: Located, index: tuple[Any, ...]) -> Located | None:
        """Where a part of a value is; see :meth:`Unfetched.where_part`."""
        ...

    def fetch_small(self, meta: bytes) -> tuple[int, bytes, list[Any]] | None:
        """What is to be decoded of a small value of another process, said by the meta bytes of its frame.
        ``None``: :meth:`fetch` may have it all the same."""
        ...

    def fetch(
        self, where: Located, decode: Callable[..., Any], sure: _core.InPlace | None = None
    ) -> Any:
        """Fetch a value, which is decoded with ``decode(codec, meta, buffers)``. ``sure``: what keeps it
        where it lies."""
        ...


_holder: Holder | None = None


def holder() -> Holder:
    """This process's, which is above and comes when it is first needed."""
    global _holder
    if _holder is None:
        _holder = import_later("conveyor.direct").HOLDER
    return _holder


def keep_beside(notes: dict[Any, Any], what: Any) -> None:
    """Keep ``what`` as long as anybody has the frame of the value that is being pickled, whose notes are
    these."""
    holder().begin()
    notes.setdefault(KEPT, []).append(what)
