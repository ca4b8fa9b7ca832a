"""The entry of a graph in the driver's process: an execution runs here and now."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from conveyor.engine.inline.failure import Raised, interrupts
from conveyor.engine.inline.graph import InlineGraph
from conveyor.engine.inline.streams import InlineStream, Production
from conveyor.exceptions import RuntimeStateError, TaskError
from conveyor.runtime.graph.results import GraphRef, Results, Streams
from conveyor.runtime.graph.submission.arguments import match_inputs
from conveyor.runtime.graph.submission.entry import GateEntry, Source
from conveyor.runtime.graph.submission.source import GraphSource
from conveyor.runtime.graph.submission.submitter import Attempt, BellWays, Need, Terms
from conveyor.runtime.graph.supervision import Supervision
from conveyor.runtime.refs.outcome import Unseen, failure_of
from conveyor.runtime.refs.ref import Ref
from conveyor.runtime.refs.values import wait_for
from conveyor.runtime.waiting.patience import Patience


class InlineRef(GraphRef):
    """A result whose errors have the exception itself as their ``__cause__``, for the debugger."""

    __slots__ = ("raised",)

    raised: Raised

    def _arrived(self, value: Any) -> None:
        super()._arrived(value)
        if isinstance(failure_of(self._outcome), TaskError):
            again = partial(self.raised.error, value.meta)
            self._fail(again(), again)


class InlineEntry(GateEntry):
    """Submits to the gate in the graph's turn, and has all of the execution run."""

    def __init__(
        self, graph: InlineGraph, supervision: Supervision, results: Results, source: GraphSource
    ) -> None:
        super().__init__(supervision, results, source, InlineRef)
        self._graph = graph

    def at_once(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        deadline: Any = None,
        blocking: bool = True,
    ) -> None:
        """An attempt is not much slower here."""

    def is_down(self) -> bool:
        return False  # an execution looks when it has its turn

    def revive(self, terms: Terms) -> None:
        """An execution brings the graph back when it has its turn."""

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
    ) -> Attempt:
        yield from ()  # it lacks nothing, and is an attempt all the same
        if error is not None:
            return self._results.failed(error, execution, self._streams({}))
        self._check_session()
        inputs = match_inputs(self._plan, self._name, args, kwargs)
        passed = self._results.passed(args, kwargs)
        return self._graph.in_turn(
            lambda: self._run(inputs, passed, super(InlineEntry, self).begin(terms))
        )

    def _make_fit(self) -> None:
        supervision = self._supervision
        if not supervision.closed_or_failed() and not self._graph.is_at(
            supervision.epoch.gate.submitted
        ):
            text = f"{self._name} was interrupted in the middle of an execution"
            supervision.failure = RuntimeStateError(text)
        supervision.restart_if_possible(Patience(None))  # nothing else happens meanwhile

    def _run(self, inputs: tuple[Any, ...], passed: Mapping[int, Ref], execution: Source) -> Any:
        self._make_fit()
        with self._lock:
            first = self._submit(inputs, execution)
        # Whatever was submitted before has come to its end.
        assert first is not None
        number, epoch = first._number, self._supervision.epoch
        run = self._graph.run(number, epoch, execution.deadline)
        every: list[InlineRef] = first._with_siblings(self._outputs)
        for ref in every:
            ref.raised = run.raised
        failed = {ref: ref._settle(None) for ref in every if ref.has_failed()}
        errors = [outcome for outcome in failed.values() if isinstance(outcome.error, TaskError)]
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
        """For each output that is a generator's: what makes the reference to its items."""
        return {
            ended: partial(InlineStream, productions.get(items))
            for ended, items in self._plan.streams
        }


class InlineWays(BellWays):
    """Gets what is lacking, so that the thread that needs it may be the one that makes it: a timeout has no
    effect, and an event loop stands still meanwhile."""

    def _block(self, need: Need, patience: Patience) -> None:
        assert need.ref is not None
        wait_for(need.ref)

    async def wait(self, attempt: Attempt) -> Any:
        """Run the attempt."""
        return self.block(attempt, Patience(None))
