"""What the executing process can tell of a graph over processes."""

from __future__ import annotations

import os

from conveyor.plan.model import EXECUTOR
from conveyor.runtime.graph.status import NOTHING_AFAR, GraphState, GraphStatus, graph_status
from conveyor.runtime.graph.supervision import Supervision
from conveyor.runtime.graph.telemetry.afar import PATIENCE, STACKS, Afar, Question
from conveyor.runtime.graph.telemetry.recording import Progress, Recording, Track, result_edges


class ProcessAccount:
    """Reads shared memory; the actors are asked nothing. Of actors on other hosts it asks those.

    Who executes a graph, and each of its refs, has its account: it lasts as long as any of them.
    """

    def __init__(self, supervision: Supervision) -> None:
        self.supervision = supervision
        self.number = supervision.number
        self.name = supervision.name
        self.plan = supervision.plan
        self.config = supervision.config
        self._board = supervision.process.board
        self._own_slot = supervision.process.slot

    @property
    def recording(self) -> Recording:
        return self.supervision.epoch.recording

    @property
    def state(self) -> GraphState:
        return self.supervision.state

    @property
    def is_teardown(self) -> bool:
        return self.supervision.is_teardown

    def check_open(self) -> None:
        self.supervision.check_open()

    @property
    def hosts(self) -> dict[int, str]:
        return self.supervision.epoch.hosts

    def progress(self) -> Progress:
        epoch, board = self.supervision.epoch, self._board
        gate = epoch.gate
        gate.count_completed()
        arenas = {EXECUTOR: board.memory(self._own_slot)}
        for info, member in zip(self.plan.actors, epoch.members, strict=True):
            arenas[info.index] = board.memory(member.slot) if member.alive else 0
        completed = gate.completed  # first: what is submitted meanwhile is not completed
        return Progress(gate.submitted, completed, gate.stashed, gate.stashed_bytes, arenas)

    def tracks(self) -> list[Track]:
        tracks = [Track(EXECUTOR, self._board.name(self._own_slot), os.getpid(), None)]
        for info, member in zip(self.plan.actors, self.supervision.epoch.members, strict=True):
            tracks.append(Track(info.index, info.name, member.pid, member.pid))
        return tracks

    def afar(self, question: Question, patience: float) -> Afar:
        hosts = self.hosts
        # A forked child has neither Ray's connections nor the pump's.
        if not hosts or self.supervision.process.inbox.inherited:
            return NOTHING_AFAR
        return self.supervision.afar(question, patience)

    def status(self, stacks: bool = False, patience: float = PATIENCE) -> GraphStatus:
        self.supervision.closed_or_failed()  # it may not have been noticed
        return graph_status(
            self.name,
            self.state,
            self.supervision.closed or self.supervision.failure,
            self.plan,
            self.supervision.epoch,
            self.supervision.process,
            result_edges(self.plan),
            self.supervision.name_node,
            stacks,
            self.afar(Question(stacks=stacks), STACKS if stacks else patience),
        )
