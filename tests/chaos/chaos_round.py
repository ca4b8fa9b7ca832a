"""One round: random graphs run while things go wrong, and every result is checked."""

from __future__ import annotations

import asyncio
import threading
import time
from random import Random
from typing import Any

from chaos_around import SOON, Around, Running, Wrong
from chaos_faults import Faults, random_faults, strike_from_outside
from chaos_graphs import (
    Failed,
    arguments,
    build,
    chain,
    evaluate,
    flatten,
    plain_objects,
    random_graph,
)
from chaos_judge import Judge
from chaos_pool import Member

import conveyor
from conveyor.exceptions import (
    ActorDiedError,
    CapacityError,
    GraphTornDownError,
    TaskError,
    WaitTimeoutError,
)


class Round(Judge):
    def __init__(self, seed: int, around: Around) -> None:
        self.seed = seed
        self.around = around
        self.tally = around.tally
        self.rng = rng = Random(seed)
        pool = around.pool.members
        self.places = rng.sample(range(len(pool)), rng.randint(1, min(5, len(pool))))
        self.members: list[Member] = [pool[place] for place in self.places]
        self.style = rng.choice(["one thread"] * 6 + ["threads", "asyncio"])
        counted = self.style == "one thread"
        asynchronous = [member.asynchronous for member in self.members]
        count = rng.choice([1, 1, 1, 1, 2, 2, 3])
        self.specs = [
            random_graph(rng, f"g{i}", asynchronous, counted, 40 // count) for i in range(count)
        ]
        self.faults: Faults = random_faults(rng, self.specs, raises=counted)
        self.running: list[Running] = []
        self.waiting_since = 0
        self.busy_at = threading.local()

    def describe(self) -> str:
        """What this round is about, for people."""
        lines = [f"seed {self.seed}, {self.style}, actors {[m.name for m in self.members]}"]
        lines += [f"  {fault}" for fault in self.faults.planned]
        if self.faults.tear_down is not None:
            lines.append(f"  torn down after {self.faults.tear_down:.0%}")
        for spec in self.specs:
            lines.append(f"  {spec.name}: depth {spec.depth}, {spec.executions} executions")
            lines += [f"    {i}: {task}" for i, task in enumerate(spec.tasks)]
            lines.append(f"    results {spec.outputs}, effects {spec.effects}")
        return "\n".join(lines)

    def state(self) -> str:
        """Where it has got to, in conveyor's own words."""
        lines = []
        for running in self.running:
            lines.append(f"{running.graph!r}: {running.next} executions started")
            lines.append(f"  doing: {running.graph.doing()}")
            for number, refs in list(running.pending.items())[:5]:
                lines.append(f"  execution {number}: {refs!r}"[:2000])
        return "\n".join(lines)

    # The course of a round

    def run(self) -> None:
        watchdog, hand, tally = self.around.watchdog, self.around.hand, self.tally
        strikes = self.faults.strikes(self.specs)
        expected = []
        for spec in self.specs:
            objects = plain_objects(strikes, set(range(len(self.members))))
            expected.append(evaluate(spec, objects, spec.executions))
        watchdog.doing("begin")
        self.around.clock.clear()
        self.around.hiccups.forget()
        refs = [m.handle.begin.remote(strikes.get(i, {})) for i, m in enumerate(self.members)]
        if conveyor.get(refs) != [m.pid for m in self.members]:
            raise Wrong("begin() gave other pids")
        for fault in self.faults.planned:
            if not fault.inside:
                victim = self.members[fault.victim]
                for delay, errand in strike_from_outside(
                    fault, victim.pidfd, victim.handle, self.around.clock
                ):
                    hand.at(delay, errand)
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
        self._let_run_out()
        self._check_deaths()
        self._check_effects(expected)
        self._end_graphs()
        self._check_survivors()
        tally.rounds += 1
        for fault in self.faults.planned:
            if self.around.clock.read(fault.slot):
                tally.faults[fault.name] += 1
        if self.faults.tear_down is not None:
            tally.faults["teardown in mid-flight"] += 1
        watchdog.idle()

    def _compile(self, expected: list[list[list[int | Failed]]]) -> bool:
        for index, spec in enumerate(self.specs):
            dag = build(spec, [m.handle for m in self.members])
            self.waiting_since = self._doing(f"compile {spec.name}")
            try:
                graph = dag.compile(depth=spec.depth, name=spec.name)
            except ActorDiedError as error:
                self._died(error, spec)
                return False
            self.running.append(Running(index, spec, graph, expected[index]))
            self.tally.graphs += 1
        return True

    # Executing in one thread

    def _one_thread(self) -> None:
        turns = [running for running in self.running for _ in range(running.spec.executions)]
        self.rng.shuffle(turns)
        stop_at = None
        if self.faults.tear_down is not None:
            stop_at = int(self.faults.tear_down * len(turns))
        for turn, running in enumerate(turns):
            if turn == stop_at:
                self._tear_down_in_flight()
            if running.died or running.torn:
                continue
            self._submit(running)
            if self.rng.random() < 0.5:
                self._do_something(running)

    def _submit(self, running: Running) -> None:
        number, rng = running.next, self.rng
        args, kwargs = arguments(running.spec, number)
        way = rng.choice(["execute", "execute", "execute", "try", "timeout"])
        while True:
            since = self._doing(f"execution {number} of {running.spec.name}")
            try:
                if way == "try":
                    refs = running.graph.try_execute(*args, **kwargs)
                elif way == "timeout":
                    refs = running.graph.execute(*args, timeout=rng.random() * 0.003, **kwargs)
                else:
                    refs = running.graph.execute(*args, **kwargs)
                break
            except (CapacityError, WaitTimeoutError):
                self.tally.timeouts += 1
                way = "execute"
            except ActorDiedError as error:
                self._died(error, running.spec, since)
                running.died = True
                return
        running.next += 1
        running.pending[number] = list(flatten(refs, running.spec.outputs))
        self.tally.executions += 1

    def _do_something(self, running: Running) -> None:
        rng = self.rng
        numbers = list(running.pending)
        what = rng.choice(["get", "get", "get all", "newest", "glance", "drop", "eager", "wait"])
        if what in ("get", "newest") and numbers:
            self._get(running, numbers[0 if what == "get" else -1])
        elif what == "get all":
            for number in numbers:
                self._get(running, number)
        elif what == "glance" and numbers:
            self._get(running, rng.choice(numbers), rng.choice([0, 0.0005, 0.002]))
        elif what == "drop" and numbers:
            number = rng.choice(numbers)
            if number + 1 < running.spec.executions:  # the last one tells that all have been
                self.tally.dropped += len(running.pending.pop(number))
        elif what == "eager":
            self._eager(rng.randrange(len(self.members)))
        elif what == "wait" and numbers:
            refs = list({id(ref): ref for n in numbers for ref in running.pending[n]}.values())
            self._doing(f"conveyor.wait for one of {len(refs)} of {running.spec.name}")
            ready, rest = conveyor.wait(refs, timeout=rng.choice([None, 0.001]))
            if len(ready) + len(rest) != len(refs):
                raise Wrong("wait() lost refs")

    def _get(self, running: Running, number: int, timeout: float | None = None) -> None:
        refs = running.pending.pop(number)
        late = False
        order = list(range(len(refs)))
        self.rng.shuffle(order)
        for i in order:
            late = self._check(running, number, i, refs[i], timeout) is None or late
        if late:
            running.pending[number] = refs  # to be got again

    def _check(
        self, running: Running, number: int, place: int, ref: Any, timeout: float | None = None
    ) -> bool | None:
        """One result. None: it has not come within ``timeout``."""
        where = f"{running.spec.name}, execution {number}, result {place}"
        since = self._doing(f"get of {where}")
        try:
            value = ref.get(timeout)
        except WaitTimeoutError as error:
            self._check_timeout(error, running, timeout, where)
            return None
        except BaseException as error:
            self._check_error(error, running, running.expected[number][place], since, where)
            return True
        self._check_value(value, running.expected[number][place], where)
        return True

    def _eager(self, place: int) -> None:
        member = self.members[place]
        x = self.rng.random()
        since = self._doing(f"an eager call of {member.name}")
        try:
            if member.handle.ping.remote(x).get() != x:
                raise Wrong(f"ping of {member.name}")
        except ActorDiedError as error:
            self._died(error, None, since, place)
        self.tally.eager += 1

    # Executing in several threads, and on an event loop

    def _threads(self) -> None:
        failures: list[BaseException] = []
        lock = threading.Lock()
        seeds = [self.rng.random() for _ in range(3)]

        def work(seed: float) -> None:
            rng = Random(seed)
            try:
                while True:
                    with lock:
                        able = [
                            r
                            for r in self.running
                            if r.next < r.spec.executions and not r.died and not r.torn
                        ]
                        if not able or failures:
                            return
                        running = rng.choice(able)
                        number = running.next
                        running.next += 1
                    self._execute_and_get(running, number, rng)
            except BaseException as error:
                failures.append(error)
            finally:
                self.around.watchdog.idle()

        threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
        for thread in threads:
            thread.start()
        if self.faults.tear_down is not None:
            time.sleep(self.faults.tear_down * 0.02)
            self._tear_down_in_flight()
        for thread in threads:
            self._doing("the end of the threads")
            thread.join()
        if failures:
            raise failures[0]

    def _execute_and_get(self, running: Running, number: int, rng: Random) -> None:
        args, kwargs = arguments(running.spec, number)
        since = self._doing(f"execution {number} of {running.spec.name} in a thread")
        try:
            refs = list(flatten(running.graph.execute(*args, **kwargs), running.spec.outputs))
        except (ActorDiedError, GraphTornDownError) as error:
            self._check_error(error, running, 0, since, f"{running.spec.name}, execution {number}")
            return
        self.tally.executions += 1
        if rng.random() < 0.1 and number + 1 < running.spec.executions:
            self.tally.dropped += len(refs)
            return
        rng.shuffle(order := list(range(len(refs))))
        for i in order:
            self._check(running, number, i, refs[i])

    def _asyncio(self) -> None:
        async def one(running: Running, number: int) -> None:
            args, kwargs = arguments(running.spec, number)
            where = f"{running.spec.name}, execution {number}"
            since = time.monotonic_ns()
            try:
                refs = await running.graph.execute_async(*args, **kwargs)
            except (ActorDiedError, GraphTornDownError) as error:
                self._check_error(error, running, 0, since, where)
                return
            self.tally.executions += 1
            refs = list(flatten(refs, running.spec.outputs))
            for i, ref in enumerate(refs):
                expected = running.expected[number][i]
                since = time.monotonic_ns()
                try:
                    value = await ref
                except BaseException as error:
                    self._check_error(error, running, expected, since, f"{where}, result {i}")
                else:
                    self._check_value(value, expected, f"{where}, result {i}")
                self._doing(f"an event loop after {where}")

        async def main() -> None:
            tasks = [
                asyncio.create_task(one(running, number))
                for running in self.running
                for number in range(running.spec.executions)
            ]
            if self.faults.tear_down is not None:
                await asyncio.sleep(self.faults.tear_down * 0.02)
                self._tear_down_in_flight()
            await asyncio.gather(*tasks)

        for running in self.running:
            running.next = running.spec.executions
        self._doing("an event loop")
        asyncio.run(main())

    # The end

    def _tear_down_in_flight(self) -> None:
        running = self.running[0]
        self._doing(f"teardown of {running.spec.name} in mid-flight")
        running.torn = True
        running.graph.teardown()
        self.tally.torn_down += 1

    def _collect(self, running: Running) -> None:
        numbers = list(running.pending)
        if self.rng.random() < 0.5:
            self.rng.shuffle(numbers)
        for number in numbers:
            self._get(running, number)

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
                except TaskError:
                    continue
        except ActorDiedError as error:
            self._died(error, running.spec, since)
            running.died = True
        else:
            raise Wrong(f"{running.spec.name} runs on without {member.name}")

    def _check_effects(self, expected: list[list[list[int | Failed]]]) -> None:
        """All effects of executions that went well have been, once and in order."""
        if self.style != "one thread" or self.faults.planned:
            return
        for running in self.running:
            if running.torn:
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
