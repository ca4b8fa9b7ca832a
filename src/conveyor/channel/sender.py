"""The sending end of a channel."""

from __future__ import annotations

from typing import Generic

from conveyor import _core
from conveyor.channel.end import ChannelStatistics, End
from conveyor.checks import check_timeout
from conveyor.runtime.meeting import SENDING, Meeting
from conveyor.runtime.process import RESULT_BIT, Place
from conveyor.runtime.protocol import Runtime
from conveyor.runtime.shortage import Sending
from conveyor.typevars import SentT


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
                    from conveyor.runtime import aio  # asyncio is slow to import

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
            writer, meeting = self._writer, self._meeting
            if writer is None or meeting is None:
                return ChannelStatistics(self._depth, 0, 0, 0)
            sent, taken = meeting.segment.progress(0)
            return ChannelStatistics(self._depth, writer.count, writer.bytes, sent - taken[0])

    def _offer(self, value: SentT) -> bool:
        if self._meeting is None and not self._met:
            return False
        with self._lock:
            self._check()
            # Looked at before what follows: an end says that it is closed, and then makes room.
            room = self._has_room()
            if self._closed_at_the_other:
                raise self._closed_there()
            if self._gone:
                raise self._death()
            writer = self._writer
            assert writer is not None
            within, self._busy = self._busy, True
            try:
                return room and writer.send(value, writer.count)
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

    def _settled(self) -> bool:
        return self._closed_at_the_other or self._gone or self._has_room()

    @property
    def _closed_at_the_other(self) -> bool:
        assert self._there is not None
        return self._there.after(0)

    @property
    def _sent(self) -> int:
        writer = self._writer
        return 0 if writer is None else writer.count

    def _open(self, meeting: Meeting) -> None:
        target = Place(meeting.slot, meeting.incarnation, RESULT_BIT)
        carries = f"channel {self._number}"
        self._writer = self._runtime.process.writer(meeting.segment, 0, [target], carries)

    def _let_go(self) -> None:
        """Do nothing: what was sent stays in the channel."""

    def _awaited(self) -> str:
        return f"room in channel {self._number}: all of its {self._depth} places are taken"
