"""The receiving end of a channel."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from conveyor import _core
from conveyor.channel.end import ChannelStatistics, End
from conveyor.checks import check_timeout
from conveyor.exceptions import ChannelClosedError
from conveyor.runtime.meeting import RECEIVING, Meeting
from conveyor.runtime.process import RESULT_BIT, Place
from conveyor.runtime.protocol import Runtime
from conveyor.typevars import ValueT

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
        if self._meeting is None and not self._met:
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

    def _settled(self) -> bool:
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
    def unmet(self) -> bool:
        """Whether values that have come may lie in the ring before this end is opened; see
        ``runtime.sources.Unmet``."""
        return self._reader is None and not self._closed

    def _begin(self) -> None:
        self._runtime.process.sources.expect(self)

    def _open(self, meeting: Meeting) -> None:
        process, writer = (
            self._runtime.process,
            Place(meeting.slot, meeting.incarnation, RESULT_BIT),
        )
        assert meeting.view is not None
        carries = f"channel {self._number}"
        self._reader = process.reader(
            meeting.segment, 0, 0, writer, meeting.view, carries, shared=False
        )
        process.reads(self)
        process.sources.look()

    def _let_go(self) -> None:
        self.leave()

    def _awaited(self) -> str:
        return f"a value from channel {self._number}"
