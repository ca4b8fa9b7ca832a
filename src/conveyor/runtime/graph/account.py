"""What the executing process can tell of a graph over processes."""

from __future__ import annotations

import os

from conveyor.plan.model import EXECUTOR
from conveyor.runtime.graph.recording import Progress, Recording, Track, result_edges
from conveyor.runtime.graph.status import GraphState, GraphStatus, graph_status
from conveyor.runtime.graph.supervision import Supervisor


class ProcessAccount:
    """Reads shared memory; the actors are asked nothing.

    Who executes a graph, and each of its refs, has its account: it lasts as long as any of them.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.number = supervisor.number
        self.name = supervisor.name
        self.plan = supervisor.plan
        self.config = supervisor.config
        self._board = supervisor.process.board
        self._own_slot = supervisor.process.slot

    @property
    def recording(self) -> Recording:
        return self.supervisor.epoch.recording

    @property
    def state(self) -> GraphState:
        return self.supervisor.state

    @property
    def is_teardown(self) -> bool:
        return self.supervisor.is_teardown

    def check_open(self) -> None:
        self.supervisor.check_open()

    def progress(self) -> Progress:
        epoch, board = self.supervisor.epoch, self._board
        gate = epoch.gate
        gate.count_completed()
        arenas = {EXECUTOR: board.memory(self._own_slot)}
        for info, member in zip(self.plan.actors, epoch.members, strict=True):
            arenas[info.index] = board.memory(member.slot) if member.alive else 0
        completed = gate.completed  # first: what is submitted meanwhile is not completed
        return Progress(gate.submitted, completed, gate.stashed, gate.stashed_bytes, arenas)

    def tracks(self) -> list[Track]:
        tracks = [Track(EXECUTOR, self._board.name(self._own_slot), os.getpid(), None)]
        for info, member in zip(self.plan.actors, self.supervisor.epoch.members, strict=True):
            tracks.append(Track(info.index, info.name, member.pid, member.pid))
        return tracks

    def status(self, stacks: bool = False) -> GraphStatus:
        self.supervisor.closed_or_failed()  # it may not have been noticed
        return graph_status(
            self.name,
            self.state,
            self.supervisor.closed or self.supervisor.failure,
            self.plan,
            self.supervisor.epoch,
            self._board,
            result_edges(self.plan),
            self.supervisor.name_node,
            stacks,
        )
