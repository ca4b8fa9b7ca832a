"""Channels: typed values from one process of a session to another, in order, through shared memory.

``sender, receiver = conveyor.channel.open[int](depth=8)``. Either end can be passed to an actor, as an
argument.
"""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from msgspec.structs import replace

from conveyor import _core
from conveyor.checks import check_timeout
from conveyor.exceptions import ChannelClosedError, RuntimeStateError
from conveyor.later import LaterModule
from conveyor.runtime import context, ending
from conveyor.runtime.broker import (
    RECEIVING,
    SENDING,
    SIDES,
    ChannelPeer,
    ClosedWord,
    Side,
    closed_error,
    other,
)
from conveyor.runtime.process import RESULT_BIT, RingEnd, slots_of
from conveyor.runtime.protocol import Runtime
from conveyor.runtime.shortage import Sending
from conveyor.runtime.uninterrupted import uninterrupted
from conveyor.runtime.waiting import wait_until
from conveyor.typevars import ItemT, SentT, ValueT

# It brings asyncio, which is slow to import.
aio: Any = LaterModule("conveyor.runtime.aio")

__all__ = ["Channel", "ChannelStatistics", "Receiver", "Sender", "open"]

PresentT = TypeVar("PresentT")

Key = tuple[str, int, Side]
"""An end: the session, the number of the channel, and the side."""


class PresentEnds(Generic[PresentT]):
    """Table of the ends of channels in this process, by key, so that an end that comes again is the same
    object.

    The maker of an end enters it, and the end's finalizer takes it out. An end that was not entered, since
    another was there already, or that another has replaced, belongs to nobody: it does not announce its own
    end. No lock is taken, since ends come and go in finalizers and signal handlers, too. Each step on the
    table is one operation of a dictionary instead, and is repeated if another one has come between.
    """

    def __init__(self) -> None:
        self._refs: dict[Key, weakref.ref[PresentT]] = {}

    def all(self) -> list[PresentT]:
        """The ends that this process has."""
        found = [ref() for ref in list(self._refs.values())]
        return [end for end in found if end is not None]

    def find(self, key: Key) -> PresentT | None:
        """Return the end with that key, if this process has it."""
        ref = self._refs.get(key)
        return None if ref is None else ref()

    def enter(self, key: Key, own: weakref.ref[PresentT]) -> PresentT | None:
        """Enter an end and return ``None``, or return the end that is there already and stays."""
        while True:
            known = self._refs.setdefault(key, own)
            if known is own:
                return None
            end = known()
            if end is not None:
                return end
            self.leave(key, known)  # it is garbage, and its finalizer has not run yet

    def leave(self, key: Key, own: weakref.ref[PresentT]) -> bool:
        """Take an end out; false if it is not there."""
        if self._refs.get(key) is not own:
            return False
        found = self._refs.pop(key, None)
        if found is not None and found is not own:  # it has been replaced just now
            self._refs.setdefault(key, found)
        return found is own


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
        "_number",
        "_over",
        "_passed",
        "_peer",
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
        self._peer: ChannelPeer | None = None
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
        if self._peer is None:
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
                    self._runtime.broker.close(self._number, self._side)
                self._let_go()
                self._runtime.process.notify()  # threads of this process may wait here
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
            runtime.cleanup.soon(partial(runtime.broker.close, self._number, self._side))

    def _key(self, side: Side) -> Key:
        """Return the key of the end of this channel on that side, by which this process finds it."""
        return self._runtime.exports.session, self._number, side

    # Meeting

    def _begin(self) -> None:
        """This end is about to be used for the first time: from then on the other one may be."""

    def _open(self, peer: ChannelPeer) -> None:
        """Open this end, since the process at the other end is known."""
        raise NotImplementedError

    def _let_go(self) -> None:
        """This end is closed."""
        raise NotImplementedError

    def _would_end(self) -> bool:
        """Whether an attempt would end, now that both have met: by doing it or by an error."""
        raise NotImplementedError

    @property
    def _met(self) -> bool:
        """Whether both ends are used, so that something can be sent. Asks for it if that is not known, which
        no handler breaks off: an end is told of the other one once. Not with the lock, since this may be
        done by another thread: which is dear, so it is not done for each look of who waits."""
        broker = self._runtime.broker
        if self._partner is None and broker.awaits(self._number, self._side):
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
            return self._peer is not None or self._have_met()

    def _have_met(self) -> bool:
        if not self._used:
            self._used = True
            self._begin()
        runtime, number = self._runtime, self._number
        there = self._partner
        peer = runtime.broker.meet(number, self._side, there is not None)
        if peer is None:
            return False
        if there is not None:
            there._used = True
        try:
            self._here = ClosedWord(peer.segment, self._side)
            self._there = ClosedWord(peer.segment, other(self._side))
            self._open(peer)
            # Without the view: who holds an end keeps no arena of a session that has ended.
            self._peer = replace(peer, view=None)
            self._runtime.process.hangs_up(self)
        except BaseException:
            # The channel is not introduced again: the other end is told.
            self._closed = True
            ClosedWord(peer.segment, self._side).mark()
            self._runtime.process.process_table.notify(peer.slot, _core.ATTENTION_BIT)
            if peer.spread:
                runtime.cleanup.soon(partial(runtime.broker.close, number, self._side))
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

    @property
    def pending(self) -> bool:
        """Whether this end reads values of a process that is still unknown."""
        return False

    def hang_up(self) -> None:
        """Tell the process at the other end, if it is known, that nothing more is done at this one."""
        peer, here = self._peer, self._here
        if peer is not None and here is not None:
            here.mark(self._sent)
            self._runtime.process.process_table.notify(peer.slot, _core.ATTENTION_BIT)

    @property
    def _driver_knows(self) -> bool:
        """Whether the driver has to be told that this end is closed."""
        peer = self._peer
        return peer is None or peer.spread

    @property
    def _sent(self) -> int:
        """How many values this end has sent."""
        return 0

    @property
    def _gone(self) -> bool:
        """Whether the process at the other end is no more."""
        peer = self._peer
        assert peer is not None
        return self._runtime.process.process_table.gone(peer.slot, peer.incarnation)

    def _closed_there(self) -> ChannelClosedError:
        return closed_error(self._number, other(self._side))

    def _death(self) -> Exception:
        """Return the error for the death of the process at the other end."""
        peer = self._peer
        assert peer is not None
        return self._runtime.broker.death(peer)

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
        await aio.wait_until(self._worth_trying)

    def _worth_trying(self) -> bool:
        try:
            if self._peer is None and not self._met:
                return False
            with self._lock:
                return self._closed or self._runtime.ending or self._would_end()
        except Exception:  # the attempt raises it
            return True

    def _describe(self) -> str:
        """Describe what a caller of this end is waiting for."""
        if self._peer is None:
            return f"the {SIDES[other(self._side)]} end of channel {self._number} to be used"
        return self._awaited()

    def _awaited(self) -> str:
        """Describe what a caller is waiting for the process at the other end to do."""
        raise NotImplementedError

    def _doing(self) -> str:
        peer = self._peer
        if peer is None:
            return "no process has used it yet"
        process = self._runtime.process
        return f"{process.process_table.name(peer.slot)} is {process.describe(peer.slot)}"


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
    runtime.broker.hold(number, side)
    return end


class Sender(End, Generic[SentT], side=SENDING):
    """The end that values go in at. ``with sender:`` closes it at the end of the block; an end that nobody
    refers to any more is closed as well."""

    __slots__ = ("_writer",)

    def __init__(self, runtime: Runtime, number: int, depth: int) -> None:
        super().__init__(runtime, number, depth)
        self._writer: _core.Writer | None = None

    def send(self, value: SentT, timeout: float | None = None) -> None:
        """Send a value; waits while the channel is full, while memory is
        short that is about to be freed, and until the receiving end is used.

        timeout: seconds (``None`` or -1: no limit). Raises ``WaitTimeoutError`` when the time is over
        (then nothing was sent), ``ChannelClosedError`` if either end is closed, ``ActorDiedError`` if the
        process at the receiving end is gone, ``SerializationError`` for what cannot be sent, and
        ``ArenaFullError`` where there is no memory and nobody is about to free any. It does not wait for the
        value to be received: a process that dies may leave values behind.
        """
        timeout = check_timeout(timeout)  # before anything is sent
        with self._sending(value, True) as sending:
            if not sending.try_once():
                self._wait(sending.try_once, timeout, sending)

    async def send_async(self, value: SentT) -> None:
        """Like :meth:`send`; other tasks of the event loop go on meanwhile."""
        with self._sending(value, False) as sending:
            while not sending.try_once():
                if sending.wait is None:
                    await self._wait_async()
                else:
                    await aio.wait_until(sending.ready, lambda _: sending.causes())

    def _sending(self, value: SentT, blocks: bool) -> Sending:
        return Sending(
            lambda: self._offer(value),
            lambda: self._runtime.process.shortage.made(blocks),
            self._is_over,
        )

    def _is_over(self) -> bool:
        """Whether nothing can be sent any more."""
        with self._lock:
            return self._closed or self._runtime.ending or self._closed_at_the_other or self._gone

    def statistics(self) -> ChannelStatistics:
        with self._lock:
            writer, peer = self._writer, self._peer
            if writer is None or peer is None:
                return ChannelStatistics(self._depth, 0, 0, 0)
            sent, taken = peer.segment.progress(0)
            return ChannelStatistics(self._depth, writer.count, writer.bytes, sent - taken[0])

    def _offer(self, value: SentT) -> bool:
        if self._peer is None and not self._met:
            return False
        with self._lock:
            self._check()
            # Looked at before what follows: an end says that it is closed, and then makes room.
            has_room = self._has_room()
            if self._closed_at_the_other:
                raise self._closed_there()
            if self._gone:
                raise self._death()
            writer = self._writer
            assert writer is not None
            within, self._busy = self._busy, True
            try:
                return has_room and writer.send(value, writer.count)
            finally:
                self._busy = within
                if self._closed:  # meanwhile
                    self._close()

    def _has_room(self) -> bool:
        writer = self._writer
        assert writer is not None
        if not writer.has_room:
            writer.wants_room()
        return writer.has_room

    def _would_end(self) -> bool:
        return self._closed_at_the_other or self._gone or self._has_room()

    @property
    def _closed_at_the_other(self) -> bool:
        assert self._there is not None
        return self._there.after(0)

    @property
    def _sent(self) -> int:
        writer = self._writer
        return 0 if writer is None else writer.count

    def _open(self, peer: ChannelPeer) -> None:
        target = RingEnd(peer.slot, peer.incarnation, RESULT_BIT)
        carries = f"channel {self._number}"
        self._writer = self._runtime.process.writer(peer.segment, 0, [target], carries)

    def _let_go(self) -> None:
        """Do nothing: what was sent stays in the channel."""

    def _awaited(self) -> str:
        return f"room in channel {self._number}: all of its {self._depth} places are taken"


_ReceiverT = TypeVar("_ReceiverT", bound="Receiver[Any]")


class Receiver(End, Generic[ValueT], side=RECEIVING):
    """The end that values come out of, in the order in which they were sent. ``for value in receiver``, and
    ``async for``, end when the sending end is closed and all has been received. ``with receiver:`` closes it
    at the end of the block; an end that nobody refers to any more is closed as well."""

    __slots__ = ("_reader",)

    def __init__(self, runtime: Runtime, number: int, depth: int) -> None:
        super().__init__(runtime, number, depth)
        self._reader: _core.Reader | None = None

    def receive(self, timeout: float | None = None) -> ValueT:
        """Wait for the next value and return it.

        timeout: seconds (``None`` or -1: no limit). Raises ``WaitTimeoutError`` when the time is over
        (the value can still be had), ``ChannelClosedError`` if this end is closed, or the sending one is and
        all has been received, and ``ActorDiedError`` if the process at the sending end is gone and all that
        it has sent was received.
        """
        timeout = check_timeout(timeout)  # before anything is taken
        value: Any = self._take()
        if value is _core.EMPTY:

            def ready() -> bool:
                nonlocal value
                value = self._take()
                return value is not _core.EMPTY

            self._wait(ready, timeout)
        found: ValueT = value
        return found

    async def receive_async(self) -> ValueT:
        """Like :meth:`receive`; other tasks of the event loop go on meanwhile."""
        while True:
            value: Any = self._take()
            if value is not _core.EMPTY:
                found: ValueT = value
                return found
            await self._wait_async()

    def __iter__(self: _ReceiverT) -> _ReceiverT:
        return self

    def __next__(self) -> ValueT:
        try:
            return self.receive()
        except ChannelClosedError:
            if self._closed:
                raise
            raise StopIteration from None

    def __aiter__(self: _ReceiverT) -> _ReceiverT:
        return self

    async def __anext__(self) -> ValueT:
        try:
            return await self.receive_async()
        except ChannelClosedError:
            if self._closed:
                raise
            raise StopAsyncIteration from None

    def statistics(self) -> ChannelStatistics:
        with self._lock:
            reader = self._reader
            if reader is None:
                return ChannelStatistics(self._depth, 0, 0, 0)
            waiting = 0 if self._closed else reader.available
            return ChannelStatistics(self._depth, reader.count, reader.bytes, waiting)

    def under_way(self) -> tuple[()]:
        return ()

    def leave(self) -> None:
        """Leave the session, which has ended; see ``runtime.process.Reading``."""
        with self._lock:
            if self._reader is not None:
                self._reader.close()
        self._runtime.process.sources.look()

    def _take(self) -> Any:
        """Return the next value, or ``EMPTY``."""
        if self._peer is None and not self._met:
            return _core.EMPTY
        with self._lock:
            self._check()
            # Looked for before the value is: all was sent before the end was closed, or its process gone.
            over, gone = self._nothing_comes, self._gone
            reader = self._reader
            assert reader is not None
            value = reader.receive()
            if value is _core.EMPTY and over:
                raise self._closed_there()
            if value is _core.EMPTY and gone:
                raise self._death()
            return value

    def _would_end(self) -> bool:
        reader = self._reader
        assert reader is not None
        return self._nothing_comes or self._gone or not reader.empty

    @property
    def _nothing_comes(self) -> bool:
        """Whether the sending end was closed and all values that it sent were received."""
        assert self._reader is not None
        assert self._there is not None
        return self._there.after(self._reader.count)

    @property
    def pending(self) -> bool:
        """Whether values that have come may lie in the ring before this end is opened; see
        ``runtime.sources.ChannelEnd``."""
        return self._reader is None and not self._closed

    def _begin(self) -> None:
        self._runtime.process.sources.expect(self)

    def _open(self, peer: ChannelPeer) -> None:
        process, writer = (
            self._runtime.process,
            RingEnd(peer.slot, peer.incarnation, RESULT_BIT),
        )
        assert peer.view is not None
        carries = f"channel {self._number}"
        self._reader = process.reader(peer.segment, 0, 0, writer, peer.view, carries, shared=False)
        process.reads(self)
        process.sources.look()

    def _let_go(self) -> None:
        self.leave()

    def _awaited(self) -> str:
        return f"a value from channel {self._number}"


#: Values that a channel may hold, at most.
MOST_DEPTH = 1 << 16


class Channel(tuple[Sender[ItemT], Receiver[ItemT]]):
    """A new channel: ``sender, receiver = Channel(depth=8)``.

    depth: how many values may be sent before the first of them is received; then sending waits. It is rounded
    up to a power of two.

    Both ends are this process's at first. Each can be passed on before it is used, and belongs to the process
    that first uses it. Starts a session where there is none.
    """

    __slots__ = ()

    def __new__(cls, depth: int = 8) -> Channel[ItemT]:
        depth = _checked(depth)
        runtime = context.current()
        number = runtime.broker.open(depth)
        sender: Any = make(runtime, number, SENDING, depth)
        receiver: Any = make(runtime, number, RECEIVING, depth)
        return super().__new__(cls, (sender, receiver))

    @property
    def sender(self) -> Sender[ItemT]:
        """The end that values go in at."""
        return self[0]

    @property
    def receiver(self) -> Receiver[ItemT]:
        """The end that values come out of."""
        return self[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ((self[0], self[1]),)


def _checked(depth: Any) -> int:
    try:
        if isinstance(depth, bool):
            raise TypeError
        number = operator.index(depth)
    except TypeError:
        raise TypeError(f"depth must be an integer, not {depth!r}") from None
    if not 1 <= number <= MOST_DEPTH:
        raise ValueError(f"depth must be from 1 to {MOST_DEPTH}, not {number}")
    return slots_of(number)


if TYPE_CHECKING:  # an assignment would be an alias without its parameter
    from conveyor.channel import Channel as open
else:
    open = Channel
