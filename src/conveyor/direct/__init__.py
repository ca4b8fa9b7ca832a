"""Objects that stay on the actor that made them.

What ``codec.direct`` asks of a process is answered here: ``table`` is what it keeps for others, ``fetching``
gets what others keep, ``freed`` waits until nobody needs something any more.
"""

from __future__ import annotations

from typing import Any

from conveyor.codec.direct import Direct, Located
from conveyor.codec.frames import decode
from conveyor.direct.fetching import fetch
from conveyor.direct.parts import part_of
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
        value = direct.value
        if direct.snapshot:
            buffers = [bytearray(buffer) for buffer in buffers]
            value = decode(codec, meta, buffers)
        stored = TABLE.keep(value, buffers, direct.transport)
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

    def part(self, where: Located, index: tuple[Any, ...]) -> Located | None:
        return part_of(where, index)

    def fetch(self, where: Located, decode_any: Decode) -> Any:
        return fetch(where, decode_any)


HOLDER = _Holder()
