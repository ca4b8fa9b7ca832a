"""What is going to go wrong in a round, and how it must be told of."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from chaos_actors import ENDS, HARMLESS, RAISES, Clock, Strike
from chaos_graphs import Graph

import conveyor
from conveyor.exceptions import ActorDiedError

SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM)
#: What is done to an actor from outside.
OUTSIDE = (
    "signal", "signal", "signal", "stop and go", "many stops", "stop and kill", "conveyor.kill",
    "graceful kill",
)  # fmt: skip
#: What is done to other processes than the actors. Nobody may notice anything but the time it takes.
ELSEWHERE = ("fork server stopped", "driver stopped", "driver forks", "driver forks and waits")
NOBODY = -1  # as a victim
#: Those of which nobody is told.
SILENT = {"stop and go", "many stops", *HARMLESS, *ELSEWHERE}
FORKS = {"a fork", "a fork that is waited for", "driver forks", "driver forks and waits"}
#: What an actor that was ended by them has done before.
IN_GOOD_ORDER = {"graceful kill", "sys.exit"}
SAYS = {
    "conveyor.kill": "killed by conveyor.kill()",
    "kill, to come back": "killed by conveyor.kill(",
    "graceful kill": "ended by conveyor.kill(graceful=True)",
}


@dataclass
class Fault:
    """One thing that goes wrong. ``victim``: the actor, as a place in the round."""

    kind: str
    victim: int
    slot: int  # in the clock
    signal: int | None = None
    exit_code: int | None = None
    delay: float = 0.0
    pause: float = 0.0  # between stop and what follows; how long a child lives
    graph: int = -1  # for what strikes inside: where
    task: int = -1
    run: int = -1
    after: int = 0  # items of a generator
    reported_ns: int | None = None
    pid: int = 0  # of the process that it is for
    execution: tuple[int, int] | None = None  # which graph's, that failed with it

    @property
    def name(self) -> str:
        if self.kind == "signal":
            return f"{signal.Signals(self.signal or 0).name} from outside"
        return self.kind

    @property
    def raises(self) -> bool:
        return self.kind in RAISES

    @property
    def kills(self) -> bool:
        return not self.raises and self.kind not in SILENT

    @property
    def inside(self) -> bool:
        return self.run >= 0

    @property
    def holds_up(self) -> float:
        """s for which it may keep others waiting."""
        return 0.0 if self.kind in FORKS else self.pause


@dataclass
class Faults:
    """All of a round."""

    planned: list[Fault] = field(default_factory=list)
    tear_down: float | None = None  # after which part of the executions

    def strikes(self, graphs: Sequence[Graph]) -> dict[int, dict[tuple[str, int, int], Strike]]:
        """What the actors are to be told, by their place."""
        found: dict[int, dict[tuple[str, int, int], Strike]] = {}
        for fault in self.planned:
            if fault.inside:
                where = (graphs[fault.graph].name, fault.task, fault.run)
                strike = Strike(fault.kind, fault.slot, fault.pause, fault.after)
                found.setdefault(fault.victim, {})[where] = strike
        return found

    @property
    def deadly(self) -> list[Fault]:
        return [fault for fault in self.planned if fault.kills]

    @property
    def raises(self) -> bool:
        return any(fault.raises for fault in self.planned)


class Draw:
    """Draws faults for ``graphs``, each with a slot of the clock of its own."""

    def __init__(self, rng: Random, graphs: Sequence[Graph]) -> None:
        self._rng = rng
        self._graphs = graphs
        self._slots = iter(range(1, Clock.SLOTS))
        self._taken: set[tuple[int, int, int]] = set()
        self._actors = sorted(set().union(*(graph.actors for graph in graphs)))

    def together(self) -> list[Fault]:
        """Several tasks of one execution raise, while another dawdles."""
        rng = self._rng
        graph = rng.randrange(len(self._graphs))
        run = rng.randrange(self._graphs[graph].executions)
        faults = [
            fault for _ in range(rng.randint(1, 3)) for fault in self.inside(RAISES, graph, run)
        ]
        return faults + self.inside(["dawdles"], graph, run)

    def inside(
        self, kinds: Sequence[str], graph: int | None = None, run: int | None = None
    ) -> list[Fault]:
        """At a run of a task; none if something strikes there in any case."""
        rng = self._rng
        if graph is None:
            graph = rng.randrange(len(self._graphs))
        # Of a collective's tasks it is what they are given that fails.
        task = rng.choice([t for t in self._graphs[graph].tasks if t.meeting is None])
        kind = rng.choice(kinds)
        number, code = ENDS.get(kind, (None, None))
        if run is None:
            run = rng.randrange(self._graphs[graph].executions)
        where = (graph, task.step.task, run)
        if where in self._taken:
            return []
        self._taken.add(where)
        pause = _between(rng, 0.001, 0.5) if kind in HARMLESS else 0.0
        after = rng.choice([0, task.step.items, rng.randint(0, task.step.items)])
        return [Fault(kind, task.actor, next(self._slots), number, code, 0, pause, *where, after)]

    def outside(self, kinds: Sequence[str] = OUTSIDE) -> Fault:
        """To an actor, or to nobody in the round."""
        rng = self._rng
        kind = rng.choice(kinds)
        number = {"signal": rng.choice(SIGNALS), "stop and kill": signal.SIGKILL}.get(kind)
        # Sometimes at once, while graphs are compiled.
        delay = rng.choice([0.0, rng.uniform(0, 0.004), rng.uniform(0, 0.03)])
        longest = {"stop and go": 2.0, "fork server stopped": 1.0, "driver stopped": 0.5}
        pause = _between(rng, 0.001, longest.get(kind, 0.05))
        victim = NOBODY if kind in ELSEWHERE else rng.choice(self._actors)
        return Fault(kind, victim, next(self._slots), number, None, delay, pause)


def _between(rng: Random, least: float, most: float) -> float:
    """As often between 1 and 2 ms as between 1 and 2 s."""
    return math.exp(rng.uniform(math.log(least), math.log(most)))


def random_faults(rng: Random, graphs: Sequence[Graph]) -> Faults:
    faults = Faults()
    planned = faults.planned
    draw = Draw(rng, graphs)
    luck = rng.random()
    if luck < 0.08:
        return faults
    if luck < 0.18:
        for _ in range(rng.randint(1, 4)):
            planned += draw.inside(RAISES)
    elif luck < 0.27:
        for _ in range(rng.randint(1, 2)):
            planned += draw.together()
    elif luck < 0.52:
        planned += draw.inside(list(ENDS))
    elif luck < 0.80:
        planned.append(draw.outside())
    elif luck < 0.88:
        for _ in range(rng.randint(2, 3)):
            planned += [draw.outside()] if rng.random() < 0.5 else draw.inside(list(ENDS))
        planned += draw.inside(RAISES)
    elif luck < 0.93:
        for _ in range(rng.randint(1, 3)):
            planned += draw.inside(HARMLESS)
    else:
        faults.tear_down = rng.random()
    if rng.random() < 0.12:
        planned.append(draw.outside(ELSEWHERE))
    if rng.random() < 0.1:
        planned += draw.inside(HARMLESS)
    if rng.random() < 0.05:
        faults.tear_down = rng.random()
    return faults


Errand = tuple[float, Callable[[], Any]]  # after how many seconds, and what


def strike_from_outside(
    fault: Fault, pidfd: int, handle: Any, clock: Clock, elsewhere: Callable[[Fault], Any]
) -> list[Errand]:
    """The errands that make ``fault`` happen. ``elsewhere``: does those in ELSEWHERE."""

    def send(number: int) -> None:
        with suppress(ProcessLookupError):  # another fault was there first
            signal.pidfd_send_signal(pidfd, number)

    def at(delay: float, action: Callable[[], Any]) -> Errand:
        def strike() -> None:
            clock.stamp(fault.slot)
            action()

        return delay, strike

    if fault.kind in ELSEWHERE:
        return [at(fault.delay, lambda: elsewhere(fault))]
    if fault.kind == "signal":
        return [at(fault.delay, lambda: send(fault.signal or 0))]
    if fault.kind == "conveyor.kill":
        return [at(fault.delay, lambda: conveyor.kill(handle))]
    if fault.kind == "kill, to come back":
        return [at(fault.delay, lambda: conveyor.kill(handle, no_restart=False))]
    if fault.kind == "graceful kill":
        return [at(fault.delay, lambda: conveyor.kill(handle, graceful=True))]
    if fault.kind == "many stops":
        # Each somewhere in what it does just then: ringing others, say.
        moments = [fault.delay + fault.pause * i / 10 for i in range(20)]
        return [
            at(moment, lambda number=number: send(number))
            for moment, number in zip(moments, [signal.SIGSTOP, signal.SIGCONT] * 10, strict=True)
        ]
    stop = (fault.delay, lambda: send(signal.SIGSTOP))
    then = fault.delay + fault.pause
    if fault.kind == "stop and go":
        return [stop, at(then, lambda: send(signal.SIGCONT))]
    return [stop, at(then, lambda: send(signal.SIGKILL))]


def matches(error: ActorDiedError, fault: Fault) -> bool | None:
    """Whether ``error`` tells of ``fault`` rightly; None: the way the actor ended is not said."""
    if fault.kind in SAYS:
        return SAYS[fault.kind] in str(error)
    if error.signal is None and error.exit_code is None:
        return None
    return (error.signal, error.exit_code) == (fault.signal, fault.exit_code)
