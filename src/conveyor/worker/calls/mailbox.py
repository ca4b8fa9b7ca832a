"""The actor's end of one caller's link: calls come in, and their results go out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.calls.link_segment import link_limits, reply_offset
from conveyor.codec import REFERENCES_OF_A_LOCAL, claims
from conveyor.codec.faults import NotThere
from conveyor.direct.awaiting import Attempts
from conveyor.later import import_later
from conveyor.runtime.process import RESULT_BIT, Place, Process

if TYPE_CHECKING:
    import asyncio

    from conveyor.worker.calls.instance import Instance


class Undecoded:
    """An encoded value, parts of which may have to be fetched from other processes. It holds the references
    in it. If :meth:`decode` raises, it may be tried again; once it has returned, it is not called again."""

    __slots__ = ("_refs", "_snapshot")

    def __init__(self, snapshot: _core.Snapshot) -> None:
        self._snapshot = snapshot
        self._refs = claims.take(snapshot.meta) if snapshot.has_refs else ()

    def decode(self, fetches: bool = True) -> Any:
        """Return the value. With ``fetches`` false, an ``Unfetched`` stands for each value that has stayed
        with its owner."""
        return self._snapshot.decode(fetches)


class Arriving:
    """A call, or an input, that is decoded while an event loop runs on: its values are still being
    fetched."""

    __slots__ = ("_attempts", "_call", "_ready")

    def __init__(self, snapshot: _core.Snapshot) -> None:
        self._call = Undecoded(snapshot)
        self._attempts = Attempts()
        # Whether the values that were missing the last time are here.
        self._ready: Callable[[], bool] | None = None

    def decode(self) -> Any:
        """Return the call, or ``EMPTY`` while something is missing."""
        if self._ready is not None and not self._ready():
            return _core.EMPTY
        try:
            return self._attempts.of(self._call.decode)
        except NotThere as one:
            self._ready = one.ready
            return _core.EMPTY

    def unfetched(self) -> Any:
        """Return the call without its missing values."""
        return self._call.decode(fetches=False)

    def end(self) -> None:
        """Give up fetches under way: the call is decoded, or not needed any more."""
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
        """``caller``: the slot and incarnation of the caller's process; ``arena``: the caller's.
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
        # Coroutines of calls, and the number of cancellations that these have been checked for.
        self.running: dict[int, asyncio.Task[Any]] = {}
        self.cancellations = 0
        #: The next call, while parts of it are missing. Later calls wait for it.
        self.arriving: Arriving | None = None
        #: Whether the caller is dead. The bit may be another caller's by then.
        self.hung_up = False
        # Calls that run side by side may answer side by side.
        self.reply_lock = threading.Lock()

    def receive(self, instance: Instance, waits: bool) -> Any:
        """Return the next call, or ``EMPTY``. The call's values that are stored elsewhere are fetched:
        ``waits`` says whether this waits for them, or returns ``EMPTY`` until they are here."""
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
        module = import_later("conveyor.worker.calls.mailbox")
        arriving: Arriving = module.Arriving(snapshot)
        self.arriving = arriving
        return arriving

    def drop_arriving(self) -> None:
        """Forget the call that was being fetched: it is here, or not needed any more."""
        arriving, self.arriving = self.arriving, None
        if arriving is not None:
            arriving.end()

    def reply_error(self, tag: int, meta: bytes) -> None:
        with self.reply_lock:
            self.replies.send_error(meta, tag)
