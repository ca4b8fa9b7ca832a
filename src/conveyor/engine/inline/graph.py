"""A compiled graph in the driver's process: an execution runs as a whole before ``execute`` returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from msgspec.structs import replace

from conveyor.config import Config
from conveyor.engine.inline.actor import Actor
from conveyor.engine.inline.crossing import Crossing
from conveyor.engine.inline.lines import Job, Lines
from conveyor.engine.inline.part import InlinePart
from conveyor.engine.inline.task import Run, TaskJob
from conveyor.engine.inline.turns import Turns
from conveyor.exceptions import GraphTornDownError
from conveyor.plan.model import EXECUTOR, Plan
from conveyor.plan.reading import in_order
from conveyor.runtime.graph.edges.assigning import assign
from conveyor.runtime.graph.edges.layout import lay_out, tasks_by_actor
from conveyor.runtime.graph.epoch import Epoch
from conveyor.runtime.graph.executor import Laid, LaidChannels
from conveyor.runtime.process import RESULT_BIT, Process
from conveyor.runtime.protocol import ActorId


class InlineHost(Protocol):
    """The session, as its graphs need it."""

    process: Process
    lines: Lines

    def actor(self, actor: ActorId) -> Actor:
        """The actor that a handle stands for."""
        ...

    def known(self, actor: ActorId) -> Actor:
        """The same, as it is: one that is dead is not made again."""
        ...

    def revive(self, actor: ActorId) -> Actor:
        """The living actor; a dead one is made again. ``ActorDiedError`` if that cannot be done."""
        ...

    def retain(self, actor: ActorId) -> object:
        """A part in the actor that lasts as long as what is returned."""
        ...


class _Turn(Job):
    """Something that is done in a graph's turn."""

    def __init__(self, turns: Turns, work: Callable[[], Any]) -> None:
        super().__init__(turns, f"an execution of {turns.name}")
        self._work = work
        self.made: Any = None
        self.error: BaseException | None = None

    def start(self) -> None:
        try:
            self.made = self._work()
        except Exception as error:
            self.error = error

    def interrupted(self, error: BaseException) -> None:
        self.error = error

    def take_error(self) -> BaseException:
        """What the work has raised. Its frames refer to this, and this to it no more."""
        error, self.error = self.error, None
        assert error is not None
        return error


class InlineGraph:
    """The parts of its actors, on channels within this process, and who has their tasks run in which
    order. Executions run one after the other, whatever threads they come from.
    """

    def __init__(self, host: InlineHost, plan: Plan, config: Config, number: int) -> None:
        self.plan = plan
        self.config = config
        self.number = number
        self.name = config.name or f"graph {number}"
        self.actors = [host.actor(info.key) for info in plan.actors]
        for actor in self.actors:
            actor.check_alive()
        #: The execution that runs.
        self.at: int | None = None
        self._crossing = Crossing(host.process, config.slot_bytes, config.memory_bytes)
        self._host = host
        self._turns = Turns(host.lines, self.name)
        self._stages = in_order(plan)
        self._parts: list[InlinePart] = []
        self._in_use = False
        self._over = False
        # The actors are as much the graph's as any handle's.
        self._retained: list[object] = [host.retain(actor.id) for actor in self.actors]

    # Laying

    def lay(self) -> Laid:
        """Make the channels and the programs."""
        return self._lay(self.actors, 0)

    def lay_again(self, first: int) -> Laid:
        """The same anew, with dead actors made again. ``first``: the number of the next execution."""
        return self._lay([self._host.revive(actor.id) for actor in self.actors], first)

    def _lay(self, actors: list[Actor], first: int) -> Laid:
        process, config = self._host.process, self.config
        # Tensors travel in the frames: there is no other process that they could go to beside them.
        edges = tuple(replace(edge, beside=False) for edge in self.plan.edges)
        plan = replace(self.plan, edges=edges)
        # Everything is in this process, and nobody is rung: who executes has the programs driven.
        here = process.place(RESULT_BIT)
        places = dict.fromkeys((EXECUTOR, *range(len(actors))), here)
        tasks, slot_bytes = len(plan.tasks), config.slot_bytes
        layout = lay_out(plan, places, tasks, slot_bytes, config.fail_fast, transports={})
        assignments = assign(
            plan, config, self.number, self.name, places, layout, tasks_by_actor(plan), first
        )
        parts: list[InlinePart] = []
        try:
            for actor, assignment in zip(actors, assignments, strict=True):
                part = InlinePart(process, actor, assignment, layout.segment, self._crossing)
                parts.append(part)
            with self._host.lines.lock:
                if self._over:
                    raise GraphTornDownError(f"{self.name} has been torn down")
                self.actors, parts, self._parts = actors, self._parts, parts
        finally:  # of these if they have failed, else of those before
            for part in parts:
                part.close()
        bits = (RESULT_BIT,) * len(actors)
        return Laid(LaidChannels.of(self.number, actors, layout, bits), actors, layout.segment)

    def comes_back(self) -> bool:
        """Whether every dead actor is made again when it is needed, or has been."""
        known = [self._host.known(actor.id) for actor in self.actors]
        return all(actor.alive or actor.comes_back for actor in known)

    def end_unmade(self) -> None:
        """End the actors whose constructor has raised."""
        for actor in [self._host.known(actor.id) for actor in self.actors]:
            if actor.alive and actor.start_failure is not None:
                how = "was ended for a restart, since its constructor had raised an error"
                actor.end(how, code=1, for_good=False, orderly=False)

    def unload(self) -> None:
        """There will be no more executions. One that runs still comes to its end."""
        with self._host.lines.lock:
            self._over = True
            if self._in_use:
                return
        self._let_go()

    def _let_go(self) -> None:
        parts, self._parts = self._parts, []
        for part in parts:
            part.close()
        self._crossing.close()
        self._retained.clear()

    # Executing

    def in_turn(self, work: Callable[[], Any]) -> Any:
        """What ``work()`` returns, while nothing else is executed. In this thread, also if it is the event
        loop of an actor, which stands still meanwhile."""
        if self._turns in self._turns.lines.current().inside:
            return work()
        job = _Turn(self._turns, functools.partial(self._alone, work))
        self._turns.run_here(job)
        if job.error is not None:
            raise job.take_error()
        return job.made

    def _alone(self, work: Callable[[], Any]) -> Any:
        with self._host.lines.lock:
            self._in_use = True
        try:
            return work()
        finally:
            with self._host.lines.lock:
                self._in_use = False
                over = self._over
            if over:
                self._let_go()

    def is_at(self, number: int) -> bool:
        """Whether all programs have come to execution ``number``. One is not where an interrupt has come
        between two of its steps: then the graph is to be laid anew."""
        return all(part.execution == number for part in self._parts)

    def run(self, number: int, epoch: Epoch, deadline: int) -> Run:
        """Run the tasks of execution ``number``, which has been submitted, in the order in which they were
        bound. Raises ``DeadlockError``, and what interrupts the program.

        deadline: on the monotonic clock, in nanoseconds; 0: none.
        """
        run = Run(number, deadline, self.plan, epoch, self._crossing)
        self.at = number
        try:
            for stage in self._stages:
                part = self._parts[stage.actor]
                job = TaskJob(run, part, stage)
                try:
                    part.actor.host.run(job)
                except BaseException:
                    part.actor.host.cancel(job)
                    raise
                if job.interrupt is not None:
                    raise job.interrupt
                if not job.counts:  # its actor is dead, as everybody sees
                    break
        except BaseException:
            self._break_off(run)
            raise
        finally:
            self.at = None
        if epoch.recording.own.tracing:
            epoch.recording.drain()
        return run

    def _break_off(self, run: Run) -> None:
        """Nobody will have refs of the execution: nothing more of it is run."""
        run.epoch.limits.cancel(run.number)
        for stage in self._stages:
            part = self._parts[stage.actor]
            if part.actor.alive and part.execution == run.number:
                part.break_off()
        for production in run.productions.values():
            if not production.over:
                production.close()
