"""The entry of a graph in the driver's process: an execution runs here and now."""

from __future__ import annotations

from typing import Any

from conveyor._core import monotonic_ns
from conveyor.engine.inline.graph import InlineGraph
from conveyor.engine.inline.lines import Job
from conveyor.engine.inline.source import InlineSource
from conveyor.exceptions import CapacityError
from conveyor.runtime.graph.arguments import check_inputs, match_inputs, takes_parts
from conveyor.runtime.graph.results import GraphRef, Results, Streams
from conveyor.runtime.graph.submitter import Attempt, Need, Terms
from conveyor.runtime.refs.values import wait_for
from conveyor.runtime.waiting.patience import Patience


class InlineEntry:
    """Runs executions in the graph's turn; see ``runtime.graph.submitter.Entry``."""

    def __init__(
        self, graph: InlineGraph, results: Results, source: InlineSource, streams: Streams
    ) -> None:
        self.takes_parts = takes_parts(graph.plan)
        self._graph = graph
        self._results = results
        self._source = source
        self._streams = streams

    def at_once(self, args: tuple[Any, ...], kwargs: dict[str, Any], blocking: bool = True) -> None:
        """An attempt is not much slower here."""

    def is_down(self) -> bool:
        return False  # an execution looks when it has its turn

    def revive(self) -> None:
        """An execution brings the graph back when it has its turn."""

    def begin(self, terms: Terms) -> None:
        """The deadline runs from the time at which the arguments are there."""

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_inputs(self._graph.plan, self._graph.name, args, kwargs)

    def until_done(self, need: Need, execution: None) -> Need:
        return need

    def submit(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        execution: None,
        terms: Terms,
        error: BaseException | None = None,
    ) -> Attempt:
        yield from ()  # it lacks nothing, and is an attempt all the same
        if error is not None:
            return self._results.failed(error, self._source, self._streams)
        graph = self._graph
        inputs = match_inputs(graph.plan, graph.name, args, kwargs)
        passed = self._results.passed(args, kwargs)
        job = _ExecutionJob(graph, inputs, terms.seconds, self._source)
        if graph.turns.lines.current().loop is None:
            graph.turns.run(job)
        else:  # from a coroutine of an actor
            job.start()
        if job.error is not None:
            raise job.error
        return self._results.arrange(job.refs, passed, self._streams)


class InlineWays:
    """Gets what is lacking, so that the thread that needs it may be the one that makes it."""

    def block(self, attempt: Attempt, patience: Patience) -> Any:
        """Run the attempt; a timeout has no effect."""
        try:
            while True:
                try:
                    need = next(attempt)
                except StopIteration as over:
                    return over.value
                assert need.ref is not None
                wait_for(need.ref)
        finally:
            attempt.close()

    async def wait(self, attempt: Attempt) -> Any:
        """Run the attempt; the event loop stands still meanwhile."""
        return self.block(attempt, Patience(None))

    def refuse(self, attempt: Attempt) -> Any:
        """Run the attempt; raise ``CapacityError`` if an argument is not there."""
        try:
            need = next(attempt)
        except StopIteration as over:
            return over.value
        finally:
            attempt.close()
        assert need.refusal is not None
        raise CapacityError(need.refusal())


class _ExecutionJob(Job):
    """One execution, as what the graph has its turns for."""

    def __init__(
        self,
        graph: InlineGraph,
        inputs: tuple[Any, ...],
        seconds: float | None,
        source: InlineSource,
    ) -> None:
        super().__init__(graph.turns, f"an execution of {graph.name}")
        self._graph = graph
        self._inputs = inputs
        self._seconds = seconds
        self._deadline = 0 if seconds is None else monotonic_ns() + int(seconds * 1e9)
        self._source = source
        self.refs: list[GraphRef] = []
        self.error: BaseException | None = None

    def start(self) -> None:
        inputs, self._inputs = self._inputs, ()
        try:
            self.refs = self._graph.run(inputs, self._deadline, self._seconds, self._source)
        except Exception as error:
            self.error = error

    def interrupted(self, error: BaseException) -> None:
        self.error = error
