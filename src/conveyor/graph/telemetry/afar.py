"""Questions to other nodes about a graph's actors there, and their answers.

The records that an actor keeps about itself are in the memory of its node. So the executor of the graph asks
each node, which reads what the executor reads of its own node, and asks no actor. An answer that does not
come in time is no answer: the actors' status is then said to be unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from conveyor import _core
from conveyor.codec import Reader
from conveyor.graph.telemetry.clocks import Offset
from conveyor.graph.telemetry.recording import RecorderPlace
from conveyor.graph.telemetry.stacks import stack_of
from conveyor.runtime.status import Page, read_page

#: Seconds that nodes have to answer: a user's question, one for an error's text, one with stacks.
PATIENCE, HASTE, STACKS = 2.0, 0.25, 12.0

Histogram: TypeAlias = "tuple[int, int, list[tuple[int, int, int]]]"
"""(total, largest, [(least value, first value beyond, count), ...]), in nanoseconds."""

Rings: TypeAlias = "tuple[tuple[int, tuple[int, ...]], ...]"
"""Of each ring the frames published, and those taken by each reader, as a host knows them."""


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
    recorder: RecorderPlace


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

    pages: list[Page]
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


class Sight(Struct, frozen=True):
    """Status of one actor on another node."""

    page: Page
    counted: Counted | None = None
    events: Events | None = None


class Seen(Struct, frozen=True):
    """Answer of one node, by actor."""

    actors: dict[int, Sight]
    rings: Rings


class Afar(Struct, frozen=True):
    """All nodes' answers. seen: by actor. rings: by actor, as its node knows them. clocks: by actor, of its
    node, relative to the asking node's. unknown: why there is no answer, by the name of the node; why: the
    same for all others."""

    seen: dict[int, Sight] = field(default_factory=dict)
    rings: dict[int, Rings] = field(default_factory=dict)
    clocks: dict[int, Offset] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    why: str = ""

    def why_unknown(self, host: str) -> str:
        """Return why nothing is known of the actors on that node."""
        return self.unknown.get(host) or self.why or "its host has not said"


class Lookout:
    """Answers questions on one node. Any thread may ask."""

    def __init__(self, board: _core.Board) -> None:
        self._board = board
        #: Recorders that collect events, by segment and actor.
        self._traced: dict[int, dict[int, _core.Recorder]] = {}

    def look(self, look: Look, segment: _core.Segment) -> Seen:
        """Look at actors of this node. ``segment``: the graph's, as this node has it."""
        question = look.question
        seen = {}
        for one in look.actors:
            page = self.page(*one.process, stack=question.stacks)
            counted = _counted(one.recorder, segment) if question.counters else None
            seen[one.actor] = Sight(page, counted)
        if question.trace == "begin":
            self._begin(look, segment)
        elif question.trace == "end":
            for actor, events in self._end(look).items():
                seen[actor] = replace(seen[actor], events=events)
        rings = (segment.progress(offset) for offset in look.offsets)
        return Seen(seen, tuple((head, tuple(taken)) for head, taken in rings))

    def page(self, slot: int, incarnation: int, *, stack: bool = False) -> Page:
        """Return the process snapshot of one process."""
        page = read_page(self._board, slot, incarnation)
        return replace(page, stack=stack_of(page.pid)) if stack and page.pid else page

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


def _counted(where: RecorderPlace, segment: _core.Segment) -> Counted:
    recorder = where.open(segment)
    running = recorder.running
    now = _core.monotonic_ns()
    return Counted(
        tuple(recorder.task(i) for i in range(len(where.tasks))),
        tuple(recorder.receive(i) for i in range(len(where.receives))),
        tuple(recorder.send(i) for i in range(len(where.sends))),
        None if running is None else (running[0], running[1], max(now - running[2], 0)),
    )
