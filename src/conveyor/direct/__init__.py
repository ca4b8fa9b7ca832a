"""Objects that stay on the actor that made them.

What ``codec.direct`` asks of a process is answered here: ``store`` keeps values for others, and ``fetching``
gets theirs, from other hosts too, and for event loops. Some values are got in another way than by reading:
``devices`` has the one for tensors of devices, ``managers`` those that users have written. ``parts`` has a
part of a value fetched, and ``into`` gets one into memory that is there; both look into it with
``structure``. ``listing`` says who keeps and who holds which value.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from conveyor import _core
from conveyor.codec.direct import Direct, File, Located, OutOfBand, Route, names_of, packed
from conveyor.codec.frames import decode
from conveyor.dag.hints import known_transports
from conveyor.device import in_use as devices_in_use
from conveyor.direct.fetching import decode_with, fetch
from conveyor.direct.parts import part_of
from conveyor.direct.store import TABLE, Decode, Stored, let_session_read
from conveyor.later import import_later
from conveyor.runtime import context
from conveyor.runtime.process import Process
from conveyor.runtime.protocol import Runtime


class _Me(NamedTuple):
    """Identity of this process, as the frames of its values name it.

    identity: slot, incarnation and pid.
    file: its arena's.
    names: by transport, and by whether it is of snapshots, the bytes for ``Located.names``.
    """

    process: Process
    may_be_read: bool
    identity: tuple[int, int, int]
    name: str
    file: File
    names: dict[tuple[str, bool], bytes]

    @classmethod
    def of(cls, runtime: Runtime) -> _Me:
        process = runtime.process
        identity = (*process.identity, runtime.pid)
        readable = let_session_read(runtime.own_actor is None)
        name = process.process_table.name(process.slot)
        return cls(process, readable, identity, name, File(*process.arena.file), {})


class _Holder:
    """Store of this process for direct values: see ``codec.direct.Holder``."""

    def __init__(self) -> None:
        self._me: _Me | None = None

    def route(self, direct: Direct) -> Route | None:
        if direct.transport not in known_transports:
            managers = import_later("conveyor.direct.managers.registry")
            managed: Route | None = managers.route(direct.transport)
            if managed is not None:
                return managed
        if "torch" in sys.modules and devices_in_use():
            devices: Route = import_later("conveyor.direct.devices").DEVICES
            return devices
        return None

    def keep(
        self,
        direct: Direct,
        codec: int,
        meta: bytes,
        buffers: list[Any],
        route: Route | None,
        tensors: list[Any],
    ) -> tuple[bytes, Stored] | None:
        me = self._me
        if me is None or me.process is not context.current().process:
            me = self._me = _Me.of(context.current())
        if not me.may_be_read:
            return None
        me.process.releasing.start()
        value = direct.value
        if direct.snapshot:
            buffers = [bytearray(buffer) for buffer in buffers]
            tensors = [tensor if route is None else route.copied(tensor) for tensor in tensors]
            value = decode_with(codec, meta, buffers, tensors, decode)
        stored = TABLE.keep(value, buffers, direct.transport, route, tensors, direct.snapshot)
        if stored is None or not _core.readable(stored.ranges):
            return None
        what = direct.transport, direct.snapshot
        names = me.names.get(what)
        if names is None:
            names = me.names[what] = names_of(direct.transport, me.name, direct.snapshot)
        aside = b""
        if stored.out_of_band is not None:
            on, note, _ = stored.out_of_band
            aside = OutOfBand(on, on.specs(tensors), note).pack()
        identity = *me.identity, stored.number, stored.anchor
        arena_ranges = _core.ranges_in_arena(stored.ranges, me.process.arena)
        if arena_ranges:
            arena_ranges = me.file.pack() + arena_ranges
            by = "" if stored.out_of_band is None else stored.out_of_band.route.name
            stored.lies_in(me.process.arena, value, direct.transport, by, direct.snapshot)
        return packed(*identity, names, stored.ranges, codec, meta, aside, arena_ranges), stored

    def begin(self) -> None:
        context.current().process.releasing.start()

    def find(self, number: int) -> Stored | None:
        return TABLE.find(number)

    def part(self, where: Located, index: tuple[Any, ...]) -> Located | None:
        return part_of(where, index)

    def fetch_small(self, meta: bytes) -> tuple[int, bytes, list[_core.Buffer]] | None:
        runtime = context.running()
        if runtime is None:
            return None
        process = runtime.process
        return _core.fetch_small(meta, process.process_table, process.slot)

    def fetch(self, where: Located, decode_any: Decode, sure: _core.InPlace | None = None) -> Any:
        return fetch(where, decode_any, sure)


HOLDER = _Holder()
