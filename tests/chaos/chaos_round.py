"""One round: random graphs run while things go wrong, and every result is checked."""

from __future__ import annotations

import time
from random import Random

from chaos_around import SOON, Around, Running, Wrong
from chaos_course import Course
from chaos_faults import IN_GOOD_ORDER, random_faults
from chaos_graphs import (
    Expected,
    arguments,
    build,
    chain,
    evaluate,
    flatten,
    plain_objects,
    random_graph,
)
from chaos_pool import Member

import conveyor
from conveyor.exceptions import (
    ActorDiedError,
    DeadlineExceededError,
    TaskError,
    TransportError,
)


class Round(Course):
    """Actors of the pool, graphs of all kinds, faults of all kinds."""

    title = "usual"

    def __init__(self, seed: int, around: Around, rng: Random) -> None:
        super().__init__(seed, around, rng)
        self._choose_members()
        self.style = rng.choice(["one thread"] * 6 + ["threads", "asyncio"])
        # How often a task has run can be known only where it is known which of them do.
        self.exact = counted = self.style == "one thread" and rng.random() < 0.5
        self.fail_fast = not counted and rng.random() < 0.8
        asynchronous = [member.asynchronous for member in self.members]
        count = rng.choice([1, 1, 1, 1, 2, 2, 3])
        self.specs = [
            self._routed(random_graph(rng, f"g{i}", asynchronous, counted, 40 // count))
            for i in range(count)
        ]
        self.faults = random_faults(rng, self.specs)

    def describe(self) -> str:
        style = f"{self.style}, exact {self.exact}, fail_fast {self.fail_fast}"
        return f"{style}, {super().describe()}"

    # The course of a round

    def run(self) -> None:
        watchdog, hand = self.around.watchdog, self.around.hand
        strikes = self.faults.strikes(self.specs)
        expected = []
        for spec in self.specs:
            struck = strikes if self.exact else {}
            objects = plain_objects(struck, set(range(len(self.members))))
            expected.append(evaluate(spec, objects, spec.executions))
        watchdog.doing("begin")
        self.around.clock.clear()
        self.around.hiccups.forget()
        refs = [m.handle.begin.remote(strikes.get(i, {})) for i, m in enumerate(self.members)]
        if conveyor.get(refs) != [m.pid for m in self.members]:
            raise Wrong("begin() gave other pids")
        for fault in self.faults.planned:
            fault.pid = self.members[fault.victim].pid
            if not fault.inside:
                self._send_out(fault)
        try:
            if self._compile(expected):
                {
                    "one thread": self._one_thread,
                    "threads": self._threads,
                    "asyncio": self._asyncio,
                }[self.style]()
                for running in self.running:
                    self._collect(running)
        finally:
            watchdog.doing("the last fault from outside")
            hand.wait()
        self._finish_calls()
        self._let_run_out()
        self._check_siblings()
        self._check_deaths()
        self._check_effects(expected)
        self._end_graphs()
        self._check_closed()
        self._check_survivors()
        self._count()

    def _compile(self, expected: list[list[list[Expected]]]) -> bool:
        for index, spec in enumerate(self.specs):
            dag = self._dag(spec, self.members)
            self.waiting_since = self._doing(f"compile {spec.name}")
            try:
                graph = dag.compile(fail_fast=self.fail_fast, **self._options(spec))
            except ActorDiedError as error:
                self._died(error, spec)
                return False
            self.running.append(
                Running(index, spec, graph, expected[index], self.exact, self.fail_fast)
            )
            self.tally.graphs += 1
        return True

    # The end

    def _let_run_out(self) -> None:
        """Wait for executions that nobody waits for: faults may lie in wait in them, too."""
        for running in self.running:
            if running.torn or running.died:
                continue
            self._doing(f"what was dropped of {running.spec.name}")
            end = time.monotonic() + SOON
            while (status := running.graph.status()).state == "ready" and status.executions:
                if time.monotonic() > end:
                    raise Wrong(f"what was dropped does not end:\n{status}")
                time.sleep(0.0005)

    def _check_deaths(self) -> None:
        """Who was struck is known to be dead everywhere, and gone."""
        # What is left of graphs that have failed may still strike; nothing runs after a teardown.
        for running in self.running:
            if running.died:
                self._doing(f"teardown of {running.spec.name}, which has failed")
                running.graph.teardown()
        checked: set[int] = set()
        while struck := self._struck() - checked:
            for place in struck:
                self._check_death(place)
            checked |= struck

    def _struck(self) -> set[int]:
        clock = self.around.clock
        return {fault.victim for fault in self.faults.deadly if clock.read(fault.slot)}

    def _check_death(self, place: int) -> None:
        member, clock = self.members[place], self.around.clock
        faults = [fault for fault in self.faults.deadly if fault.victim == place]
        first = min((clock.read(f.slot), f.name) for f in faults if clock.read(f.slot))
        since = self._doing(f"the death of {member.name} by {first[1]}")
        end = time.monotonic() + SOON
        while (ended := self.around.deaths.ended(member.pid)) is None:
            if time.monotonic() > end:
                raise Wrong(f"{member.name} lives {SOON} s after {first[1]}")
            time.sleep(0.0005)
        self.tally.floors[first[1]].append((ended - first[0]) / 1e6)
        for running in self.running:
            if place in running.spec.actors and not running.died and not running.torn:
                self._use_the_dead(running, member)
                running.graph.teardown()
        since = self._doing(f"a call of the dead {member.name}")
        try:
            member.handle.ping.remote(1).get()
        except ActorDiedError as error:
            self._died(error, None, since, place)
        else:
            raise Wrong(f"the dead {member.name} answers")
        member.dead = True
        in_good_order = {f.kind for f in faults if clock.read(f.slot)} <= IN_GOOD_ORDER
        if in_good_order and member.pid not in self.around.exits.read():
            raise Wrong(f"{member.name} has ended by {first[1]} without __conveyor_exit__")

    def _use_the_dead(self, running: Running, member: Member) -> None:
        """Every task is needed for some result, so not all results can come."""
        args, kwargs = arguments(running.spec, 0)
        since = self._doing(f"use of {running.spec.name} without {member.name}")
        try:
            refs = running.graph.execute(*args, **kwargs)
            for ref in flatten(refs, running.spec.outputs):
                since = self._doing(f"get from {running.spec.name} without {member.name}")
                try:
                    ref.get()
                except (TaskError, TransportError, DeadlineExceededError):
                    continue
        except ActorDiedError as error:
            self._died(error, running.spec, since)
            running.died = True
        else:
            raise Wrong(f"{running.spec.name} runs on without {member.name}")

    def _check_effects(self, expected: list[list[list[Expected]]]) -> None:
        """All effects of executions that went well have been, once and in order."""
        if self.style != "one thread" or self.faults.planned:
            return
        for running in self.running:
            if running.torn or running.cancelled or running.limited or running.interrupted:
                continue
            if self._transfers_may_fail(running.spec):
                continue
            objects = plain_objects({}, set(range(len(self.members))))
            evaluate(running.spec, objects, running.next)
            for place in running.spec.actors:
                # What was dropped may still be on its way: wait for the last execution.
                self._doing(f"effects of {running.spec.name}")
                end = time.monotonic() + SOON
                handle = self.members[place].handle
                while handle.noted.remote(running.spec.name).get() != objects[place].noted(
                    running.spec.name
                ):
                    if time.monotonic() > end:
                        raise Wrong(f"{running.spec.name}: other effects than those that were due")
                    time.sleep(0.002)

    def _end_graphs(self) -> None:
        for running in self.running:
            running.pending.clear()
            self._doing(f"teardown of {running.spec.name}")
            if self.rng.random() < 0.8:
                running.graph.teardown()
        self.running.clear()  # the others are dropped as they are

    def _check_survivors(self) -> None:
        alive = [place for place, member in enumerate(self.members) if not member.dead]
        for place in alive:
            self._eager(place)
        if not alive:
            return
        spec = chain("survivors", alive, 3)
        objects = plain_objects({}, set(alive))
        refs = [self.members[place].handle.begin.remote({}) for place in alive]
        self._doing("begin of the survivors")
        conveyor.get(refs)
        expected = evaluate(spec, objects, 3)
        self._doing("a graph of the survivors")
        with build(spec, [m.handle for m in self.members]).compile(name="survivors") as graph:
            running = Running(-1, spec, graph, expected)
            self.running.append(running)
            for _ in range(3):
                self._submit(running)
            self._collect(running)
            self._doing("teardown of the survivors' graph")
        self.running.clear()
        if running.died:
            raise Wrong("a survivor has died")
