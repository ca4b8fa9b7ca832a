"""What the executing actor knows of the actors of its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from conveyor import _core
from conveyor.exceptions import ActorDiedError
from conveyor.runtime.actor.requests.client import RequestClient
from conveyor.runtime.graph.executor import LaidMember


class PeerMember:
    """An actor of a graph that this actor executes."""

    def __init__(
        self,
        board: _core.Board,
        requests: RequestClient,
        member: LaidMember,
        labels: Mapping[tuple[int, int], str],
    ) -> None:
        self.id = member.id
        self.pid = member.pid
        self.slot = member.slot
        self.incarnation = member.incarnation
        self._board = board
        self._requests = requests
        self._labels = labels

    @property
    def death_number(self) -> int:
        return self._board.death_number(self.slot)

    @property
    def alive(self) -> bool:
        return not self._board.gone(self.slot, self.incarnation)

    def death(self, label: Callable[[int, int], str | None] | None = None) -> ActorDiedError:
        return self._requests.death(self.id, self.slot, self.incarnation, self._labels)
