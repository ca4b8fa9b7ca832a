"""One execution that has a deadline."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.exceptions import ArenaFullError, DeadlineExceededError, WaitTimeoutError
from conveyor.runtime.refs.ref import EMPTY, Ref, cancelled_error
from conveyor.runtime.waiting.works import Blockers

if TYPE_CHECKING:
    from conveyor.runtime.graph.compiled import CompiledGraph
    from conveyor.runtime.graph.submission import SubmittingGraph


def late_error(
    graph: CompiledGraph,
    number: int,
    seconds: float,
    ran: Collection[int],
    skipped: int,
    doing: str | None,
) -> DeadlineExceededError:
    """The error of an execution that was given ``seconds``. Of its tasks, by number, those in ``ran``
    had run; ``skipped`` was the first that had not (-1: not known yet; ``doing`` says what goes on)."""
    tasks = graph.plan.tasks
    had = ", ".join(tasks[i].label for i in sorted(ran)) or "none"
    left = ", ".join(task.label for task in tasks if task.id not in ran)
    message = (
        f"{graph.name}, execution {number}: its deadline of {round(seconds, 6):g} s has passed; tasks "
        f"that had run: {had}; not in time: {left or 'only the last result'}"
    )
    if skipped >= 0:
        message += f"; the first of them was {tasks[skipped].label}"
    elif doing is not None:
        message += f"; {doing}"
    return DeadlineExceededError(message)


class Execution:
    """The source of the refs of one execution; what it has not itself it asks of the graph."""

    __slots__ = (
        "__weakref__",
        "_alarmed",
        "_report",
        "cancel_with_await",
        "deadline",
        "gate",
        "get_timeout",
        "graph",
        "seconds",
    )

    def __init__(self, graph: SubmittingGraph, deadline: int, seconds: float) -> None:
        """deadline: on the monotonic clock, in nanoseconds. seconds: what was asked for."""
        self.graph = graph
        self.gate = graph.gate
        self.cancel_with_await = graph.cancel_with_await
        self.get_timeout = graph.get_timeout
        self.deadline = deadline
        self.seconds = seconds
        self._report: tuple[int, list[int]] | None = None
        self._alarmed = False

    # Source of its refs

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        left = max(self.deadline - _core.monotonic_ns(), 0) / 1e9
        first = left if timeout is None else min(left, timeout)
        try:
            return self.graph.wait_for(ref, first)
        except WaitTimeoutError:
            if not self.overdue():
                raise
        self._expire(ref)
        return EMPTY  # expired, or just in time: in either case the ref is looked at again

    def blockers(self, ref: Ref, question: int) -> Blockers | None:
        return self.graph.blockers(ref, question)

    def is_ready(self, ref: Ref) -> bool:
        if self.graph.is_ready(ref):
            return True
        if not self._alarmed:
            # Somebody is about to sleep on the bell, which nobody else would ring at the deadline.
            self._alarmed = True
            self.graph.alarm.add(self)
        return self.overdue()

    def has_failed(self, ref: Ref) -> bool:
        if not self.is_ready(ref):  # which has the bell rung at the deadline
            return False
        return self.graph.has_failed(ref) or not self.graph.is_ready(ref)

    def cancel(self, ref: Ref) -> bool:
        self.graph.end(ref._number, ref._siblings(), cancelled_error(self.graph.execution(ref)))
        return True

    def stopped(self, ref: Ref, overdue: bool) -> BaseException:
        return self.late(ref._number) if overdue else self.graph.stopped(ref, overdue)

    def describe(self, ref: Ref) -> str:
        return self.graph.describe(ref)

    def note_got(self, ref: Ref) -> None:
        self.graph.note_got(ref)

    def explain_held(self, error: ArenaFullError) -> str:
        return self.graph.explain_held(error)

    def doing(self) -> str:
        return self.graph.doing()

    # Deadline

    def overdue(self) -> bool:
        return _core.monotonic_ns() >= self.deadline

    def _expire(self, ref: Ref) -> None:
        """The deadline has passed: what is not there yet will not be."""
        number, gate = ref._number, self.gate
        late = [
            r for r in ref._siblings() if r._outcome is EMPTY and not gate.ready(number, r._reader)
        ]
        if late:
            self.graph.end(number, late, self.late(number))

    def late(self, number: int) -> DeadlineExceededError:
        skipped, ran = self._report or self.graph.limits.report(number)
        doing = self.graph.doing() if skipped < 0 else None
        return late_error(self.graph, number, self.seconds, ran, skipped, doing)

    def keep_report(self, number: int) -> None:
        """Another execution is about to use its words."""
        self._report = self.graph.limits.report(number)
