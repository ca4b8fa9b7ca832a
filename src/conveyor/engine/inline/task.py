"""A task of a graph, in its actor's turn."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from msgspec import Struct, field

from conveyor import _core
from conveyor.engine.inline.crossing import Crossing
from conveyor.engine.inline.failure import Raised, interrupts
from conveyor.engine.inline.lines import Job
from conveyor.engine.inline.part import InlinePart, Work
from conveyor.engine.inline.streams import Production
from conveyor.plan.model import Plan
from conveyor.plan.reading import Stage
from conveyor.runtime.graph.epoch import Epoch


class Run(Struct, frozen=True):
    """One execution, which runs.

    number: its own. deadline: on the monotonic clock, in nanoseconds; 0: none.
    plan, epoch, crossing: the graph's.
    productions: the generators that it has begun, by the edge of their items.
    raised: what its tasks have raised.
    """

    number: int
    deadline: int
    plan: Plan
    epoch: Epoch
    crossing: Crossing
    productions: dict[int, Production] = field(default_factory=dict)
    raised: Raised = field(default_factory=Raised)


class TaskJob(Job):
    """One task of one execution, with what its actor's program does before and after it."""

    def __init__(self, run: Run, part: InlinePart, stage: Stage) -> None:
        task = run.plan.tasks[stage.call.task]
        super().__init__(part.actor.host, f"{task.label} (execution {run.number})")
        self.node, self.execution, self.method = task.id, run.number, task.label
        self._run = run
        self._part = part
        self._stage = stage
        self.interrupt: BaseException | None = None
        self._work: Work | None = None
        #: It is over, and its actor was alive when it began.
        self.counts = False

    def start(self) -> Coroutine[Any, Any, None] | None:
        part = self._part
        if not part.actor.alive:
            return None
        try:
            work = self._work = part.come_to(self._stage.call.task)
        except SystemExit as error:
            self._exited(error)
            return None
        if work is None:
            self.counts = True
        elif work.is_async and self.host.has_loop:
            return self._go_on(work)
        else:
            try:
                value = work.call()
            except BaseException as error:
                self._failed(error)
            else:
                return self._returned(value)
        return None

    async def _go_on(self, work: Work) -> None:
        try:
            coroutine = work.call()
            if self._run.deadline:
                import asyncio

                left = (self._run.deadline - _core.monotonic_ns()) / 1e9
                coroutine = asyncio.wait_for(coroutine, left)
            value = await coroutine
        except BaseException as error:
            self._failed(error)
        else:
            running = self._returned(value)
            if running is not None:
                await running

    def _returned(self, value: Any) -> Coroutine[Any, Any, None] | None:
        if self._stage.call.stream is None:
            self._finish(value)
            return None
        self.host.lines.came_back(self.method)
        production = self._production(self._stage.call.stream)
        running = production.begin(value)
        if running is not None:
            return self._go_on_producing(production, running)
        self._produced(production)
        return None

    def _production(self, edge: int) -> Production:
        run, place = self._run, self._stage.actor
        recording, number = run.epoch.recording, run.number
        recorder, index = recording.recorders[place], recording.places[place].sends.index(edge)

        def sent(begin: int, end: int, size: int) -> None:
            recorder.note_send(index, number, begin, end, size, False)

        credit = run.plan.edges[edge].depth
        production = Production(self._part.actor, run.crossing, self.method, credit, sent)
        run.productions[edge] = production
        return production

    async def _go_on_producing(
        self, production: Production, running: Coroutine[Any, Any, None]
    ) -> None:
        await running
        self._produced(production)

    def _produced(self, production: Production) -> None:
        if production.raised is None:
            self._finish(None)
        else:
            self._failed(production.raised)

    def _failed(self, error: BaseException) -> None:
        actor = self._part.actor
        if isinstance(error, SystemExit):
            self._exited(error)
            return
        self._run.raised.note(error, actor.name, self.method)
        self._finish(None, error)
        if interrupts(error):
            raise error

    def _finish(self, value: Any, error: BaseException | None = None) -> None:
        actor, work, self._work = self._part.actor, self._work, None
        assert work is not None
        if not (actor.alive or actor.finishing):
            return
        try:
            self._part.finish(work, value, error)
        except SystemExit as left:
            self._exited(left)
        else:
            self.counts = True

    def _exited(self, error: SystemExit) -> None:
        self._part.actor.exited(error, self.method, f"execution {self.execution}")

    def interrupted(self, error: BaseException) -> None:
        self.interrupt = error
