"""What is asked of other hosts about a graph's actors there, and answered.

What an actor notes about itself lies in the memory of its host. So each host is asked, by who executes the
graph; it reads what the executing process reads of its own host, and asks no actor. An answer that does not
come in time is no answer: what is not known is said to be so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from conveyor import _core
from conveyor.codec import Reader
from conveyor.runtime.graph.telemetry.clocks import Offset
from conveyor.runtime.graph.telemetry.recording import RecorderPlace
from conveyor.runtime.graph.telemetry.stacks import stack_of
from conveyor.runtime.status import Page, read_page

#: Seconds that hosts have to answer who asks for it, and who needs it for an error's text. A stack takes
#: longer.
PATIENCE, HASTE, STACKS = 2.0, 0.25, 12.0

Histogram: TypeAlias = "tuple[int, int, list[tuple[int, int, int]]]"
"""(total, largest, [(least value, first value beyond, count), ...]), in nanoseconds."""

Rings: TypeAlias = "tuple[tuple[int, tuple[int, ...]], ...]"
"""Of each ring the frames published, and those taken by each reader, as a host knows them."""


class Question(Struct, frozen=True):
    """What is asked beside what the actors are doing. stacks: their Python stacks. counters: what they have
    counted. trace: begin to collect events, at most ``events`` of each actor, or end that, and give them."""

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
    """A question to one host, about its actors of a graph, whose segment has that number."""

    question: Question
    segment: int
    offsets: tuple[int, ...]
    actors: tuple[LookedAt, ...]


class LookAtAll(Struct, frozen=True):
    """What is every process of the session doing that is on that host? The answer is :class:`SeenAll`."""

    stacks: bool


class SeenAll(Struct, frozen=True):
    """troubles: what keeps the host from fetching values from others, by the numbers of these."""

    pages: list[Page]
    troubles: dict[int, str]


class Counted(Struct, frozen=True):
    """What an actor has counted, as its ``Recorder`` gives it. running: the task that runs, the execution,
    and for how many nanoseconds."""

    tasks: tuple[tuple[int, int, Histogram], ...]
    receives: tuple[Histogram, ...]
    sends: tuple[tuple[int, int, int], ...]
    running: tuple[int, int, int] | None


class Events(Struct, frozen=True):
    """What an actor has noted for a trace, by the clock of its host. running: the task that runs, the
    execution, and since when."""

    data: bytes
    dropped: int
    running: tuple[int, int, int] | None


class Sight(Struct, frozen=True):
    """One actor."""

    page: Page
    counted: Counted | None = None
    events: Events | None = None


class Seen(Struct, frozen=True):
    """One host's answer, by actor."""

    actors: dict[int, Sight]
    rings: Rings


class Afar(Struct, frozen=True):
    """All answers. seen: by actor. rings: as each actor's host knows them. clocks: of each actor's host, by
    that of who asks. unknown: why there is no answer, by the name of the host; ``why``, of all others."""

    seen: dict[int, Sight] = field(default_factory=dict)
    rings: dict[int, Rings] = field(default_factory=dict)
    clocks: dict[int, Offset] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    why: str = ""

    def why_unknown(self, host: str) -> str:
        """Why nothing is known of what is on that host."""
        return self.unknown.get(host) or self.why or "its host has not said"


class Lookout:
    """Answers on one host. Any thread may ask."""

    def __init__(self, board: _core.Board) -> None:
        self._board = board
        #: Those that collect events, by segment.
        self._traced: dict[int, dict[int, _core.Recorder]] = {}

    def look(self, look: Look, segment: _core.Segment) -> Seen:
        """Look at actors of this host. ``segment``: the graph's, as this host has it."""
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
        """What one process is doing."""
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
        """The segment of that number is not this host's any more."""
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
