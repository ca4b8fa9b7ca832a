"""Channels of the inline engine: both ends are always in this process."""

from __future__ import annotations

import itertools
import threading

from conveyor import _core
from conveyor.exceptions import ConveyorError, SessionEndedError
from conveyor.runtime.meeting import ClosedWord, Meeting, Side, channel_blueprint
from conveyor.runtime.process import Process


class InlineIntroductions:
    """See ``runtime.meeting.Introductions``. Nobody waits to meet, and nobody dies by himself."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        #: The depths of channels that were not used yet, and the meetings of those of which one end was.
        self._depths: dict[int, int] = {}
        self._meetings: dict[int, Meeting] = {}

    def open(self, depth: int) -> int:
        number = next(self._numbers)
        self._depths[number] = depth
        return number

    def hold(self, number: int, side: Side) -> None:
        """Every end is here."""

    def meet(self, number: int, side: Side, alone: bool) -> Meeting:
        with self._lock:
            return self._meeting(number)

    def awaits(self, number: int, side: Side) -> bool:
        return False  # nobody waits

    def close(self, number: int, side: Side) -> None:
        with self._lock:
            ClosedWord(self._meeting(number).segment, side).mark()
        self._process.board.ring(self._process.slot, _core.ATTENTION_BIT)

    def _meeting(self, number: int) -> Meeting:
        """That of a channel; each end asks for it once."""
        depth = self._depths.pop(number, None)
        if depth is None:
            return self._meetings.pop(number)
        process = self._process
        segment = channel_blueprint(depth, process.identity, process.identity).make()
        segment.close_fd()
        view = process.arena_of(*process.identity)
        meeting = Meeting(segment, *process.identity, None, view)
        self._meetings[number] = meeting
        return meeting

    def death(self, meeting: Meeting) -> ConveyorError:
        return SessionEndedError("the session has ended: it has been shut down")
