"""Rounds in which actors and graphs come back, again and again, while others still work for the former
ones."""

from __future__ import annotations

import gc
import os
import signal
import time
from random import Random

from chaos_actors import ENDS
from chaos_around import SOON, Around, Running, Wrong
from chaos_course import Course
from chaos_faults import Draw, Fault, Faults
from chaos_graphs import Expected, Graph, evaluate, plain_objects, random_graph

import conveyor
from conveyor.exceptions import ActorDiedError, ActorRestartedError

#: What is done from outside. Those that are killed for good do not come back.
OUTSIDE = ("signal", "signal", "stop and go", "many stops", "stop and kill", "kill, to come back")
#: Slow tasks: who survives is still at work when the others have come back, and publishes late.
PAUSES = (0, 0, 0, 0.001, 0.01, 0.03)


class Restarts(Course):
    """Actors of its own, which end and come back by themselves or by ``graph.restart()``. An *epoch* is
    what lies between two restarts; in the last one nothing happens."""

    title = "restarts"

    def __init__(self, seed: int, around: Around, rng: Random) -> None:
        super().__init__(seed, around, rng)
        count = rng.randint(2, 4)
        self._kinds = [rng.choice(["plain", "handler", "coroutines"]) for _ in range(count)]
        by_themselves = rng.random() < 0.5
        self._restarts = [-1 if by_themselves else rng.choice([0, 0, -1]) for _ in range(count)]
        asynchronous = [kind == "coroutines" for kind in self._kinds]
        self.specs = [
            self._routed(random_graph(rng, f"g{i}", asynchronous, False, 12, PAUSES))
            for i in range(rng.choice([1, 1, 2]))
        ]
        self._epochs = rng.randint(2, 5)
        draw = Draw(rng, self.specs)
        # What goes wrong in each epoch, before any of it depends on time.
        self._plan = [self._draw(draw) for _ in range(self._epochs - 1)] + [[]]
        self._first_suspect = 0
        self._calm = False  # nothing goes wrong any more

    def describe(self) -> str:
        plan = "".join(f"\n  epoch {i}: {faults}" for i, faults in enumerate(self._plan))
        return f"{self._kinds}, max_restarts {self._restarts}, {super().describe()}{plan}"

    def run(self) -> None:
        self.around.watchdog.doing("begin")
        self.around.clock.clear()
        self.around.hiccups.forget()
        pool = self.around.pool
        pairs = zip(self._kinds, self._restarts, strict=True)
        self.members = [pool.start(kind, restarts) for kind, restarts in pairs]
        self._compile()
        for faults in self._plan:
            self._epoch(faults)
        self._end_graphs()
        self._finish()
        self._count()

    def _compile(self) -> None:
        for index, spec in enumerate(self.specs):
            objects = plain_objects({}, set(range(len(self.members))))
            # Two more in each epoch to see that the graph is there again.
            expected = evaluate(spec, objects, (spec.executions + 2) * self._epochs)
            self._doing(f"compile {spec.name}")
            graph = self._dag(spec, self.members).compile(**self._options(spec))
            self.running.append(Running(index, spec, graph, expected, exact=False))
            self.tally.graphs += 1

    def _epoch(self, faults: list[Fault]) -> None:
        """The last one has no faults."""
        first_fault = len(self.faults.planned)
        self._bring_back(faults)
        self.faults.planned += faults
        for running in self.running:
            running.died = False
            running.epochs.append((running.next, first_fault))
        for fault in faults:
            fault.pid = self.members[fault.victim].pid
            if not fault.inside:
                self._send_out(fault)
        self._calm = not faults
        turns = [running for running in self.running for _ in range(running.spec.executions)]
        self.rng.shuffle(turns)
        for running in turns:
            if any(other.died for other in self.running):
                break  # whoever hears of a death brings the graphs back at once
            self._submit(running)
            if self.rng.random() < 0.4:
                self._do_something(running)
        collect = not faults or self.rng.random() < 0.5
        for running in self.running:
            # The others are got later, from graphs that have come back.
            if collect or not running.spec.roomy:
                self._collect(running)
        self._doing("the last fault from outside")
        self.around.hand.wait()
        self._finish_calls()

    def _draw(self, draw: Draw) -> list[Fault]:
        faults: list[Fault] = []
        while not faults:
            for _ in range(self.rng.choice([1, 1, 2])):
                inside = self.rng.random() < 0.4
                faults += draw.inside(list(ENDS)) if inside else [draw.outside(OUTSIDE)]
        for fault in faults:
            if fault.kind == "kill, to come back" and not self._restarts[fault.victim]:
                fault.kind, fault.signal = "signal", signal.SIGKILL
        return faults

    def _bring_back(self, faults: list[Fault]) -> None:
        """Until all live again and every graph can be executed. Then tell them what strikes them next."""
        self._first_suspect = 0
        self._calm = False
        end = time.monotonic() + SOON
        while True:
            struck = self._wait_for_deaths()
            by_hand = any(not self.members[place].restarts for place in struck)
            restarted = True
            if by_hand or self.rng.random() < 0.3:
                restarted = self._restart()
            if restarted and self._begin():
                break
            if time.monotonic() > end:
                raise Wrong(f"not all live again {SOON} s after {struck} have ended")
        for running in self.running:
            if not self._execute_once(running) and not self._execute_once(running):
                raise Wrong(f"{running.spec.name} fails though all its actors live again")
        strikes = Faults(faults).strikes(self.specs)
        for place, member in enumerate(self.members):
            self._doing(f"begin of {member.name}")
            if member.handle.begin.remote(strikes.get(place, {})).get() != member.pid:
                raise Wrong(f"{member.name} is no longer {member.pid}")

    def _restart(self) -> bool:
        """Restart the graphs. Not if one that was still at work has ended meanwhile."""
        for running in self.running:
            since = self._doing(f"restart of {running.spec.name}")
            try:
                running.graph.restart()
            except ActorDiedError as error:
                self._died(error, running.spec, since)
                return False
        return True

    def _execute_once(self, running: Running) -> bool:
        """Whether it goes well. A graph may hear only by an execution that it must be restarted."""
        running.died = False
        number = running.next
        self._submit(running)
        if not running.died:
            running.epochs.append((number, running.epochs[-1][1] if running.epochs else 0))
            self._get(running, number)
        return not running.died

    def _struck(self) -> list[Fault]:
        """The faults that have ended a process that has not been replaced yet, or will have."""
        clock = self.around.clock
        return [
            fault
            for fault in self.faults.deadly
            if clock.read(fault.slot) and fault.pid == self.members[fault.victim].pid
        ]

    def _wait_for_deaths(self) -> set[int]:
        struck = self._struck()
        for fault in struck:
            self._doing(f"the death of {self.members[fault.victim].name} by {fault.name}")
            end = time.monotonic() + SOON
            while (ended := self.around.deaths.ended(fault.pid)) is None:
                if time.monotonic() > end:
                    raise Wrong(f"{self.members[fault.victim].name} lives {SOON} s after {fault}")
                time.sleep(0.0002)
            self.tally.floors[fault.name].append((ended - self.around.clock.read(fault.slot)) / 1e6)
        return {fault.victim for fault in struck}

    def _begin(self) -> bool:
        """Whether all answer."""
        dead = {fault.victim for fault in self._struck()}
        for place, member in enumerate(self.members):
            since = self._doing(f"begin of {member.name}")
            try:
                pid = member.handle.begin.remote({}).get()
            except ActorDiedError as error:
                self._died(error, None, since, place)
                return False
            if {fault.victim for fault in self._struck()} != dead:
                return False  # another has been struck meanwhile, or is about to end
            if (pid != member.pid) != (place in dead):
                raise Wrong(f"{member.name} was {member.pid} and is {pid}; struck are {dead}")
        for place in dead:
            member = self.members[place]
            os.close(member.pidfd)
            member.pid = member.handle.begin.remote({}).get()
            member.pidfd = self.around.pool.watch(member.pid)
            self.tally.restarts += 1
        return True

    # What is said of deaths

    def _check_error(
        self,
        error: BaseException,
        running: Running,
        number: int,
        expected: Expected,
        since: int,
        where: str,
    ) -> None:
        """Nothing that was begun after a restart fails with what was before it."""
        self._first_suspect = max(
            (fault for first, fault in running.epochs if first <= number), default=0
        )
        died = running.died
        if self._calm and number < running.epochs[-1][0]:
            self._calm = False  # for what was begun before
            try:
                super()._check_error(error, running, number, expected, since, where)
            finally:
                self._calm, running.died = True, died
            return
        super()._check_error(error, running, number, expected, since, where)
        if number < running.epochs[-1][0]:
            running.died = died  # that was before

    def _suspects(self) -> list[Fault]:
        return [fault for fault in self.faults.planned[self._first_suspect :] if fault.kills]

    def _died(
        self, error: ActorDiedError, spec: Graph | None, since: int = 0, place: int | None = None
    ) -> None:
        if self._calm:
            raise Wrong("nothing has happened since the last restart") from error
        super()._died(error, spec, since, place)
        comes_back = any(m.name == error.actor and m.restarts for m in self.members)
        if comes_back and not isinstance(error, ActorRestartedError):
            raise Wrong(f"{error.actor} comes back, which the error does not say") from error

    # The end

    def _end_graphs(self) -> None:
        for running in self.running:
            self._doing(f"teardown of {running.spec.name}")
            if self.rng.random() < 0.7:
                running.graph.teardown()
        self.running.clear()

    def _finish(self) -> None:
        for place, member in enumerate(self.members):
            self._eager(place)
            if self.rng.random() < 0.5:
                conveyor.kill(member.handle)
            member.handle = None  # the others end as nobody has them any more
        gc.collect()
        for member in self.members:
            self._doing(f"the end of {member.name}")
            end = time.monotonic() + SOON
            while self.around.deaths.ended(member.pid) is None:
                if time.monotonic() > end:
                    raise Wrong(f"{member.name} lives {SOON} s after its last handle is gone")
                time.sleep(0.0002)
            os.close(member.pidfd)
