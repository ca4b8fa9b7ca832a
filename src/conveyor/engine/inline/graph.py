"""A compiled graph in the driver's process: ``execute`` runs all of it before it returns."""

from __future__ import annotations

import functools
import itertools
import os
from typing import TYPE_CHECKING, Any

from conveyor._core import monotonic_ns
from conveyor.checks import check_timeout
from conveyor.config import Config
from conveyor.engine.inline.actor import Actor, Expired, Failure
from conveyor.engine.inline.crossing import Crossing
from conveyor.engine.inline.execution import Execution, Loaded
from conveyor.engine.inline.lines import Job
from conveyor.engine.inline.notes import Notes
from conveyor.engine.inline.streams import InlineStream, Production
from conveyor.engine.inline.turns import Turns
from conveyor.exceptions import (
    ActorDiedError,
    CapacityError,
    ConveyorError,
    DeadlineExceededError,
    GraphTornDownError,
)
from conveyor.plan.model import DRIVER, Plan
from conveyor.runtime.graph.arguments import check_inputs, match_inputs, takes_parts
from conveyor.runtime.graph.compiled import CompiledGraph
from conveyor.runtime.graph.execution import late_error
from conveyor.runtime.graph.recording import Progress, Track
from conveyor.runtime.graph.results import GraphRef, Results
from conveyor.runtime.graph.stacks import stack_of
from conveyor.runtime.graph.status import ExecutionStatus, GraphStatus
from conveyor.runtime.refs.ref import Ref
from conveyor.runtime.refs.streams import StreamRef
from conveyor.runtime.refs.values import (
    RefFailed,
    lacking,
    refs_among,
    wait_for_all,
    with_values,
)
from conveyor.runtime.status import ActorStatus
from conveyor.runtime.waiting.works import Blockers

if TYPE_CHECKING:
    from conveyor.engine.inline.runtime import InlineRuntime


class InlineGraph(CompiledGraph):
    """Its refs are done when one gets them. Executions of one graph run one after the other,
    whatever threads they come from; ``depth`` limits nothing, and there is always room.
    """

    def __init__(self, runtime: InlineRuntime, plan: Plan, config: Config) -> None:
        super().__init__(plan, config, runtime.next_graph_number())
        self._actors = [runtime.actor(info.key) for info in plan.actors]
        for actor in self._actors:
            actor.check_alive()
        self._host = Turns(runtime.lines, self.name)
        self._notes = Notes(plan)
        self.recording = self._notes.recording
        self._executions = itertools.count()
        crossing = Crossing(runtime.process, config.slot_bytes, config.memory_bytes)
        self._loaded = Loaded(
            plan, self.name, self._actors, crossing, self._notes, self._executions
        )
        self._at: int | None = None  # the execution that runs
        self._completed = 0
        self._results = Results(plan, runtime.keep)
        for ended, items in plan.streams:
            self._results.streams[ended] = functools.partial(_stream, items)
        # Those that no reference has been made to yet.
        self.productions: dict[tuple[int, int], Production] = {}
        self._runtime = runtime
        # The actors are as much the graph's as any handle's.
        self._retained: list[object] = []
        for actor in self._actors:
            self._retained.append(runtime.retain(actor.id))
        runtime.graphs.add(self)

    # Executing

    def execute(
        self,
        *args: Any,
        timeout: float | None = None,
        deadline: float | None = None,
        **kwargs: Any,
    ) -> Any:
        if "timeout" in self.plan.keywords:
            kwargs["timeout"] = timeout
        else:
            check_timeout(timeout)
        return self._execute(args, kwargs, deadline)

    def try_execute(self, *args: Any, deadline: float | None = None, **kwargs: Any) -> Any:
        seconds = self._seconds(deadline, kwargs)
        check_inputs(self.plan, self.name, args, kwargs)
        lacked = lacking(args, kwargs)
        if lacked is not None:
            raise CapacityError(f"{self.name}: {lacked!r}, which is an argument, is not there yet")
        return self._execute_now(args, kwargs, seconds)

    async def execute_async(self, *args: Any, deadline: float | None = None, **kwargs: Any) -> Any:
        return self._execute(args, kwargs, deadline)

    def _execute(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], deadline: float | None
    ) -> Any:
        seconds = self._seconds(deadline, kwargs)
        if refs_among(args, kwargs):
            check_inputs(self.plan, self.name, args, kwargs)
            wait_for_all(args, kwargs)
        return self._execute_now(args, kwargs, seconds)

    def _execute_now(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float | None
    ) -> Any:
        if refs_among(args, kwargs):
            try:
                args, kwargs = with_values(args, kwargs, takes_parts(self.plan))
            except RefFailed as failed:
                return self._results.failed(failed.error, self)
        inputs = match_inputs(self.plan, self.name, args, kwargs)
        passed = self._results.passed(args, kwargs)
        job = _ExecutionJob(self, inputs, seconds)
        if self._host.lines.current().loop is None:
            self._host.run(job)
        else:  # from a coroutine of an actor
            job.start()
        if job.error is not None:
            raise job.error
        return self._results.arrange(job.refs, passed)

    def run(self, inputs: tuple[Any, ...], deadline: int, seconds: float | None) -> list[GraphRef]:
        """One execution, in the graph's turn: its distinct results."""
        self._check()
        began = monotonic_ns()
        execution = Execution(self._loaded, inputs, deadline, self.config.fail_fast)
        self._notes.submitted += 1
        if deadline:
            execution.late = lambda: late_error(
                self, execution.number, seconds or 0.0, execution.ran, execution.skipped, None
            )
        self._at = execution.number
        try:
            return self._run(execution, began)
        finally:
            self._at = None
            self._completed = execution.number + 1

    def _run(self, execution: Execution, began: int) -> list[GraphRef]:
        edges = self._results.edges
        refs = [GraphRef(self, execution.number, i) for i in range(len(edges))]
        try:
            execution.run()
        except ActorDiedError as error:
            self._failure = error
        except BaseException:
            self._notes.submitted -= 1  # interrupted: nobody has a ref of it
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
                assert self._failure is not None
                ref._fail(self._failure)
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
        if self._failure is None:
            self._notes.executed(execution.number, began)
        self._notes.take_events()
        return refs

    def _check(self) -> None:
        if self._closed is None and self._failure is None:
            dead = next((actor for actor in self._actors if not actor.alive), None)
            if dead is None:
                return
            self._failure = dead.death()
        if self._closed is None and all(a.alive or a.comes_back for a in self._actors):
            self.restart()
            return
        error = self._closed or self._failure
        assert error is not None
        raise error.with_traceback(None)

    def restart(self) -> None:
        if self._closed is not None:
            raise self._closed.with_traceback(None)
        if all(actor.alive for actor in self._actors):
            return
        actors = [self._runtime.revive(actor.id) for actor in self._actors]
        crossing = self._loaded.crossing
        self._loaded = Loaded(self.plan, self.name, actors, crossing, self._notes, self._executions)
        self._actors = actors
        self._failure = None

    def status(self, stacks: bool = False) -> GraphStatus:
        actors = tuple(self._actor_status(actor, stacks) for actor in self._actors)
        at = self._at
        running: tuple[ExecutionStatus, ...] = ()
        if at is not None:
            edges = self.plan.edges
            outstanding = tuple(edges[edge].source for edge in self._results.edges)
            names = tuple(actor.name for actor in actors if actor.execution == at)
            running = (ExecutionStatus(at, outstanding, names),)
        error = self._closed or self._failure
        return GraphStatus(
            self.name,
            "torn down" if self._closed else "failed" if error else "ready",
            self.plan.depth,
            self._completed + len(running),
            self._completed,
            running,
            actors,
            None if error is None else str(error),
        )

    def _actor_status(self, actor: Actor, stacks: bool) -> ActorStatus:
        pid = os.getpid()
        if not actor.alive:
            return ActorStatus(actor.name, pid, "dead", error=str(actor.death()))
        running = actor.host.running()
        if not running:
            return ActorStatus(actor.name, pid, "idle")
        job, since = running[0]
        return ActorStatus(
            actor.name,
            pid,
            "running",
            method=job.method,
            node=job.node,
            execution=job.execution,
            call=job.call,
            since=since,
            stack=stack_of(pid) if stacks else None,
        )

    # Source of its refs

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        raise AssertionError("a ref that execute() has returned has its outcome")

    def blockers(self, ref: Ref, question: int) -> Blockers | None:
        return ()  # lines find cycles themselves

    def is_ready(self, ref: Ref) -> bool:
        return True

    def has_failed(self, ref: Ref) -> bool:
        return False  # one that has has its outcome

    def doing(self) -> str:
        return "everything runs in this process"

    def cancel(self, ref: Ref) -> bool:
        return False

    # What it has noted

    def progress(self) -> Progress:
        completed = sum(n for _, _, n in self.recording.own.task(0)[2][2])
        arena = self._runtime.process.arena.bytes_touched
        return Progress(self._notes.submitted, completed, 0, 0, {DRIVER: arena})

    def tracks(self) -> list[Track]:
        pid = os.getpid()
        actors = (Track(a.index, a.name, pid, a.index + 1) for a in self.plan.actors)
        return [Track(DRIVER, "driver", pid, None), *actors]

    # Ending

    def teardown(self, kill_actors: bool = False) -> None:
        if self.close(GraphTornDownError(f"{self.name} has been torn down")) and kill_actors:
            for actor in self._actors:
                self._runtime.kill(actor.id)

    def close(self, error: ConveyorError) -> bool:
        """No more executions: ``error`` says why. False if it was closed before."""
        if self._closed is not None:
            return False
        self._closed = error
        self._runtime.graphs.discard(self)
        self._runtime._shared_graphs.forget(self._number)
        self._loaded.crossing.close()
        return True


def _stream(edge: int, ended: Ref, effects: tuple[Ref, ...]) -> StreamRef:
    production = ended._source.productions.pop((ended._number, edge), None)
    return InlineStream(production, ended, effects)


class _ExecutionJob(Job):
    """One execution, as what the graph has its turns for."""

    def __init__(self, graph: InlineGraph, inputs: tuple[Any, ...], seconds: float | None) -> None:
        super().__init__(graph._host, f"an execution of {graph.name}")
        self._graph = graph
        self._inputs = inputs
        self._seconds = seconds
        self._deadline = 0 if seconds is None else monotonic_ns() + int(seconds * 1e9)
        self.refs: list[GraphRef] = []
        self.error: BaseException | None = None

    def start(self) -> None:
        inputs, self._inputs = self._inputs, ()
        try:
            self.refs = self._graph.run(inputs, self._deadline, self._seconds)
        except Exception as error:
            self.error = error

    def interrupted(self, error: BaseException) -> None:
        self.error = error
