"""How an actor's process meets others over channels: the driver introduces them."""

from __future__ import annotations

from conveyor import _core
from conveyor.exceptions import ConveyorError, SessionEndedError
from conveyor.runtime.actor.requests.client import RequestClient
from conveyor.runtime.actor.requests.messages import CloseEnd, HoldEnd, Meet, Met, OpenChannel
from conveyor.runtime.meeting import ClosedWord, Meeting, Side
from conveyor.runtime.messages.sockets import all_of
from conveyor.runtime.process import Process, close_all
from conveyor.system_limits import explained


class ActorIntroductions:
    """Asks the driver; see ``meeting.Introductions``."""

    def __init__(self, process: Process, requests: RequestClient) -> None:
        self._process = process
        self._requests = requests

    def open(self, depth: int) -> int:
        number, _ = self._requests.ask(OpenChannel(depth))
        assert isinstance(number, int)
        return number

    def hold(self, number: int, side: Side) -> None:
        self._requests.ask(HoldEnd(number, side))

    def meet(self, number: int, side: Side, alone: bool) -> Meeting | None:
        with explained(f"use channel {number}"):
            met, fds = self._requests.ask(Meet(number, side, alone))
            try:
                return None if met is None else self._met(met, fds)
            except BaseException:
                self._give_up(met, number, side, fds)
                raise
            finally:
                close_all(fds)

    def _met(self, met: Met, fds: list[int]) -> Meeting:
        process = self._process
        if met.actor is None:  # every actor knows the driver from its birth on
            all_of(fds, 1)
            arena = process.arena_of(met.slot, met.incarnation)
        else:
            _, arena_fd, eventfd = all_of(fds, 3)
            arena = process.adopt(met.slot, met.incarnation, arena_fd, eventfd)
        segment = _core.Segment.attach(fds[0])
        return Meeting(segment, met.slot, met.incarnation, met.actor, arena, met.spread)

    def _give_up(self, met: Met, number: int, side: Side, fds: list[int]) -> None:
        """This process could not open its end, and will not be introduced again: the other one is told."""
        if fds:
            ClosedWord(_core.Segment.attach(fds[0]), side).mark()
            self._process.board.ring(met.slot, _core.ATTENTION_BIT)
        if met.spread:
            self._requests.ask(CloseEnd(number, side))

    def awaits(self, number: int, side: Side) -> bool:
        return False  # only the driver knows

    def close(self, number: int, side: Side) -> None:
        self._requests.ask(CloseEnd(number, side))

    def death(self, meeting: Meeting) -> ConveyorError:
        if meeting.actor is None:
            return SessionEndedError("the session has ended: its driver is gone")
        return self._requests.death(meeting.actor, meeting.slot, meeting.incarnation)
