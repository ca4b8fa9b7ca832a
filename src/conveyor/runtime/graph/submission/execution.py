"""One execution that has a deadline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from msgspec import Struct

from conveyor import _core
from conveyor.checks import deadline_in_words
from conveyor.exceptions import (
    ArenaFullError,
    ConveyorError,
    DeadlineExceededError,
    WaitTimeoutError,
)
from conveyor.plan.model import Task
from conveyor.runtime.graph.submission.source import GraphSource
from conveyor.runtime.refs.ref import EMPTY, Ref, cancelled_error
from conveyor.runtime.waiting.works import Again, Blockers


def late_error(
    graph: str,
    tasks: Sequence[Task],
    number: int,
    seconds: float,
    ran: Collection[int],
    skipped: int,
    doing: str | None,
) -> DeadlineExceededError:
    """The error of an execution of ``graph`` that was given ``seconds``. Of its ``tasks``, by number, those
    in ``ran`` had run; ``skipped`` was the first that had not (-1: not known yet; ``doing`` says what goes
    on)."""
    had = ", ".join(tasks[i].label for i in sorted(ran)) or "none"
    left = ", ".join(task.label for task in tasks if task.id not in ran)
    message = (
        f"{graph}, execution {number}: its {deadline_in_words(seconds)} has passed; tasks "
        f"that had run: {had}; not in time: {left or 'only the last result'}"
    )
    if skipped >= 0:
        message += f"; the first of them was {tasks[skipped].label}"
    elif doing is not None:
        message += f"; {doing}"
    return DeadlineExceededError(message)


class Execution(Struct, eq=False, weakref=True):
    """The source of the refs of one execution; what it has not itself it asks of the graph's."""

    _graph: GraphSource
    #: On the monotonic clock, in nanoseconds.
    deadline: int
    #: What was asked for.
    seconds: float
    _report: tuple[int, list[int]] | None = None
    _alarmed: bool = False

    # Source of its refs

    @property
    def gate(self) -> _core.Gate:
        return self._graph.gate

    @property
    def cancel_with_await(self) -> bool:
        return self._graph.cancel_with_await

    @property
    def get_timeout(self) -> float | None:
        return self._graph.get_timeout

    def wait_for(self, ref: Ref, timeout: float | None) -> Any:
        left = max(self.deadline - _core.monotonic_ns(), 0) / 1e9
        first = left if timeout is None else min(left, timeout)
        try:
            return self._graph.wait_for(ref, first)
        except WaitTimeoutError:
            if not self.overdue():
                raise
        self._expire(ref)
        return EMPTY  # expired, or just in time: in either case the ref is looked at again

    def blockers(self, ref: Ref, question: int, again: Again | None = None) -> Blockers | None:
        return ()  # at the deadline it is done, whatever those do that make it

    def is_ready(self, ref: Ref) -> bool:
        if self._graph.is_ready(ref):
            return True
        if not self._alarmed:
            # Somebody is about to sleep on the bell, which nobody else would ring at the deadline.
            self._alarmed = True
            self._graph.alarm.add(self)
        return self.overdue()

    def has_failed(self, ref: Ref) -> bool:
        if not self.is_ready(ref):  # which has the bell rung at the deadline
            return False
        return self._graph.has_failed(ref) or not self._graph.is_ready(ref)

    def cancel(self, ref: Ref) -> bool:
        self._graph.end(ref._number, ref._siblings(), cancelled_error(self._graph.execution(ref)))
        return True

    def stopped(self, ref: Ref, overdue: bool) -> BaseException:
        return self.late(ref._number) if overdue else self._graph.stopped(ref, overdue)

    def describe(self, ref: Ref) -> str:
        return self._graph.describe(ref)

    def note_got(self, ref: Ref) -> None:
        self._graph.note_got(ref)

    def explain_held(self, error: ArenaFullError) -> str:
        return self._graph.explain_held(error)

    def doing(self) -> str:
        return self._graph.doing()

    def why(self) -> ConveyorError:
        return self._graph.why()

    # Deadline

    def overdue(self) -> bool:
        """Whether the deadline has passed."""
        return _core.monotonic_ns() >= self.deadline

    def _expire(self, ref: Ref) -> None:
        """The deadline has passed: what is not there yet will not be."""
        number, gate = ref._number, ref._gate
        late = [
            r for r in ref._siblings() if r._outcome is EMPTY and not gate.ready(number, r._reader)
        ]
        if late:
            self._graph.end(number, late, self.late(number))

    def late(self, number: int) -> DeadlineExceededError:
        """The error of what has not come in time, of execution ``number``, which is this one."""
        skipped, ran = self._report or self._graph.report(number)
        doing = self._graph.doing() if skipped < 0 else None
        tasks = self._graph.plan.tasks
        return late_error(self._graph.name, tasks, number, self.seconds, ran, skipped, doing)

    def keep_report(self, number: int) -> None:
        """Another execution is about to use the words of execution ``number``, which is this one."""
        self._report = self._graph.report(number)
