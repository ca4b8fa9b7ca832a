"""The graphs of a session without other processes: laid, put together, taken down."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from conveyor.config import Config
from conveyor.engines.inline.actor import Actor
from conveyor.engines.inline.graph import InlineGraph, InlineSession, InlineStream, Production
from conveyor.engines.inline.loopback import Raised, interrupts
from conveyor.exceptions import RuntimeStateError, TaskError
from conveyor.graph.assembly import Begun, assemble, supervise, whole
from conveyor.graph.compiled import CompiledGraph
from conveyor.graph.entry import OwnerEntry, Source
from conveyor.graph.executor import DeployedChannels, GraphWorker
from conveyor.graph.handles import SharedGraphs
from conveyor.graph.lifecycle import GraphInfo, Lifecycle
from conveyor.graph.result_source import GraphSource
from conveyor.graph.results import GraphRef, Results, Streams
from conveyor.graph.status import ExecutionStatus, GraphStatus
from conveyor.graph.submission import Need, Submission, SubmissionWaits, Terms, match_inputs
from conveyor.graph.telemetry import Progress, Question, RemoteStatus, Track, result_edges, stack_of
from conveyor.plan.model import EXECUTOR, Plan
from conveyor.refs.ref import Ref, Unseen, failure_of
from conveyor.refs.values import wait_for
from conveyor.runtime.status import ActorStatus
from conveyor.runtime.waiting import TimeLimit
from conveyor.weak import WeakSet


class InlineRef(GraphRef):
    """A result whose errors have the exception itself as their ``__cause__``, for the debugger."""

    __slots__ = ("raised",)

    raised: Raised

    def _arrived(self, value: Any) -> None:
        super()._arrived(value)
        if isinstance(failure_of(self._outcome), TaskError):
            again = partial(self.raised.error, value.meta)
            self._fail(again(), again)


class InlineEntry(OwnerEntry):
    """Submits to the window in the graph's turn, and has all of the execution run."""

    def __init__(
        self, graph: InlineGraph, lifecycle: Lifecycle, results: Results, source: GraphSource
    ) -> None:
        super().__init__(lifecycle, results, source, InlineRef)
        self._graph = graph

    def at_once(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        deadline: Any = None,
        blocking: bool = True,
    ) -> None:
        """Return ``None``: a submission is not much slower here."""

    def is_down(self) -> bool:
        return False  # an execution looks when it has its turn

    def revive(self, terms: Terms) -> None:
        """Do nothing: an execution brings the graph back when it has its turn."""

    def begin(self, terms: Terms) -> Source:
        return self._source  # the deadline runs from the time at which the arguments are there

    def until_done(self, need: Need, execution: Source) -> Need:
        return need

    def submit(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        execution: Source,
        terms: Terms,
        error: BaseException | None = None,
    ) -> Submission:
        yield from ()  # it lacks nothing, and is a submission all the same
        if error is not None:
            return self._results.failed(error, execution, self._streams({}))
        self._check_session()
        inputs = match_inputs(self._plan, self._name, args, kwargs)
        passed = self._results.passed(args, kwargs)
        return self._graph.exclusively(
            lambda: self._run(inputs, passed, super(InlineEntry, self).begin(terms))
        )

    def _make_fit(self) -> None:
        lifecycle = self._lifecycle
        if not lifecycle.closed_or_failed() and not self._graph.is_at(
            lifecycle.epoch.window.submitted
        ):
            text = f"{self._name} was interrupted in the middle of an execution"
            lifecycle.failure = RuntimeStateError(text)
        lifecycle.restart_if_possible(TimeLimit(None))  # nothing else happens meanwhile

    def _run(self, inputs: tuple[Any, ...], passed: Mapping[int, Ref], execution: Source) -> Any:
        self._make_fit()
        with self._lock:
            first = self._submit(inputs, execution)
        # All that was submitted before has come to its end.
        assert first is not None
        number, epoch = first._number, self._lifecycle.epoch
        run = self._graph.run(number, epoch, execution.deadline)
        every: list[InlineRef] = first._with_siblings(self._outputs)
        for ref in every:
            ref.raised = run.raised
        failed = {ref: ref._resolve(None) for ref in every if ref.has_failed()}
        errors = [
            outcome
            for outcome in failed.values()
            if isinstance(outcome.error, TaskError) and not interrupts(outcome.error.cause)
        ]
        if errors:
            unseen = Unseen(errors[0].error)
            for outcome in errors:
                outcome.unseen = unseen
        if failed and epoch.limits.failed(number):  # as one: then generators end, too
            ref, outcome = next(iter(failed.items()))
            for production in run.productions.values():
                if not production.over:
                    production.cut(partial(ref._error_of, outcome))
        made = self._results.arrange(every, passed, self._streams(run.productions))
        for outcome in failed.values():
            # A value has raised it that was sent, or rebuilt: a task would have broken the execution off.
            cause = getattr(failure_of(outcome), "cause", None)
            if cause is not None and interrupts(cause):
                raise cause
        return made

    def _streams(self, productions: Mapping[int, Production]) -> Streams:
        """Return, for each output of a generator, the function that makes the reference to its items."""
        return {
            ended: partial(InlineStream, productions.get(items))
            for ended, items in self._plan.streams
        }


class InlineWaits(SubmissionWaits):
    """Waits of the inline engine. The waiting thread may be the one that makes what it waits for, so a
    timeout has no effect, and an event loop stands still meanwhile."""

    def _block(self, need: Need, time_limit: TimeLimit) -> None:
        assert need.ref is not None
        wait_for(need.ref)

    async def wait(self, submission: Submission) -> Any:
        """Run the submission."""
        return self.block(submission, TimeLimit(None))


class InlineGraphInfo(GraphInfo):
    """Tells of a graph whose actors have no status pages, no arenas and no processes of their own."""

    def __init__(self, graph: InlineGraph, lifecycle: Lifecycle) -> None:
        super().__init__(lifecycle)
        self._graph = graph

    def restart(self) -> None:
        """Restart the graph between two executions."""
        self._graph.exclusively(self.lifecycle.restart)

    def progress(self) -> Progress:
        window, arena = self.lifecycle.epoch.window, self.lifecycle.process.arena
        window.count_completed()
        held = {EXECUTOR: arena.bytes_touched}
        return Progress(
            window.submitted, window.completed, window.stashed, window.stashed_bytes, held
        )

    def tracks(self) -> list[Track]:
        pid = os.getpid()
        actors = (Track(a.index, a.name, pid, a.index + 1) for a in self.plan.actors)
        return [Track(EXECUTOR, "driver", pid, None), *actors]

    def status(self, stacks: bool = False, time_limit: float = 0) -> GraphStatus:
        lifecycle, window, at = self.lifecycle, self.lifecycle.epoch.window, self._graph.at
        lifecycle.closed_or_failed()  # it may not have been noticed
        actors = tuple(_actor_status(actor, stacks) for actor in self._graph.actors)
        running: tuple[ExecutionStatus, ...] = ()
        if at is not None:
            outstanding = tuple(self.plan.edges[edge].source for edge in result_edges(self.plan))
            names = tuple(actor.name for actor in actors if actor.execution == at)
            running = (ExecutionStatus(at, outstanding, names),)
        error = lifecycle.closed or lifecycle.failure
        return GraphStatus(
            self.name,
            self.state,
            self.plan.depth,
            window.submitted,
            window.submitted - len(running),
            running,
            actors,
            None if error is None else str(error),
        )


def _actor_status(actor: Actor, stacks: bool) -> ActorStatus:
    pid = os.getpid()
    if not actor.alive:
        return ActorStatus(actor.name, pid, "dead", error=str(actor.death()))
    running = actor.queue.running()
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


class InlineDeployer:
    """Lays graphs as their executor: see ``graph.executor.Executor``."""

    def __init__(self, session: InlineSession) -> None:
        self.process = session.process
        self.kill = session.kill
        self.keep = session.keep
        self.origins = session.origins
        #: Of all graphs that somebody holds.
        self.graph_infos: WeakSet[InlineGraphInfo] = WeakSet()
        self.shared = SharedGraphs(self.graph_infos)
        self._session = session
        self._numbers = itertools.count(1)
        self._graphs: dict[int, InlineGraph] = {}

    def compile(self, plan: Plan, config: Config) -> CompiledGraph:
        """Lay the graph of ``plan``."""
        return whole(self, lambda begun: self._compiled(plan, config, begun))

    def _compiled(self, plan: Plan, config: Config, begun: Begun) -> CompiledGraph:
        results = Results(plan, self.keep)
        lifecycle = supervise(self, plan, config, begun)
        graph = self._graphs[lifecycle.number]
        graph_info = InlineGraphInfo(graph, lifecycle)
        entry = InlineEntry(graph, lifecycle, results, GraphSource(graph_info, results, self))
        self.graph_infos.add(graph_info)
        return assemble(graph_info, entry, InlineWaits(self.process), "inline")

    def deploy(self, plan: Plan, config: Config, begun: Begun) -> DeployedChannels:
        number = next(self._numbers)
        begun(number)
        graph = InlineGraph(self._session, plan, config, number)
        deployed = graph.deploy()
        self._graphs[graph.number] = graph
        return deployed

    def redeploy(self, number: int, first: int, time_limit: TimeLimit) -> DeployedChannels:
        return self._graphs[number].redeploy(first)

    def comes_back(self, number: int) -> bool:
        return self._graphs[number].comes_back()

    def end_unmade(self, number: int) -> None:
        self._graphs[number].end_unmade()

    def undeploy(self, number: int) -> list[tuple[GraphWorker, Ref]]:
        self.process.limit_spin(number, None)
        self.shared.forget(number)
        graph = self._graphs.pop(number, None)
        if graph is not None:
            graph.unload()
        return []

    def drop(self, number: int) -> None:
        # At once: nothing of it runs, or somebody would hold it. A forked child has no part in it.
        if not self.process.inbox.inherited:
            self.undeploy(number)

    def remote_status(self, number: int, question: Question, time_limit: float) -> RemoteStatus:
        return RemoteStatus()  # there is one host

    def remote_later(self, number: int, then: Callable[[RemoteStatus | Exception], object]) -> None:
        then(RemoteStatus())

    def label(self, graph: int, node: int) -> None:
        """Return ``None``: a graph knows its own tasks, and no actor tells of tasks of other graphs."""

    def close(self) -> None:
        """Undeploy all graphs, since the session has ended."""
        self.shared.clear()
        for number in list(self._graphs):
            self.undeploy(number)
