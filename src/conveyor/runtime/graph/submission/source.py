"""Where the refs of a graph over processes get their results."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from conveyor import _core
from conveyor.exceptions import ArenaFullError, ConveyorError, SessionEndedError
from conveyor.plan.model import Plan
from conveyor.runtime import ending
from conveyor.runtime.graph.account import ProcessAccount
from conveyor.runtime.graph.executor import Executor
from conveyor.runtime.graph.holdups import HoldUps
from conveyor.runtime.graph.results import Results
from conveyor.runtime.graph.status import RingProgress
from conveyor.runtime.graph.telemetry.afar import HASTE
from conveyor.runtime.refs.ref import EMPTY, Ref, cancelled_error, final
from conveyor.runtime.refs.together import get_or_wait
from conveyor.runtime.waiting.deadlock import Wait, sooner
from conveyor.runtime.waiting.patience import Patience
from conveyor.runtime.waiting.works import Again, Blockers, steps_of

#: How long a wait may last before it is worth preparing to log and describe it.
_FIRST_LOOK = 0.005


def execution_of(graph: str, ref: Ref) -> str:
    """In words: the execution of ``graph`` that ``ref`` is of."""
    number = f"execution {ref._number}" if ref._number >= 0 else "an execution that was not sent"
    return f"{graph}, {number}"


def describe_result(graph: str, plan: Plan, results: Results, ref: Ref) -> str:
    """In words: which result of ``graph`` the ref stands for."""
    position = results.position(ref._reader)
    output = "" if position is None else f", output {position}"
    source = plan.edges[results.edges[ref._reader]].source
    return f"{execution_of(graph, ref)}{output} (from {source})"


class GraphSource:
    """The source of the refs of executions that have no deadline; see ``refs.ref.Source``."""

    #: On the monotonic clock; 0: none. An ``Execution`` has one.
    deadline = 0

    def __init__(self, account: ProcessAccount, results: Results, executor: Executor) -> None:
        self.account = account
        self.name = account.name
        self.plan = account.plan
        self.cancel_with_await = account.config.cancel_with_await
        self.get_timeout = account.config.get_timeout
        self.alarm = executor.process.alarm
        self._supervision = account.supervision
        self._results = results
        self._executor = executor
        self._process = executor.process
        self._hold_ups = HoldUps(executor, account.number)

    @property
    def gate(self) -> _core.Gate:
        """What the results of executions that begin now are taken out of."""
        return self._supervision.epoch.gate

    # Waiting

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        gate = ref._gate
        value = gate.get(ref._number, ref._reader, 0.0 if timeout == 0 else _FIRST_LOOK)
        if value is not EMPTY:
            return value
        patience = Patience(timeout)
        ask = functools.partial(self.blockers, ref)
        with self._process.lanes.waiting(ask, True, patience.bounded) as wait:
            return self._wait(ref, patience, wait)

    def _wait(self, ref: Ref, patience: Patience, wait: Wait | None) -> Any:
        gate, inbox, supervision = ref._gate, self._process.inbox, self._supervision
        while ref._outcome is EMPTY:
            seen, asked = inbox.count, inbox.asked
            deaths = self._process.board.deaths
            if wait is not None and wait.serve is not None:
                wait.serve()
            ended = supervision.past_error(ref._number)
            if ended is not None or supervision.closed_or_failed():
                value = gate.take(ref._number, ref._reader)  # what had come before
                if value is not EMPTY:
                    return value
                # It may still come, from one that lives, and would be kept as long as the graph is held.
                gate.drop(ref._number, ref._reader)
                raise final(ended or supervision.past_error(ref._number) or supervision.why())
            step = patience.step()
            if wait is not None:
                step = sooner(step, wait.look(asked))
            value = get_or_wait(ref, inbox, seen, step, deaths, wait is not None)
            if value is not EMPTY:
                return value
            patience.check(lambda: self.describe(ref), self.doing)
        return EMPTY

    def is_ready(self, ref: Ref) -> bool:
        return ref._gate.ready(ref._number, ref._reader) or self._is_lost(ref)

    def has_failed(self, ref: Ref) -> bool:
        gate, number = ref._gate, ref._number
        if gate.ready(number, ref._reader):
            return gate.failed(number, ref._reader)
        return self._is_lost(ref)

    def _is_lost(self, ref: Ref) -> bool:
        """Whether what has not come will not."""
        supervision = self._supervision
        return supervision.past_error(ref._number) is not None or supervision.closed_or_failed()

    def why(self) -> ConveyorError:
        """The error for who needs the graph, which is closed or has failed."""
        return self._supervision.why()

    # Who is waited for

    def blockers(self, ref: Ref, question: int, again: Again | None = None) -> Blockers | None:
        if ref._number < self._supervision.epoch.first:
            return ()
        return self._held_up(ref._number, [self._results.edges[ref._reader]], question, again)

    def room_blockers(self, question: int, again: Again | None = None) -> Blockers | None:
        """Who has to do something before there is room for another execution."""
        gate = self.gate
        if gate.submitted - gate.completed < self.plan.depth:
            return ()
        # The oldest execution has to end.
        return self._held_up(gate.completed, self._results.edges, question, again)

    def _held_up(
        self, number: int, edges: Sequence[int], question: int, again: Again | None
    ) -> Blockers | None:
        epoch = self._supervision.epoch
        progress = RingProgress.read(self.plan, epoch.segment, epoch.offsets, epoch.first)
        if epoch.hosts:
            holder, known = self._hold_ups.holder(epoch, progress, number, edges, question, again)
            if not known:
                return None
        else:
            holder = progress.holder(number, edges)
        if holder is None:
            return ()
        actor, source, at = holder
        text = f"{source} of {self.name} (execution {at})"
        return ((epoch.members[actor].slot, steps_of(self.account.number), text),)

    # Ending early

    def cancel(self, ref: Ref) -> bool:
        self.end(ref._number, ref._siblings(), cancelled_error(self.execution(ref)))
        return True

    def end(self, number: int, refs: Sequence[Ref], error: BaseException) -> None:
        """Nobody waits for execution ``number`` any more: ``error`` is the outcome of ``refs``, which
        are all that it has, and what has not begun is skipped."""
        epoch = self._supervision.epoch
        epoch.limits.cancel(number)
        for ref in refs:
            if ref._outcome is EMPTY:
                ref._fail(error)
                ref._gate.drop_cancelled(number, ref._reader)
                ref._gate.interrupt()
        for member, bit in zip(epoch.members, epoch.bits, strict=True):
            if member.alive:  # a coroutine may be running there
                self._process.board.ring(member.slot, bit)

    def stopped(self, ref: Ref, overdue: bool) -> BaseException:
        if type(self._supervision.closed) is SessionEndedError:  # so it was cancelled
            return ending.error()
        return cancelled_error(self.execution(ref))

    def report(self, number: int) -> tuple[int, list[int]]:
        """What execution ``number``, which has a deadline, has skipped first, and what it has run."""
        return self._supervision.epoch.limits.report(number)

    # In words

    def execution(self, ref: Ref) -> str:
        """The execution that ``ref`` is of."""
        return execution_of(self.name, ref)

    def describe(self, ref: Ref) -> str:
        return describe_result(self.name, self.plan, self._results, ref)

    def doing(self) -> str:
        """What each actor of the graph is doing now."""
        return self.account.status(patience=HASTE).summary()

    # In debug mode

    def note_got(self, ref: Ref) -> None:
        """The program has got ``ref``."""
        edge = self._results.edges[ref._reader]
        self._executor.origins().note(self.account.number, edge, ref._number)

    def explain_held(self, error: ArenaFullError) -> str:
        """Where the program got what fills an arena."""
        return self._executor.origins().explain(error, self._process.board.name(self._process.slot))
