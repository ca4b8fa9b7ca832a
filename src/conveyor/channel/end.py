"""An end of a channel, as the process has it that sends or receives there."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from msgspec.structs import replace

from conveyor import _core
from conveyor.channel.present import Key, PresentEnds
from conveyor.exceptions import ChannelClosedError, RuntimeStateError
from conveyor.runtime import context, ending
from conveyor.runtime.meeting import SIDES, ClosedWord, Meeting, Side, closed_error, other
from conveyor.runtime.protocol import Runtime
from conveyor.runtime.shortage import Sending
from conveyor.runtime.uninterrupted import uninterrupted
from conveyor.runtime.waiting import wait_until


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Counters of one end, from the channel's beginning on."""

    #: How many values the channel holds that were sent and not received yet, at most.
    depth: int
    #: Values that this end has sent or received.
    values: int
    #: Bytes of them, as they are encoded.
    bytes: int
    #: Values that were sent and not received yet.
    waiting: int


EndT = TypeVar("EndT", bound="End")

_ends: PresentEnds[End] = PresentEnds()


class End:
    """Base of both ends of a channel. Several threads may use an end at a time."""

    __slots__ = (
        "__weakref__",
        "_busy",
        "_closed",
        "_depth",
        "_here",
        "_lock",
        "_meeting",
        "_number",
        "_over",
        "_passed",
        "_ref",
        "_runtime",
        "_there",
        "_used",
    )

    _side: ClassVar[Side]
    _class_of: ClassVar[dict[Side, type[End]]] = {}

    def __init_subclass__(cls, side: Side, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._side = side
        End._class_of[side] = cls

    def __init__(self, runtime: Runtime, number: int, depth: int) -> None:
        """Ends are made by ``conveyor.channel.open``."""
        self._runtime = runtime
        self._number = number
        self._depth = depth
        #: Reentrant: a signal handler may close an end in the middle of anything.
        self._lock: threading.RLock | _InheritedLock = threading.RLock()
        self._meeting: Meeting | None = None
        self._here: ClosedWord | None = None
        self._there: ClosedWord | None = None
        self._used = self._passed = False
        #: Nothing more is done here; and whoever has to be told of that was told.
        self._closed = self._over = False
        #: A value is being sent. Whoever closes the end in the midst of that, which is a handler or what is
        #: called to encode the value, leaves the rest to the one that sends: so the value comes before.
        self._busy = False
        #: The reference by which this end is entered among those of this process.
        self._ref = weakref.ref(self)

    @property
    def closed(self) -> bool:
        """Whether this end was closed, here."""
        return self._closed

    def close(self) -> None:
        """Send or receive nothing more. What was sent can still be received; whoever waits at the other
        end is told. Does nothing the second time."""
        if self._over:
            return
        if self._meeting is None:
            uninterrupted(self._close)
        else:
            self._close()

    def _close(self) -> None:
        """Close the end. Every step can be taken twice: if a signal handler breaks one off, the next attempt
        or the finalizer does the rest."""
        with self._lock:
            if self._over:
                return
            self._closed = True
            if self._busy:
                return
            if not self._runtime.ending:
                self.hang_up()
                if self._driver_knows:
                    self._runtime.introductions.close(self._number, self._side)
                self._let_go()
                self._runtime.process.ring()  # threads of this process may wait here
            self._over = True

    def statistics(self) -> ChannelStatistics:
        """Return the counters of this end."""
        raise NotImplementedError

    def __enter__(self: EndT) -> EndT:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        runtime = self._runtime
        if self._closed or runtime.ending:
            why = "is closed" if self._closed else "belongs to a session that has ended"
            raise RuntimeStateError(f"{self!r} cannot be passed on: it {why}")
        if self._used:
            raise RuntimeStateError(
                f"{self!r} cannot be passed on: it was used here, and an end belongs to the process that "
                "first uses it. Pass it on before anything is sent or received at either end"
            )
        self._passed = True
        return load, (runtime.exports.session, self._number, self._side, self._depth)

    def __repr__(self) -> str:
        return f"<{SIDES[self._side]} end of channel {self._number}>"

    def __del__(self) -> None:
        # No lock is taken here, as this may run in the middle of anything.
        ref: weakref.ref[End] | None = getattr(self, "_ref", None)
        if ref is None or not _ends.leave(self._key(self._side), ref):
            return  # it is not this process's end: another object is, or will be
        runtime = self._runtime
        if self._over or runtime.pid != os.getpid() or runtime.ending:
            return
        self.hang_up()
        if self._driver_knows and (self._closed or not self._passed):
            # Else another process has it.
            runtime.chores.soon(partial(runtime.introductions.close, self._number, self._side))

    def _key(self, side: Side) -> Key:
        """Return the key of the end of this channel on that side, by which this process finds it."""
        return self._runtime.exports.session, self._number, side

    # Meeting

    def _begin(self) -> None:
        """This end is about to be used for the first time: from then on the other one may be."""

    def _open(self, meeting: Meeting) -> None:
        """Open this end, since the process at the other end is known."""
        raise NotImplementedError

    def _let_go(self) -> None:
        """This end is closed."""
        raise NotImplementedError

    def _settled(self) -> bool:
        """Whether an attempt would end, now that both have met: by doing it or by an error."""
        raise NotImplementedError

    @property
    def _met(self) -> bool:
        """Whether both ends are used, so that something can be sent. Asks for it if that is not known, which
        no handler breaks off: an end is told of the other one once. Not with the lock, since this may be
        done by another thread: which is dear, so it is not done for each look of who waits."""
        introductions = self._runtime.introductions
        if self._partner is None and introductions.awaits(self._number, self._side):
            with self._lock:
                self._check()
            return False
        return uninterrupted(self._meet)

    @property
    def _partner(self) -> End | None:
        """Return the other end, if this process has it as well."""
        there = _ends.find(self._key(other(self._side)))
        return None if there is None or there._passed else there

    def _meet(self) -> bool:
        with self._lock:
            self._check()
            return self._meeting is not None or self._have_met()

    def _have_met(self) -> bool:
        if not self._used:
            self._used = True
            self._begin()
        runtime, number = self._runtime, self._number
        there = self._partner
        meeting = runtime.introductions.meet(number, self._side, there is not None)
        if meeting is None:
            return False
        if there is not None:
            there._used = True
        try:
            self._here = ClosedWord(meeting.segment, self._side)
            self._there = ClosedWord(meeting.segment, other(self._side))
            self._open(meeting)
            # Without the view: who holds an end keeps no arena of a session that has ended.
            self._meeting = replace(meeting, view=None)
            self._runtime.process.hangs_up(self)
        except BaseException:
            # The channel is not introduced again: the other end is told.
            self._closed = True
            ClosedWord(meeting.segment, self._side).mark()
            self._runtime.process.board.ring(meeting.slot, _core.ATTENTION_BIT)
            if meeting.spread:
                runtime.chores.soon(partial(runtime.introductions.close, number, self._side))
            raise
        if self._closed:  # by a finalizer, in the midst of this
            self.hang_up()
        return True

    def _check(self) -> None:
        """Raise if this end cannot be used any more."""
        if self._closed:
            raise closed_error(self._number, self._side)
        if self._runtime.ending:
            raise ending.error()

    def hang_up(self) -> None:
        """Tell the process at the other end, if it is known, that nothing more is done at this one."""
        meeting, here = self._meeting, self._here
        if meeting is not None and here is not None:
            here.mark(self._sent)
            self._runtime.process.board.ring(meeting.slot, _core.ATTENTION_BIT)

    @property
    def _driver_knows(self) -> bool:
        """Whether the driver has to be told that this end is closed."""
        meeting = self._meeting
        return meeting is None or meeting.spread

    @property
    def _sent(self) -> int:
        """How many values this end has sent."""
        return 0

    @property
    def _gone(self) -> bool:
        """Whether the process at the other end is no more."""
        meeting = self._meeting
        assert meeting is not None
        return self._runtime.process.board.gone(meeting.slot, meeting.incarnation)

    def _closed_there(self) -> ChannelClosedError:
        return closed_error(self._number, other(self._side))

    def _death(self) -> Exception:
        """Return the error for the death of the process at the other end."""
        meeting = self._meeting
        assert meeting is not None
        return self._runtime.introductions.death(meeting)

    # Waiting

    def _wait(
        self,
        ready: Callable[[], bool],
        timeout: float | None,
        sending: Sending | None = None,
    ) -> None:
        """Wait until ``ready()``, or until the time is over. ``sending``: may wait for memory."""
        process = self._runtime.process

        def ready_or_over() -> bool:
            if not ready():
                if process.waits_end:
                    raise ending.error()
                return False
            return True

        def what() -> str:
            short = sending is not None and sending.wait is not None
            return f"memory for a value of channel {self._number}" if short else self._describe()

        def who() -> str:
            return (sending is not None and sending.why) or self._doing()

        wait_until(self._runtime.inbox, ready_or_over, timeout, what, who)

    async def _wait_async(self) -> None:
        """Wait until another attempt may succeed."""
        from conveyor.runtime import aio  # asyncio is slow to import

        await aio.wait_until(self._worth_trying)

    def _worth_trying(self) -> bool:
        try:
            if self._meeting is None and not self._met:
                return False
            with self._lock:
                return self._closed or self._runtime.ending or self._settled()
        except Exception:  # the attempt raises it
            return True

    def _describe(self) -> str:
        """Describe what a caller of this end is waiting for."""
        if self._meeting is None:
            return f"the {SIDES[other(self._side)]} end of channel {self._number} to be used"
        return self._awaited()

    def _awaited(self) -> str:
        """Describe what a caller is waiting for the process at the other end to do."""
        raise NotImplementedError

    def _doing(self) -> str:
        meeting = self._meeting
        if meeting is None:
            return "no process has used it yet"
        process = self._runtime.process
        return f"{process.board.name(meeting.slot)} is {process.describe(meeting.slot)}"


class _InheritedLock:
    """Substitute for an end's lock in a forked child: entering it raises. A thread of the parent, which the
    child does not have, may have held the real lock, so nobody must wait for that."""

    def __init__(self, end: End) -> None:
        self._error = f"{end!r} belongs to the process that this one was forked from"

    def __enter__(self) -> None:
        raise RuntimeStateError(self._error)

    def __exit__(self, *_: object) -> None:
        """Do nothing: the lock was not entered."""


def _disown() -> None:
    """This process is a forked child: the ends are its parent's."""
    for end in _ends.all():
        end._lock = _InheritedLock(end)


os.register_at_fork(after_in_child=_disown)


def make(runtime: Runtime, number: int, side: Side, depth: int) -> End:
    """Return an end of a channel of this session; always the same object in a process."""
    key = runtime.exports.session, number, side
    known = _ends.find(key)
    if known is not None:
        return known
    end = End._class_of[side](runtime, number, depth)
    return _ends.enter(key, end._ref) or end


def load(session: str, number: int, side: Side, depth: int) -> End:
    """Load a pickled end."""
    runtime = context.running()
    if runtime is None or runtime.exports.session != session:
        raise RuntimeStateError(
            f"channel {number} belongs to another session: an end of a channel can only be passed to the "
            "driver and the actors of the session that it was opened in"
        )
    end = make(runtime, number, side, depth)
    end._passed = False
    runtime.introductions.hold(number, side)
    return end
