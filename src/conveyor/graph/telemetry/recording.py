"""Recording of a graph: the place of each process's records, and the driver's access to them.

The counters lie in the graph's segment, behind the rings; each process writes its own, and the driver reads
all of them without asking anybody. Behind the counters lie the rings of events, which have memory only while
the graph is traced.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from conveyor import _core
from conveyor.exceptions import RuntimeStateError
from conveyor.plan.model import EXECUTOR, Plan
from conveyor.plan.reading import Outline

#: Number of events of one process that can wait to be taken by the driver.
EVENT_CAPACITY = 1 << 15
_PAGE = 4096


class RecorderPlace(Struct, frozen=True):
    """Place of the records of one process of a graph. Its recorder counts by the place in ``tasks`` (numbers
    of tasks), ``receives`` and ``sends`` (numbers of edges). ``outputs``: the place of each of its sends that
    the driver reads."""

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
        """Return the place of the times of this edge's last frames, and of how many executions; 0 if the edge
        is no output. Its writer notes them there, or, if the writer is on another node, the receiver on this
        one."""
        place = self.outputs.get(edge)
        if place is None:
            return 0, 0
        before = _core.Recorder.bytes(
            len(self.tasks),
            len(self.receives),
            len(self.sends),
            place,
            self.slots,
        )
        return self.offset + before, self.slots


def result_edges(plan: Plan) -> tuple[int, ...]:
    """Return the edges that the driver reads, each once: of the outputs, then of the effects."""
    return (*dict.fromkeys(plan.outputs), *plan.effects)


def place_recorders(plan: Plan, top: int) -> tuple[dict[int, RecorderPlace], int]:
    """Place the recorders of the actors and of the driver in a segment that is used up to ``top``; return
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
    for place, (tasks, receives, sends, outputs) in parts.items():
        offsets[place] = at
        at += _core.Recorder.bytes(len(tasks), len(receives), len(sends), len(outputs), slots)
    at = -(-at // _PAGE) * _PAGE
    places = {}
    for place, (tasks, receives, sends, outputs) in parts.items():
        numbered = {edge: number for number, edge in enumerate(outputs)}
        begin = control, offsets[place], at, slots
        places[place] = RecorderPlace(*begin, tasks, receives, sends, numbered)
        at += EVENT_CAPACITY * _core.EVENT_BYTES
    return places, at


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

    place: int
    name: str
    pid: int
    track: int | None


def _place_name(plan: Plan, place: int) -> str:
    return "the driver" if place == EXECUTOR else plan.actors[place].name


class Recording:
    """The driver's access to the records of a graph's processes."""

    def __init__(
        self, plan: Plan, name: str, places: dict[int, RecorderPlace], segment: _core.Segment
    ) -> None:
        """``name``: of the graph."""
        self.places = places
        self.recorders = {
            place: where.open(
                segment,
                f"{_place_name(plan, place)} in {name}",
                threads=place == EXECUTOR,
            )
            for place, where in places.items()
        }
        self._plan = plan
        self._lock = threading.Lock()
        self._traced_into: str | None = None
        self._pid = os.getpid()

    @property
    def own(self) -> _core.Recorder:
        """The driver's own recorder."""
        return self.recorders[EXECUTOR]

    def watch(self, gate: _core.Gate) -> None:
        """Have ``gate``, whose readers are ``result_edges``, note what the driver does."""
        outputs = []
        for edge in result_edges(self._plan):
            writer = self._plan.edges[edge].writer
            place = self.places[writer].outputs[edge]
            outputs.append((self.recorders[writer], place))
        gate.record(self.own, outputs, list(self.recorders.values()))

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
            place: (recorder.take_events(), recorder.dropped)
            for place, recorder in self.recorders.items()
        }
