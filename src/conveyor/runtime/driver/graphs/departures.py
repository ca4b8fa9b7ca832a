"""Actors that leave graphs which other actors take down."""

from __future__ import annotations

from conveyor import _core
from conveyor.exceptions import ConveyorError
from conveyor.runtime.driver.processes.record import ActorRecord
from conveyor.runtime.graph.executor import Member
from conveyor.runtime.refs.ref import Ref
from conveyor.runtime.waiting.watcher import Watcher


class Departures:
    """Their acknowledgements, for the actors that wait for these: who waits must be able to say for whom, and
    to see that it would be for ever."""

    def __init__(self, board: _core.Board, watcher: Watcher) -> None:
        self._board = board
        self._watcher = watcher
        self._awaited: dict[tuple[ActorRecord, int], list[tuple[Member, Ref]]] = {}

    def expect(self, caller: ActorRecord, number: int, acks: list[tuple[Member, Ref]]) -> None:
        """``caller`` takes graph ``number`` down; have it rung for each acknowledgement."""
        self._awaited[caller, number] = acks
        board, slot = self._board, caller.slot
        for _, ack in acks:
            self._watcher.watch(ack, lambda: board.ring(slot, _core.ATTENTION_BIT))

    def staying(self, caller: ActorRecord, number: int) -> list[int]:
        """The slots of those that have not left. Raises what an actor that lives has met in leaving."""
        acks = self._awaited[caller, number]
        staying = [member.slot for member, ack in acks if not ack.done()]
        if not staying:
            del self._awaited[caller, number]
            for member, ack in acks:
                try:
                    ack.get()
                except ConveyorError:
                    if member.alive:
                        raise
        return staying

    def forget(self, caller: ActorRecord) -> None:
        """That process is gone."""
        for key in [key for key in list(self._awaited) if key[0] is caller]:
            self._awaited.pop(key, None)
