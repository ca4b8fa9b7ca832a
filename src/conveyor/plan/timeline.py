"""Timeline of a Plan's processes in virtual time: what each does when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SpanKind = Literal["submit", "receive", "wait", "transfer", "compute", "send", "idle"]
"""Kind of a span. ``"wait"``: it stands at a receive whose value has not come, or the executor
at its next submission. ``"idle"``: the same, before the process's first work or after its last.
``"receive"`` takes no time, since values are read in place. ``"transfer"``: tensors come to the process
beside a frame, whatever it does meanwhile."""

Why = Literal["start", "order", "data", "tensors", "room", "pace"]
"""Cause of a span's wait. ``"order"``: the span before it in its process. ``"data"``: a frame.
``"tensors"``: what travels beside a frame. ``"room"``: an older execution's end. ``"pace"``: its time had not
come. ``"start"``: nothing."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a process does for a time.

    place: the actor's number, or ``EXECUTOR``.
    kind: what it is.
    label: the task, or what comes on the edge.
    number: the number of the task, or of the edge; -1 where it is about neither.
    execution: the execution, counted from 0; -1: it is about none.
    start, end: seconds since the beginning.
    why: what it had waited for last.
    after: the place in ``Timeline.spans`` of the span that had to end before this one could begin, the last
        of them to do so; -1: there is none.
    """

    place: int
    kind: SpanKind
    label: str
    number: int
    execution: int
    start: float
    end: float
    why: Why
    after: int

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Timeline:
    """Record of some executions of a Plan.

    spans: all of them. The spans of one process stand in order, but for transfers, which go on beside.
    submitted: for each execution, when its submission begins.
    completed: for each execution, when the last of its results is with the executor.
    ends: for each execution, the place of the span that its completion waited for.
    """

    spans: tuple[Span, ...]
    submitted: tuple[float, ...]
    completed: tuple[float, ...]
    ends: tuple[int, ...]

    @property
    def end(self) -> float:
        """Time at which everything is over."""
        return max((*self.completed, *(span.end for span in self.spans)))
