"""The collective groups that an actor's process is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from conveyor import _core
from conveyor.codec.errors.failed_calls import FailedCall
from conveyor.exceptions import ConveyorError
from conveyor.runtime.actor.calls.failure import UNREAD, CallFailure
from conveyor.runtime.actor.requests.client import RequestClient
from conveyor.runtime.actor.requests.messages import CloseGroup, CreateGroup, JoinGroup
from conveyor.runtime.messages.sockets import all_of
from conveyor.runtime.process import Process, close_all
from conveyor.runtime.protocol import ActorId
from conveyor.runtime.rank_ends import enter
from conveyor.runtime.ranks import Joined, Membership, doing
from conveyor.system_limits import explained

#: Of an error's text, what those who wait are told.
_WORDS = 200


class ActorCollectives:
    """Asks the driver; see ``ranks.Collectives``."""

    def __init__(
        self,
        process: Process,
        requests: RequestClient,
        label: Callable[[int, int], str | None],
    ) -> None:
        """``label`` names a (graph, node)."""
        self.made: dict[str, Any] = {}
        self.entered: dict[str, Any] = {}
        self._process = process
        self._requests = requests
        self._label = label
        self._joined: list[Joined] = []
        #: As ``until``, of whoever knows. Where methods run side by side nobody does.
        self.ends: Callable[[], int] = lambda: 0
        #: As ``called_at``, likewise.
        self.call_made: Callable[[], int] = lambda: 0

    def open(self, actors: Sequence[ActorId], driver: int | None = None) -> int:
        assert driver is None, "only the driver can take part as such"
        number, _ = self._requests.ask(CreateGroup(tuple(actors)), CloseGroup)
        assert isinstance(number, int)
        return number

    def join(self, number: int) -> Joined:
        with explained("join a collective group"):
            membership, fds = self._requests.ask(JoinGroup(number))
            assert isinstance(membership, Membership)
            try:
                joined = self._enter(membership, fds)
            finally:
                close_all(fds)
        self._joined.append(joined)
        return joined

    def _enter(self, membership: Membership, fds: list[int]) -> Joined:
        process, driver = self._process, membership.driver
        actors = len(membership.members) - (driver is not None)
        segment, *ends = all_of(fds, 1 + 2 * actors)
        pairs = iter(zip(ends[::2], ends[1::2], strict=True))
        arenas = []
        for rank, (slot, incarnation) in enumerate(membership.members):
            if rank == driver:  # every actor knows it from its birth on
                arenas.append(process.arena_of(slot, incarnation))
            elif rank == membership.rank:
                arenas.append(process.own_view(next(pairs)[0]))
            else:
                arenas.append(process.adopt(slot, incarnation, *next(pairs)))
        return enter(process, _core.Segment.attach(segment), membership, arenas)

    def leave(self, joined: Joined) -> None:
        if joined in self._joined:
            self._joined.remove(joined)
        joined.leave()

    def close(self, number: int) -> None:
        self._requests.ask(CloseGroup(number))

    def doing(self, joined: Joined, ranks: Sequence[int]) -> list[str]:
        return doing(self._process, joined.membership, ranks, self._label)

    def death(self, joined: Joined, rank: int) -> ConveyorError:
        actor, (slot, incarnation) = joined.membership.actors[rank], joined.membership.members[rank]
        return self._requests.death(actor, slot, incarnation)

    def until(self) -> int:
        return self.ends()

    def called_at(self) -> int:
        return self.call_made()

    def step_failed(self, error: BaseException) -> None:
        """A step of a graph has raised: whoever waits for this process in an operation is told that it is
        not coming."""
        if self._joined:
            words = _in_words(error)
            for nth, joined in enumerate(self._joined):
                joined.group.note_failure(words, nth == 0)

    def call_failed(self, failure: CallFailure) -> tuple[FailedCall, ...]:
        """The same of a call. What its error is to tell of."""
        if not self._joined:
            return ()
        board, slot = self._process.board, self._process.slot
        name, caller, why, ran, number, seen_at = failure
        calls: tuple[FailedCall, ...] = ()
        if number is None:
            number = board.fail(slot)
            calls = ((board.session, slot, number),)
        words = f"{name} {why if isinstance(why, str) else _in_words(why)}"
        if name == UNREAD:  # it is like none of another rank
            name = f"{slot}.{number}"
        for nth, joined in enumerate(self._joined):
            joined.group.note_failed_call(words, name, caller, ran, number, seen_at, nth == 0)
        return calls


_name_of = type.__dict__["__name__"].__get__


def _in_words(error: BaseException) -> str:
    """An error's class and message, of which not even its class has to be good."""
    name = _name_of(type(error))  # whatever its own class says
    try:
        text = f"has raised {name}: {error}"
    except Exception:
        text = f"has raised {name}"
    text = text if len(text) <= _WORDS else f"{text[:_WORDS]}..."
    return text.encode("utf-8", "replace").decode()  # a lone surrogate cannot be told
