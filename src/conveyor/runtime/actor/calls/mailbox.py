"""Where calls of one caller come in, and where their results go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.codec import REFERENCES_OF_A_LOCAL, claims
from conveyor.codec.faults import NotThere
from conveyor.direct.awaiting import Attempts
from conveyor.later import import_later
from conveyor.runtime.calls.link_segment import link_limits, reply_offset
from conveyor.runtime.process import RESULT_BIT, Place, Process

if TYPE_CHECKING:
    import asyncio

    from conveyor.runtime.actor.calls.instance import Instance


class Undecoded:
    """A value of which something may have to be fetched from where it has stayed. It holds what it refers
    to. What :meth:`decode` raises may be tried again; what it has given once it is not asked for again."""

    __slots__ = ("_refs", "_snapshot")

    def __init__(self, snapshot: _core.Snapshot) -> None:
        self._snapshot = snapshot
        self._refs = claims.take(snapshot.meta) if snapshot.has_refs else ()

    def decode(self, fetches: bool = True) -> Any:
        """The value. Not ``fetches``: with what stands for a value (``Unfetched``) where one has stayed."""
        return self._snapshot.decode(fetches)


class Arriving:
    """What lets an event loop run on until a call can be decoded."""

    __slots__ = ("_attempts", "_call", "_ready")

    def __init__(self, snapshot: _core.Snapshot) -> None:
        self._call = Undecoded(snapshot)
        self._attempts = Attempts()
        # Of what was missing the last time.
        self._ready: Callable[[], bool] | None = None

    def decode(self) -> Any:
        """The call; ``EMPTY``: something is missing still."""
        if self._ready is not None and not self._ready():
            return _core.EMPTY
        try:
            return self._attempts.of(self._call.decode)
        except NotThere as one:
            self._ready = one.ready
            return _core.EMPTY

    def unfetched(self) -> Any:
        """The call, without what is missing."""
        return self._call.decode(fetches=False)

    def end(self) -> None:
        """It is decoded, or not needed any more."""
        self._attempts.end()


class Mailbox:
    """The actor's end of one caller's link."""

    def __init__(
        self,
        process: Process,
        segment: _core.Segment,
        caller: tuple[int, int],
        arena: _core.ArenaView,
        bit: int,
        one_by_one: bool = False,
    ) -> None:
        """``caller``: its place on the board, and which of the processes there it is; ``arena``: its own.
        ``one_by_one``: the actor runs one method at a time."""
        self.bit = bit
        self.caller = caller
        there = Place(*caller, RESULT_BIT)
        name = process.board.name(there.slot)
        self.reader = process.reader(
            segment, 0, 0, there, arena, f"calls from {name}", shared=False
        )
        self.reader.brings_work = one_by_one
        self.replies = process.writer(segment, reply_offset(segment), [there], "results of calls")
        self.replies.moved_refs = REFERENCES_OF_A_LOCAL
        self.limits = link_limits(segment)
        # Coroutines of calls, and how many cancellations they have been looked through for.
        self.running: dict[int, asyncio.Task[Any]] = {}
        self.cancellations = 0
        #: The next call, where not all of it is here. Those behind it wait for it.
        self.arriving: Arriving | None = None
        #: Its caller is dead, and its bit may be another one's.
        self.hung_up = False
        # Calls that run side by side may answer side by side.
        self.reply_lock = threading.Lock()

    def receive(self, instance: Instance, waits: bool) -> Any:
        """The next call, ``EMPTY`` if there is none. What it has of values that have stayed elsewhere is
        fetched: not ``waits``, then there is none until they are here."""
        reader = self.reader
        if waits:
            return instance.receive(reader.receive)
        if self.arriving is None:
            call = instance.receive(partial(reader.receive_undecoded, self._set_aside))
            if call is not self.arriving:
                return call
        assert self.arriving is not None
        read = (
            self.arriving.unfetched if self.limits.cancelled(reader.tag) else self.arriving.decode
        )
        try:
            call = instance.receive(read)
        except BaseException:
            self.drop_arriving()
            raise
        if call is not _core.EMPTY:
            self.drop_arriving()
        return call

    def _set_aside(self, snapshot: _core.Snapshot) -> Arriving:
        module = import_later("conveyor.runtime.actor.calls.mailbox")
        arriving: Arriving = module.Arriving(snapshot)
        self.arriving = arriving
        return arriving

    def drop_arriving(self) -> None:
        """What was to be fetched is here, or needed no more."""
        arriving, self.arriving = self.arriving, None
        if arriving is not None:
            arriving.end()

    def reply_error(self, tag: int, meta: bytes) -> None:
        with self.reply_lock:
            self.replies.send_error(meta, tag)
