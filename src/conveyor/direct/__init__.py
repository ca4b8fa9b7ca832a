"""Objects that stay on the actor that made them.

What ``codec.direct`` asks of a process is answered here: ``table`` is what it keeps for others, ``fetching``
gets what others keep, ``freed`` waits until nobody needs something any more.
"""

from __future__ import annotations

from typing import Any

from conveyor.codec.direct import Direct, Located
from conveyor.direct.fetching import fetch
from conveyor.direct.permission import others_may_read
from conveyor.direct.table import TABLE, Decode, Stored
from conveyor.runtime import context


class _Holder:
    """This process's: see ``codec.direct.Holder``."""

    def keep(
        self, direct: Direct, codec: int, meta: bytes, buffers: list[Any]
    ) -> tuple[Located, Stored] | None:
        runtime = context.current()
        if not others_may_read(runtime.own_actor is None):
            return None
        process = runtime.process
        process.keeping.start()
        stored = TABLE.keep(direct.value, buffers, direct.transport)
        slot, incarnation = process.identity
        where = Located(
            slot,
            incarnation,
            runtime.pid,
            stored.number,
            stored.anchor,
            process.board.name(slot),
            direct.transport,
            stored.ranges,
            codec,
            meta,
        )
        return where, stored

    def begin(self) -> None:
        context.current().process.keeping.start()

    def find(self, number: int) -> Stored | None:
        return TABLE.find(number)

    def fetch(self, where: Located, decode: Decode) -> Any:
        return fetch(where, decode)


HOLDER = _Holder()
