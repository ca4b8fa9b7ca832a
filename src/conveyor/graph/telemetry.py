"""Records of a graph: its counters and events, the clocks of its nodes, and what other nodes report.

The counters lie in the graph's segment, behind the rings; each process writes its own, and the driver reads
all of them without asking anybody. Behind the counters lie the rings of events, which have memory only while
the graph is traced.

The records that an actor keeps about itself are in the memory of its node. So the executor of the graph asks
each node, which reads what the executor reads of its own node, and asks no actor. An answer that does not
come in time is no answer: the actors' status is then said to be unknown.

A question to another node's clock is answered between two times of this node's clock. The answer was right at
some time in between: taking the middle is wrong by half of the round trip at most, however long each way
took. Clocks also run at slightly different speeds. Times between two such looks are interpolated.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from conveyor import _core
from conveyor.codec import Reader
from conveyor.exceptions import RuntimeStateError
from conveyor.plan.model import EXECUTOR, Plan
from conveyor.plan.reading import Outline
from conveyor.runtime.status import ProcessSnapshot, read_snapshot

_TIMEOUT = 10.0


def stack_of(pid: int) -> str:
    """Return the Python stack of every thread of the process, or in brackets why there is none."""
    # Imported here: they are slow to import, and rarely needed.
    import shutil
    import subprocess

    program = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if program is None:
        return "[no stack: py-spy is not installed; pip install py-spy]"
    try:
        # Without stopping the process: it may be stopped already, or in the middle of a hop.
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"[no stack: py-spy has not answered for {_TIMEOUT:g} s]"
    except OSError as error:
        return f"[no stack: py-spy cannot be run: {error}]"
    if done.returncode == 0:
        return done.stdout.strip()
    why = done.stderr.strip() or f"it ended with code {done.returncode}"
    if "ermission" in why:
        why += "; the kernel lets only root or a parent look (kernel.yama.ptrace_scope)"
    return f"[no stack: py-spy says: {why}]"


class Offset(Struct, frozen=True):
    """Offset of another node's clock: at ``at``, by this node's clock, the other one was ahead by ``ahead``,
    give or take ``error``. Nanoseconds, as everywhere here."""

    at: int
    ahead: int
    error: int

    @property
    def there(self) -> int:
        """Time of the other clock at that moment."""
        return self.at + self.ahead

    def seen_from(self, base: Offset) -> Offset:
        """Return the offset as seen from the clock of ``base``. Both are given by the clock of one node, at
        about one time."""
        return Offset(self.at + base.ahead, self.ahead - base.ahead, self.error + base.error)


#: The offset of a node and its own clock.
NONE = Offset(0, 0, 0)


def estimate(samples: Sequence[tuple[int, int, int]]) -> Offset:
    """Estimate an offset from questions to another clock, of which there is at least one: when it was asked,
    what it said, when that was here. The one with the shortest round trip counts."""
    requested, says, answered = min(samples, key=lambda sample: sample[2] - sample[0])
    middle = (requested + answered) // 2
    # The middle is rounded down, so the other side may be one nanosecond further away.
    return Offset(middle, says - middle, answered - middle)


class Alignment(Struct, frozen=True):
    """Conversion of another clock's times to this node's, by two looks at that clock."""

    before: Offset
    after: Offset

    @property
    def error(self) -> int:
        """Bound of the error of times between the two looks, as long as the clock's speed stays what it
        is."""
        return max(self.before.error, self.after.error)

    def here(self, there: int) -> int:
        """Return the time of this node's clock when the other one said ``there``."""
        before, after = self.before, self.after
        span = after.there - before.there
        if span <= 0 or there <= before.there:
            return there - before.ahead
        if there >= after.there:
            return there - after.ahead
        drift = (after.ahead - before.ahead) * (there - before.there)
        return there - before.ahead - drift // span


#: Number of events of one process that can wait to be taken by the driver.
EVENT_CAPACITY = 1 << 15
_PAGE = 4096


class RecorderLayout(Struct, frozen=True):
    """Layout of the records of one process of a graph. Its recorder counts by the position in ``tasks``
    (numbers of tasks), ``receives`` and ``sends`` (numbers of edges). ``outputs``: the position of each of
    its sends that the driver reads."""

    control: int
    offset: int
    events: int
    slots: int
    tasks: tuple[int, ...]
    receives: tuple[int, ...]
    sends: tuple[int, ...]
    outputs: dict[int, int]

    def open(
        self, segment: _core.Segment, whose: str = "", *, threads: bool = False
    ) -> _core.Recorder:
        """Open the recorder. ``whose``: its process, for errors. ``threads``: events say which thread they
        are of."""
        return _core.Recorder(
            segment,
            self.control,
            self.offset,
            self.events,
            EVENT_CAPACITY,
            len(self.tasks),
            len(self.receives),
            len(self.sends),
            len(self.outputs),
            self.slots,
            threads,
            whose,
        )

    def times_of(self, edge: int) -> tuple[int, int]:
        """Return the position of the times of this edge's last frames, and of how many executions; 0 if the
        edge is no output. Its writer notes them there, or, if the writer is on another node, the receiver on
        this one."""
        position = self.outputs.get(edge)
        if position is None:
            return 0, 0
        before = _core.Recorder.bytes(
            len(self.tasks),
            len(self.receives),
            len(self.sends),
            position,
            self.slots,
        )
        return self.offset + before, self.slots


def result_edges(plan: Plan) -> tuple[int, ...]:
    """Return the edges that the driver reads, each once: of the outputs, then of the effects."""
    return (*dict.fromkeys(plan.outputs), *plan.effects)


def lay_out_recorders(plan: Plan, top: int) -> tuple[dict[int, RecorderLayout], int]:
    """Lay out the recorders of the actors and of the driver in a segment that is used up to ``top``; return
    them and their end. The driver's tasks are whole executions, and waiting for room for one."""
    control = -(-top // 64) * 64
    at = control + _core.RECORDING_CONTROL_BYTES
    slots = 1 << (max((plan.depth, *(edge.depth for edge in plan.edges))) - 1).bit_length()
    parts: dict[int, tuple[tuple[int, ...], ...]] = {
        EXECUTOR: ((0, 1), result_edges(plan), tuple(bundle.edge for bundle in plan.inputs), ())
    }
    for program in plan.programs:
        does = Outline(program)
        parts[program.actor] = (
            tuple(does.tasks),
            tuple(does.receives),
            (*does.sends, *(edge for _, edge in does.streams)),
            tuple(edge for edge in does.sends if EXECUTOR in plan.edges[edge].readers),
        )
    offsets = {}
    for participant, (tasks, receives, sends, outputs) in parts.items():
        offsets[participant] = at
        at += _core.Recorder.bytes(len(tasks), len(receives), len(sends), len(outputs), slots)
    at = -(-at // _PAGE) * _PAGE
    layouts = {}
    for participant, (tasks, receives, sends, outputs) in parts.items():
        numbered = {edge: number for number, edge in enumerate(outputs)}
        begin = control, offsets[participant], at, slots
        layouts[participant] = RecorderLayout(*begin, tasks, receives, sends, numbered)
        at += EVENT_CAPACITY * _core.EVENT_BYTES
    return layouts, at


class Progress(Struct, frozen=True):
    """Progress of a graph's executions, and the memory of its results and values. ``arena_bytes``: the memory
    behind each process's arena, whichever graph or call put something there."""

    submitted: int
    completed: int
    stashed: int
    stashed_bytes: int
    arena_bytes: dict[int, int]


class Track(Struct, frozen=True):
    """A process of a graph, as a trace shows it. ``track``: the number of its one track; ``None``: each of
    its threads has one."""

    participant: int
    name: str
    pid: int
    track: int | None


def _participant_name(plan: Plan, participant: int) -> str:
    return "the driver" if participant == EXECUTOR else plan.actors[participant].name


class Recording:
    """The driver's access to the records of a graph's processes."""

    def __init__(
        self, plan: Plan, name: str, layouts: dict[int, RecorderLayout], segment: _core.Segment
    ) -> None:
        """``name``: of the graph."""
        self.layouts = layouts
        self.recorders = {
            participant: where.open(
                segment,
                f"{_participant_name(plan, participant)} in {name}",
                threads=participant == EXECUTOR,
            )
            for participant, where in layouts.items()
        }
        self._plan = plan
        self._lock = threading.Lock()
        self._traced_into: str | None = None
        self._pid = os.getpid()

    @property
    def own(self) -> _core.Recorder:
        """The driver's own recorder."""
        return self.recorders[EXECUTOR]

    def watch(self, window: _core.InFlightWindow) -> None:
        """Have ``window``, whose readers are ``result_edges``, note what the driver does."""
        outputs = []
        for edge in result_edges(self._plan):
            writer = self._plan.edges[edge].writer
            position = self.layouts[writer].outputs[edge]
            outputs.append((self.recorders[writer], position))
        window.record(self.own, outputs, list(self.recorders.values()))

    @contextmanager
    def traced(self, name: str, into: str, max_events: int) -> Iterator[None]:
        """Collect events, at most ``max_events`` of all processes together, for :meth:`events` afterwards.
        Raises ``RuntimeStateError`` if that is under way already."""
        with self._lock:
            if self._traced_into is not None:
                raise RuntimeStateError(
                    f"{name} is being traced into {self._traced_into} already: "
                    "a graph has one trace at a time"
                )
            self._traced_into = into
        try:
            for recorder in self.recorders.values():
                recorder.collect(max(max_events // len(self.recorders), 1))
            self.own.tracing = True
            yield
        finally:
            if os.getpid() == self._pid:  # a forked child leaves its parent's trace alone
                self.own.tracing = False
                self._traced_into = None
                try:
                    self.drain()
                finally:
                    for recorder in self.recorders.values():
                        recorder.free_events()

    def drain(self) -> None:
        """Take the events that are there, so that there is room for more."""
        for recorder in self.recorders.values():
            recorder.drain()

    def events(self) -> dict[int, tuple[bytes, int]]:
        """Return the events of each process, once, and how many were lost for want of room."""
        return {
            participant: (recorder.take_events(), recorder.dropped)
            for participant, recorder in self.recorders.items()
        }


#: Seconds that nodes have to answer: a user's question, one for an error's text, one with stacks.
TIME_LIMIT, BRIEF_TIME_LIMIT, STACKS = 2.0, 0.25, 12.0

Histogram: TypeAlias = "tuple[int, int, list[tuple[int, int, int]]]"
"""(total, largest, [(least value, first value beyond, count), ...]), in nanoseconds."""

Rings: TypeAlias = "tuple[tuple[int, tuple[int, ...]], ...]"
"""Frames published and, by reader, frames taken of each ring, as a node knows them."""


class Question(Struct, frozen=True):
    """The parts of a question about actors, beside what they are doing. stacks: their Python stacks.
    counters: their counters. trace: begin to collect events, at most ``events`` of each actor, or end that,
    and return them."""

    stacks: bool = False
    counters: bool = False
    trace: Literal["", "begin", "end"] = ""
    events: int = 0


class LookedAt(Struct, frozen=True):
    """An actor, by its number in the graph."""

    actor: int
    process: Reader
    recorder: RecorderLayout


class Look(Struct, frozen=True):
    """A question to one node, about its actors of a graph, whose segment has that number."""

    question: Question
    segment: int
    offsets: tuple[int, ...]
    actors: tuple[LookedAt, ...]


class LookAtAll(Struct, frozen=True):
    """A question to one node about all of its processes; the answer is :class:`SeenAll`."""

    stacks: bool


class SeenAll(Struct, frozen=True):
    """The answer to :class:`LookAtAll`. troubles: what keeps the node from fetching values from others, by
    their numbers."""

    snapshots: list[ProcessSnapshot]
    troubles: dict[int, str]


class Counted(Struct, frozen=True):
    """Counters of an actor, as its ``Recorder`` gives them. running: the task that runs, the execution, and
    for how many nanoseconds."""

    tasks: tuple[tuple[int, int, Histogram], ...]
    receives: tuple[Histogram, ...]
    sends: tuple[tuple[int, int, int], ...]
    running: tuple[int, int, int] | None


class Events(Struct, frozen=True):
    """Trace events of an actor, by the clock of its node. running: the task that runs, the execution, and
    since when."""

    data: bytes
    dropped: int
    running: tuple[int, int, int] | None


class RemoteActorStatus(Struct, frozen=True):
    """Status of one actor on another node."""

    process_snapshot: ProcessSnapshot
    counted: Counted | None = None
    events: Events | None = None


class Seen(Struct, frozen=True):
    """Answer of one node, by actor."""

    actors: dict[int, RemoteActorStatus]
    rings: Rings


class RemoteStatus(Struct, frozen=True):
    """All nodes' answers. seen: by actor. rings: by actor, as its node knows them. clocks: by actor, of its
    node, relative to the asking node's. unknown: why there is no answer, by the name of the node; why: the
    same for all others."""

    seen: dict[int, RemoteActorStatus] = field(default_factory=dict)
    rings: dict[int, Rings] = field(default_factory=dict)
    clocks: dict[int, Offset] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    why: str = ""

    def why_unknown(self, host: str) -> str:
        """Return why nothing is known of the actors on that node."""
        return self.unknown.get(host) or self.why or "its host has not said"


class StatusResponder:
    """Answers questions on one node. Any thread may ask."""

    def __init__(self, process_table: _core.ProcessTable) -> None:
        self._process_table = process_table
        #: Recorders that collect events, by segment and actor.
        self._traced: dict[int, dict[int, _core.Recorder]] = {}

    def look(self, look: Look, segment: _core.Segment) -> Seen:
        """Look at actors of this node. ``segment``: the graph's, as this node has it."""
        question = look.question
        seen = {}
        for one in look.actors:
            snapshot = self.snapshot(*one.process, stack=question.stacks)
            counted = _counted(one.recorder, segment) if question.counters else None
            seen[one.actor] = RemoteActorStatus(snapshot, counted)
        if question.trace == "begin":
            self._begin(look, segment)
        elif question.trace == "end":
            for actor, events in self._end(look).items():
                seen[actor] = replace(seen[actor], events=events)
        rings = (segment.progress(offset) for offset in look.offsets)
        return Seen(seen, tuple((head, tuple(taken)) for head, taken in rings))

    def snapshot(self, slot: int, incarnation: int, *, stack: bool = False) -> ProcessSnapshot:
        """Return the process snapshot of one process."""
        snapshot = read_snapshot(self._process_table, slot, incarnation)
        return (
            replace(snapshot, stack=stack_of(snapshot.pid)) if stack and snapshot.pid else snapshot
        )

    def _begin(self, look: Look, segment: _core.Segment) -> None:
        recorders = {one.actor: one.recorder.open(segment) for one in look.actors}
        for recorder in recorders.values():
            recorder.collect(max(look.question.events, 1))
        self._traced[look.segment] = recorders
        for recorder in recorders.values():
            recorder.tracing = True

    def _end(self, look: Look) -> Mapping[int, Events]:
        recorders = self._traced.pop(look.segment, {})
        found = {}
        for actor, recorder in recorders.items():
            recorder.tracing = False
            recorder.drain()
            found[actor] = Events(recorder.take_events(), recorder.dropped, recorder.running)
        for recorder in recorders.values():
            recorder.free_events()
        return found

    def forget(self, number: int) -> None:
        """Forget the segment of that number, which this node has no more."""
        self._traced.pop(number, None)


def _counted(where: RecorderLayout, segment: _core.Segment) -> Counted:
    recorder = where.open(segment)
    running = recorder.running
    now = _core.monotonic_ns()
    return Counted(
        tuple(recorder.task(i) for i in range(len(where.tasks))),
        tuple(recorder.receive(i) for i in range(len(where.receives))),
        tuple(recorder.send(i) for i in range(len(where.sends))),
        None if running is None else (running[0], running[1], max(now - running[2], 0)),
    )
