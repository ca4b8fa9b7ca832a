"""The collective groups that an actor's process is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from conveyor import _core
from conveyor.exceptions import ConveyorError
from conveyor.runtime.actor.requests.client import RequestClient
from conveyor.runtime.actor.requests.messages import CloseGroup, CreateGroup, JoinGroup
from conveyor.runtime.messages.sockets import all_of
from conveyor.runtime.process import Process, close_all
from conveyor.runtime.protocol import ActorId
from conveyor.runtime.rank_ends import enter
from conveyor.runtime.ranks import Joined, Membership, doing, in_words
from conveyor.system_limits import explained


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
        self.until: Callable[[], int] | None = None

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

    def step_failed(self, error: BaseException) -> None:
        """A step of a graph has raised. That breaks the process's groups: other ranks may wait for it."""
        if self._joined:
            self._break(f"its step {in_words(error)}", True)

    def call_failed(self, name: str, why: BaseException | str) -> None:
        """The same of a call. ``why``: its error, or what has happened in words."""
        if self._joined:
            words = why if isinstance(why, str) else in_words(why)
            self._break(f"its method {name} {words}", False)

    def _break(self, why: str, step: bool) -> None:
        for joined in self._joined:
            joined.group.raised(why, step)
