"""A compiled graph in the driver's process: an execution runs as a whole before ``execute`` returns."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

from conveyor._core import monotonic_ns
from conveyor.config import Config
from conveyor.engine.inline.actor import Actor, Expired, Failure
from conveyor.engine.inline.crossing import Crossing
from conveyor.engine.inline.execution import Execution, Loaded
from conveyor.engine.inline.lines import Lines
from conveyor.engine.inline.notes import Notes
from conveyor.engine.inline.streams import Production
from conveyor.engine.inline.turns import Turns
from conveyor.exceptions import (
    ActorDiedError,
    ConveyorError,
    DeadlineExceededError,
    GraphTornDownError,
)
from conveyor.plan.model import Plan
from conveyor.runtime.graph.execution import late_error
from conveyor.runtime.graph.recording import result_edges
from conveyor.runtime.graph.results import GraphRef
from conveyor.runtime.graph.status import GraphState
from conveyor.runtime.process import Process
from conveyor.runtime.protocol import ActorId
from conveyor.runtime.refs.ref import Ref, Source


class InlineHost(Protocol):
    """The session, as its graphs need it."""

    process: Process
    lines: Lines

    def actor(self, actor: ActorId) -> Actor:
        """The actor that a handle stands for."""
        ...

    def revive(self, actor: ActorId) -> Actor:
        """The living actor; a dead one is made again. ``ActorDiedError`` if that cannot be done."""
        ...

    def retain(self, actor: ActorId) -> object:
        """A part in the actor that lasts as long as what is returned."""
        ...

    def kill(self, actor: ActorId) -> None:
        """Kill ``actor`` at once."""
        ...

    def keep(self, value: object) -> Ref:
        """A reference to ``value`` as it is now."""
        ...

    def next_graph_number(self) -> int:
        """A number that no other graph of the session has."""
        ...


class InlineGraph:
    """Runs executions one after the other, whatever threads they come from, and keeps the graph fit for
    them: ``depth`` limits nothing, and there is always room.
    """

    def __init__(
        self, host: InlineHost, plan: Plan, config: Config, on_close: Callable[[int], None]
    ) -> None:
        """``on_close(number)`` is called when there will be no more executions."""
        self.plan = plan
        self.config = config
        self.number = host.next_graph_number()
        self.name = config.name or f"graph {self.number}"
        self.actors = [host.actor(info.key) for info in plan.actors]
        for actor in self.actors:
            actor.check_alive()
        #: Where an execution has its turn.
        self.turns = Turns(host.lines, self.name)
        self.notes = Notes(plan)
        self._executions = itertools.count()
        crossing = Crossing(host.process, config.slot_bytes, config.memory_bytes)
        self._loaded = Loaded(plan, self.name, self.actors, crossing, self.notes, self._executions)
        #: The execution that runs.
        self.at: int | None = None
        self.completed = 0
        #: Why there will be no more executions.
        self.closed: ConveyorError | None = None
        #: Why there are none until a restart.
        self.failure: ConveyorError | None = None
        #: By execution and edge: the generators that no reference has been made to yet.
        self.productions: dict[tuple[int, int], Production] = {}
        self._host = host
        self._on_close = on_close
        # The actors are as much the graph's as any handle's.
        self._retained = [host.retain(actor.id) for actor in self.actors]

    # Executing

    def run(
        self, inputs: tuple[Any, ...], deadline: int, seconds: float | None, source: Source
    ) -> list[GraphRef]:
        """One execution, in the graph's turn: its distinct results, which come from ``source``.

        deadline: on the monotonic clock, in nanoseconds; 0: none. seconds: what was asked for.
        """
        self._check()
        began = monotonic_ns()
        execution = Execution(self._loaded, inputs, deadline, self.config.fail_fast)
        self.notes.submitted += 1
        if deadline:
            execution.late = lambda: late_error(
                self.name,
                self.plan.tasks,
                execution.number,
                seconds or 0.0,
                execution.ran,
                execution.skipped,
                None,
            )
        self.at = execution.number
        try:
            return self._run(execution, began, source)
        finally:
            self.at = None
            self.completed = execution.number + 1

    def _run(self, execution: Execution, began: int, source: Source) -> list[GraphRef]:
        edges = result_edges(self.plan)
        refs = [GraphRef(source, execution.number, i) for i in range(len(edges))]
        try:
            execution.run()
        except ActorDiedError as error:
            self.failure = error
        except BaseException:
            self.notes.submitted -= 1  # interrupted: nobody has a ref of it
            raise
        failed = execution.failure
        cut = set()  # the ends of generators that the failure has ended
        for ended, items in self.plan.streams:
            production = execution.productions.get(items)
            if production is not None:
                self.productions[execution.number, items] = production
                if failed is not None and not production.over:
                    production.close()
                    cut.add(ended)
        for ref, edge in zip(refs, edges, strict=True):
            try:
                value = execution.output(edge)
            except KeyError:  # the actor has died that would have made it
                assert self.failure is not None
                ref._fail(self.failure)
            except ConveyorError as error:
                ref._fail(error)
            else:
                if isinstance(value, Failure) or edge in cut:
                    failure = failed or value
                    # What has expired is told from the execution, which ends here.
                    again = None if isinstance(failure, Expired) else failure.error
                    ref._fail(failure.error(), again)
                else:
                    ref._arrived(value)
        execution.late = DeadlineExceededError  # it referred to the execution
        if self.failure is None:
            self.notes.executed(execution.number, began)
        self.notes.take_events()
        return refs

    # Upkeep

    def _check(self) -> None:
        if self.closed is None and self.failure is None:
            dead = next((actor for actor in self.actors if not actor.alive), None)
            if dead is None:
                return
            self.failure = dead.death()
        if self.closed is None and all(a.alive or a.comes_back for a in self.actors):
            self.restart()
            return
        error = self.closed or self.failure
        assert error is not None
        raise error.with_traceback(None)

    def restart(self) -> None:
        self.check_open()
        if all(actor.alive for actor in self.actors):
            return
        actors = [self._host.revive(actor.id) for actor in self.actors]
        crossing = self._loaded.crossing
        self._loaded = Loaded(self.plan, self.name, actors, crossing, self.notes, self._executions)
        self.actors = actors
        self.failure = None

    @property
    def is_teardown(self) -> bool:
        return self.closed is not None

    @property
    def state(self) -> GraphState:
        """The state of the graph, as far as it has been noticed."""
        return "torn down" if self.closed else "failed" if self.failure else "ready"

    def check_open(self) -> None:
        """Raise what has ended the graph, if it was closed."""
        if self.closed is not None:
            raise self.closed.with_traceback(None)

    def check_block(self) -> None:
        """The one process there is has compiled the graph, and may tear it down."""

    def teardown(self, kill_actors: bool = False) -> None:
        self.close(GraphTornDownError(f"{self.name} has been torn down"))
        if kill_actors and type(self.closed) is GraphTornDownError:
            for actor in self.actors:
                self._host.kill(actor.id)

    def close(self, error: ConveyorError) -> bool:
        """No more executions: ``error`` says why. False if it was closed before."""
        if self.closed is not None:
            return False
        self.closed = error
        self._on_close(self.number)
        self._loaded.crossing.close()
        return True
