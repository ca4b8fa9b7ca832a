"""Simulation of a Plan in virtual time: what every process would do when, if steps took given times.

The rules are those of the native program (``native/python/program.cpp``). An actor does the steps of an
execution in its program's order, one at a time, and all of them before those of the next execution; an async
method holds its program as any other does. A receive goes on when its frame has come. A send copies the value
and never waits. Up to ``depth`` executions are in flight: the executor submits the next one when the oldest
has all of its results there.

An event that has happened stays so. So it does not matter which process is followed first, and each can be
followed as far as it comes (as in ``plan/schedule.py``). There is no queue of events. There is one exception:
a process that takes a frame if it is there by some time (``Try``) must know whether it will be. When no
process can be followed any further, none does anything before the first of these times: a frame that is not
there then has not come by that time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from conveyor.plan.model import (
    EXECUTOR,
    MOST_LEFT_OUT,
    MOST_TIME,
    TIME_LIMIT,
    VAIN,
    Await,
    Call,
    Plan,
    Recv,
    Send,
    Step,
    Try,
    assert_never,
)

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

    participant: the actor's number, or ``EXECUTOR``.
    kind: what it is.
    label: the task, or what comes on the edge.
    number: the number of the task, or of the edge; -1 where it is about neither.
    execution: the execution, counted from 0; -1: it is about none.
    start, end: seconds since the beginning.
    why: what it had waited for last.
    after: the position in ``Timeline.spans`` of the span that had to end before this one could begin, the
        last of them to do so; -1: there is none.
    """

    participant: int
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
    ends: for each execution, the position of the span that its completion waited for.
    """

    spans: tuple[Span, ...]
    submitted: tuple[float, ...]
    completed: tuple[float, ...]
    ends: tuple[int, ...]

    @property
    def end(self) -> float:
        """Time at which everything is over."""
        return max((*self.completed, *(span.end for span in self.spans)))


#: An event that a process waits for: the frame of an execution is on an edge (kind, edge, execution), or an
#: execution is complete (kind, -1, execution).
_Event = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Costs:
    """How long things take, in seconds.

    task: by task and execution.
    copy: by edge, how long its values take from one memory to another: at the writer, while it sends, or
        where tensors travel beside the frames, on their way.
    latency: from a frame's publication until its reader can go on.
    """

    task: Callable[[int, int], float]
    copy: Callable[[int], float]
    latency: float


def follow(
    plan: Plan, costs: Costs, executions: int, depth: int, pace: float | None = None
) -> Timeline:
    """Follow ``plan`` through ``executions``.

    Args:
        depth: so many of them may be on their way.
        pace: the seconds between two submissions, as far as there is room; ``None``: the next one begins as
            soon as there is.
    """
    run = _Run(plan, costs)
    executor = _Executor(run, executions, depth, pace)
    actors = [_Actor(run, number, executions) for number in range(len(plan.programs))]
    ready: list[_Executor | _Actor] = [executor, *actors]
    while ready:
        process = ready.pop()
        missing = process.go_on()
        if missing is not None:
            run.waiting.setdefault(missing, []).append(process)
        ready += run.woken
        run.woken.clear()
        doubting = [] if ready else [actor for actor in actors if actor.doubt is not None]
        if doubting:
            ready.append(run.expire_first(doubting))
    assert not run.waiting, "a Plan that was not proved"
    for actor in actors:
        actor.tail(max(run.completed))
    return Timeline(
        tuple(run.spans), tuple(executor.submitted), tuple(run.completed), tuple(run.ends)
    )


class _Run:
    """State that all processes of one simulation share."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan = plan
        self.costs = costs
        self.spans: list[Span] = []
        #: By event, when it happens and because of which span.
        self.happened: dict[_Event, tuple[float, int]] = {}
        self.waiting: dict[_Event, list[_Executor | _Actor]] = {}
        self.woken: list[_Executor | _Actor] = []
        self.completed: list[float] = []
        self.ends: list[int] = []
        self.results = tuple(dict.fromkeys((*plan.outputs, *plan.effects)))
        self._missing: dict[int, int] = {}  # by execution, results that have not come

    def expire_first(self, doubting: list[_Actor]) -> _Actor:
        """Tell the actor with the earliest limit that its frame has not come by then, and return the
        actor."""
        first = min(doubting, key=_Actor.doubts_until)
        assert first.doubt is not None
        event, until = first.doubt
        first.doubt, first.absent[event[1]] = None, until
        self.waiting[event].remove(first)
        if not self.waiting[event]:
            del self.waiting[event]
        return first

    def add(self, span: Span) -> int:
        self.spans.append(span)
        return len(self.spans) - 1

    def happens(self, event: _Event, at: float, span: int) -> None:
        self.happened[event] = at, span
        self.woken += self.waiting.pop(event, ())

    def publish(self, edge: int, execution: int, at: float, span: int) -> None:
        """Deliver a frame to its readers."""
        at += self.costs.latency
        self.happens(("frame", edge, execution), at, span)
        if edge in self.results:
            left = self._missing.get(execution, len(self.results)) - 1
            self._missing[execution] = left
            if left == 0:
                del self._missing[execution]
                frames = [self.happened["frame", edge, execution] for edge in self.results]
                self.complete(execution, *max(frames))

    def complete(self, execution: int, at: float, span: int) -> None:
        """Note that all results of ``execution`` are there. Rings are read in order, so executions end in
        the order in which they began."""
        self.completed.append(at)
        self.ends.append(span)
        self.happens(("complete", -1, execution), at, span)


class _Process:
    """Process of a simulation: its own clock, and the span that it ended last."""

    def __init__(self, run: _Run, participant: int) -> None:
        self.run = run
        self.participant = participant
        self.now = 0.0
        self.why: Why = "start"
        self.after = -1
        self.worked = False

    def wait(self, until: float, why: Why, after: int, label: str, number: int, n: int) -> None:
        """Stand still until something has happened, if it has not."""
        if until <= self.now:
            return
        kind: SpanKind = "wait" if self.worked else "idle"
        self.run.add(Span(self.participant, kind, label, number, n, self.now, until, why, after))
        self.now, self.why, self.after = until, why, after

    def work(self, kind: SpanKind, label: str, number: int, n: int, seconds: float) -> int:
        """Do something."""
        end = self.now + seconds
        span = Span(self.participant, kind, label, number, n, self.now, end, self.why, self.after)
        self.after = self.run.add(span)
        self.now, self.why = end, "order"
        self.worked = self.worked or kind not in ("receive", "wait", "idle")
        return self.after


class _Executor(_Process):
    """The process that submits and reads results, as soon as it can."""

    def __init__(self, run: _Run, executions: int, depth: int, pace: float | None) -> None:
        super().__init__(run, EXECUTOR)
        self.executions = executions
        self.depth = depth
        self.pace = pace
        self.submitted: list[float] = []

    def go_on(self) -> _Event | None:
        """Submit as far as there is room. Return what is missing."""
        run = self.run
        while len(self.submitted) < self.executions:
            n = len(self.submitted)
            if n >= self.depth:
                completed = run.happened.get(("complete", -1, n - self.depth))
                if completed is None:
                    return "complete", -1, n - self.depth
                self.wait(completed[0], "room", completed[1], "room", -1, n)
            if self.pace is not None:
                self.wait(n * self.pace, "pace", self.after, "its time", -1, n)
            self.submitted.append(self.now)
            self._submit(n)
        return None

    def _submit(self, n: int) -> None:
        run, edges = self.run, [bundle.edge for bundle in self.run.plan.inputs]
        # Every input is encoded before the first one is published.
        self.work("submit", "execute", -1, n, sum(map(run.costs.copy, edges)))
        for edge in edges:
            run.publish(edge, n, self.now, self.after)
        if not run.results:
            run.complete(n, self.now, self.after)


@dataclass(slots=True)
class _Tried:
    """State of a receive that an actor tries; see :class:`Try`.

    taken: the execution whose frame was taken before the receive.
    ahead, last: how long the tasks between have taken so far, and in the execution before.
    spent: how long the actor has waited for the frame.
    vain, left_out: how many waits in a row were in vain, and how many are to be left out.
    """

    taken: int = -1
    ahead: float = 0.0
    last: float = 0.0
    spent: float = 0.0
    vain: int = 0
    left_out: int = 0

    def waited(self, good: bool) -> None:
        """Note how a wait has ended."""
        self.vain = 0 if good else self.vain + 1
        if self.vain >= VAIN:
            self.left_out = min(1 << min(self.vain - VAIN, 31), MOST_LEFT_OUT)


class _Actor(_Process):
    """An actor, which follows its program."""

    def __init__(self, run: _Run, number: int, executions: int) -> None:
        super().__init__(run, number)
        self.executions = executions
        self.steps = run.plan.programs[number].steps
        self.pc = 0
        self.execution = 0
        #: By edge, when the tensors under way will be there, and the span of their transfer.
        self.coming: dict[int, tuple[float, int]] = {}
        #: By edge, the receives that are tried, with what is known of that; those that are open.
        self.tried: dict[int, _Tried] = {}
        self.open: list[int] = []
        #: The question that must be answered before the actor can go on: does the event happen until that
        #: time?
        self.doubt: tuple[_Event, float] | None = None
        #: By edge, until when the frame of this execution is known not to have come.
        self.absent: dict[int, float] = {}

    def go_on(self) -> _Event | None:
        """Follow the program as far as input is there. Return what is missing."""
        self.doubt = None
        while self.execution < self.executions:
            while self.pc < len(self.steps):
                missing = self._step(self.steps[self.pc])
                if missing is not None:
                    return missing
                self.pc += 1
            self.pc = 0
            self.execution += 1
            self.absent.clear()
        return None

    def doubts_until(self) -> float:
        """Return the time until which the actor waits for a frame that may not come."""
        assert self.doubt is not None
        return self.doubt[1]

    def tail(self, end: float) -> None:
        """Be idle until all is over."""
        if self.now < end:
            self.run.add(
                Span(self.participant, "idle", "", -1, -1, self.now, end, self.why, self.after)
            )

    def _step(self, step: Step) -> _Event | None:
        run, n = self.run, self.execution
        match step:
            case Recv():
                tried = self.tried.get(step.edge)
                if step.edge in self.open and tried is not None:
                    self.open.remove(step.edge)
                    tried.last = tried.ahead
                edge = run.plan.edges[step.edge]
                if tried is not None and tried.taken == n:
                    self.work("receive", edge.source, edge.id, n, 0.0)
                    return None
                come = run.happened.get(("frame", step.edge, n))
                if come is None:
                    return "frame", step.edge, n
                missing = self._look(come[0])
                if missing is not None:
                    return missing
                self.wait(come[0], "data", come[1], edge.source, edge.id, n)
                self.work("receive", edge.source, edge.id, n, 0.0)
                if edge.out_of_band:
                    self._transfer(edge.id, self.now)
            case Try():
                return self._try(self.tried.setdefault(step.edge, _Tried()), step.edge)
            case Await():
                until, transfer = self.coming[step.edge]
                missing = self._look(until)
                if missing is not None:
                    return missing
                source = run.plan.edges[step.edge].source
                self.wait(until, "tensors", transfer, f"tensors of {source}", step.edge, n)
            case Call():
                missing = self._look(self.now)
                if missing is not None:
                    return missing
                task = run.plan.tasks[step.task]
                seconds = run.costs.task(task.id, n)
                for number in self.open:
                    self.tried[number].ahead += seconds
                self.work("compute", task.label, task.id, n, seconds)
            case Send():
                edge = run.plan.edges[step.edge]
                copies = not edge.out_of_band and not step.only_done
                seconds = run.costs.copy(edge.id) if copies else 0.0
                sent = self.work("send", edge.source, edge.id, n, seconds)
                run.publish(edge.id, n, self.now, sent)
            case _:
                assert_never(step)
        return None

    def _transfer(self, edge: int, start: float) -> None:
        """Have tensors come beside the frame that was received, now that both ends are there. Those of the
        execution before have come: this one would not have begun else."""
        end = start + self.run.costs.copy(edge)
        n, source = self.execution, self.run.plan.edges[edge].source
        why, after = self.why, self.after
        if start > self.now:
            why, after = "data", self.run.happened["frame", edge, n][1]
        span = Span(self.participant, "transfer", source, edge, n, start, end, why, after)
        self.coming[edge] = end, self.run.add(span)

    def _try(self, tried: _Tried, edge: int) -> _Event | None:
        """Take a frame that is there, or comes in a moment."""
        n, now = self.execution, self.now
        spent = sum(self.tried[other].spent for other in self.open)
        time_limit = max(min(tried.last * TIME_LIMIT, MOST_TIME) - spent, 0.0)
        time_limit = 0.0 if tried.left_out else time_limit
        tried.ahead = tried.spent = 0.0
        here = self._comes(edge, now)
        late = self._comes(edge, now + time_limit) if here is False else here
        if here is None or late is None:
            return "frame", edge, n
        if not here and tried.left_out:
            tried.left_out -= 1
        elif not here and time_limit:
            source = self.run.plan.edges[edge].source
            if late:
                come, sent = self.run.happened["frame", edge, n]
                self.wait(come, "data", sent, source, edge, n)
            else:
                self.work("wait" if self.worked else "idle", source, edge, n, time_limit)
            tried.spent = self.now - now
            tried.waited(late)
        self.open.append(edge)
        if late:
            self._take(edge)
        return None

    def _look(self, until: float) -> _Event | None:
        """Take the frames of open receives that come while the actor waits ``until`` some time. Return what
        must be known for that."""
        for edge in self.open:
            if self.tried[edge].taken == self.execution:
                continue
            comes = self._comes(edge, max(until, self.now))
            if comes is None:
                return "frame", edge, self.execution
            if comes:
                self._take(edge)
        return None

    def _take(self, edge: int) -> None:
        self.tried[edge].taken = self.execution
        self._transfer(edge, max(self.now, self.run.happened["frame", edge, self.execution][0]))

    def _comes(self, edge: int, until: float) -> bool | None:
        """Whether a frame comes until some time. ``None``: that is in doubt."""
        event = "frame", edge, self.execution
        come = self.run.happened.get(event)
        if come is not None:
            return come[0] <= until
        if self.absent.get(edge, -1.0) >= until:
            return False
        self.doubt = event, until
        return None
