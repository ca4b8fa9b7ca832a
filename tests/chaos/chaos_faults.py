"""What is going to go wrong in a round, and how it must be told of."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from chaos_actors import ENDS, RAISES, Clock, Strike
from chaos_graphs import Graph

import conveyor
from conveyor.exceptions import ActorDiedError

SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM)
OUTSIDE = ("signal", "signal", "signal", "stop and go", "stop and kill", "conveyor.kill")


@dataclass
class Fault:
    """One thing that goes wrong. ``victim``: the actor, as a place in the round."""

    kind: str
    victim: int
    slot: int  # in the clock
    signal: int | None = None
    exit_code: int | None = None
    delay: float = 0.0
    pause: float = 0.0  # between stop and what follows
    graph: int = -1  # for what strikes inside: where
    task: int = -1
    run: int = -1
    reported_ns: int | None = None

    @property
    def name(self) -> str:
        if self.kind == "signal":
            return f"{signal.Signals(self.signal or 0).name} from outside"
        return self.kind

    @property
    def kills(self) -> bool:
        return self.kind not in RAISES and self.kind != "stop and go"

    @property
    def inside(self) -> bool:
        return self.run >= 0


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
                found.setdefault(fault.victim, {})[where] = Strike(fault.kind, fault.slot)
        return found

    @property
    def deadly(self) -> list[Fault]:
        return [fault for fault in self.planned if fault.kills]


def random_faults(rng: Random, graphs: Sequence[Graph], raises: bool) -> Faults:
    """``raises``: exceptions may be thrown (their place must be known beforehand)."""
    faults = Faults()
    luck = rng.random()
    slots = iter(range(1, Clock.SLOTS))
    actors = sorted(set().union(*(graph.actors for graph in graphs)))

    def inside(kinds: Sequence[str]) -> None:
        graph = rng.randrange(len(graphs))
        task = rng.choice(graphs[graph].tasks)
        kind = rng.choice(kinds)
        number, code = ENDS.get(kind, (None, None))
        run = rng.randrange(graphs[graph].executions)
        if any((f.graph, f.task, f.run) == (graph, task.step.task, run) for f in faults.planned):
            return
        faults.planned.append(
            Fault(kind, task.actor, next(slots), number, code, 0, 0, graph, task.step.task, run)
        )

    def outside() -> None:
        kind = rng.choice(OUTSIDE)
        number = {"signal": rng.choice(SIGNALS), "stop and kill": signal.SIGKILL}.get(kind)
        # Sometimes at once, while graphs are compiled.
        delay = rng.choice([0.0, rng.uniform(0, 0.004), rng.uniform(0, 0.03)])
        pause = rng.uniform(0.001, 0.05)
        victim = rng.choice(actors)
        faults.planned.append(Fault(kind, victim, next(slots), number, None, delay, pause))

    if luck < 0.08:
        return faults
    if luck < 0.25 and raises:
        for _ in range(rng.randint(1, 4)):
            inside(RAISES)
    elif luck < 0.55:
        inside(list(ENDS))
    elif luck < 0.85:
        outside()
    elif luck < 0.93:
        for _ in range(rng.randint(2, 3)):
            rng.choice([outside, lambda: inside(list(ENDS))])()
        if raises:
            inside(RAISES)
    else:
        faults.tear_down = rng.random()
    if rng.random() < 0.05:
        faults.tear_down = rng.random()
    return faults


def strike_from_outside(
    fault: Fault, pidfd: int, handle: Any, clock: Clock
) -> list[tuple[float, Callable[[], Any]]]:
    """The errands that make ``fault`` happen: (delay in seconds, function)."""

    def send(number: int) -> None:
        with suppress(ProcessLookupError):  # another fault was there first
            signal.pidfd_send_signal(pidfd, number)

    def at(delay: float, action: Callable[[], Any]) -> tuple[float, Callable[[], Any]]:
        def strike() -> None:
            clock.stamp(fault.slot)
            action()

        return delay, strike

    if fault.kind == "signal":
        return [at(fault.delay, lambda: send(fault.signal or 0))]
    if fault.kind == "conveyor.kill":
        return [at(fault.delay, lambda: conveyor.kill(handle))]
    stop = (fault.delay, lambda: send(signal.SIGSTOP))
    then = fault.delay + fault.pause
    if fault.kind == "stop and go":
        return [stop, at(then, lambda: send(signal.SIGCONT))]
    return [stop, at(then, lambda: send(signal.SIGKILL))]


def matches(error: ActorDiedError, fault: Fault) -> bool | None:
    """Whether ``error`` tells of ``fault`` rightly; None: the way the actor ended is not said."""
    if fault.kind == "conveyor.kill":
        return "killed by conveyor.kill()" in str(error)
    if error.signal is None and error.exit_code is None:
        return None
    return (error.signal, error.exit_code) == (fault.signal, fault.exit_code)
