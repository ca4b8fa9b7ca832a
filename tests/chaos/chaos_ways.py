"""The ways in which a round executes its graphs and gets their results."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

from chaos_around import Running, Wrong
from chaos_graphs import Failed, Stream, arguments, flatten
from chaos_interrupts import Interrupted, interrupt
from chaos_together import Together
from chaos_values import scribble

import conveyor
from conveyor import StreamRef
from conveyor.exceptions import (
    ActorDiedError,
    CapacityError,
    ConveyorError,
    DeadlineExceededError,
    GraphTornDownError,
    WaitTimeoutError,
)


class Ways(Together):
    running: list[Running]

    def _deadline(self, running: Running, number: int, rng: Random) -> float | None:
        """s until which this execution must end, if it must."""
        if number in running.spec.stuck:
            return rng.uniform(0.02, 0.1)
        if running.exact or rng.random() > 0.04:
            return None
        return rng.uniform(0.0001, 0.01)

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

    def _arguments(
        self, running: Running, number: int, rng: Random
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to give to ``execute``. Some of it as refs: whole arguments, or what lies inside."""
        args, kwargs = arguments(running.spec, number)
        # What an actor that dies has not read of refs is kept for long, as docs/limits.md says.
        if rng.random() < 0.15 and not self.faults.deadly and self.faults.tear_down is None:
            kwargs = {key: conveyor.put(value) for key, value in kwargs.items()}
            if args and rng.random() < 0.5:
                args = (conveyor.put(args[0]), *args[1:])
            elif args:
                first = args[0]
                inside = [conveyor.put(first["b"][0]), first["b"][1]]
                args = ({"a": conveyor.put(first["a"]), "b": inside}, *args[1:])
        limit = self._deadline(running, number, rng)
        if limit is not None:
            running.limited.add(number)
            kwargs = {**kwargs, "deadline": limit}
        return args, kwargs

    def _submit(self, running: Running) -> None:
        """Execute it, in the main thread."""
        number, rng = running.next, self.rng
        args, kwargs = self._arguments(running, number, rng)
        way = rng.choice(["execute", "execute", "execute", "try", "timeout"])
        # Whether what is broken off has begun is not known, so nobody can tell what it did.
        if rng.random() < 0.04 and not (running.exact or running.spec.broken):
            way = "interrupted"
        if not running.spec.roomy and self._open_streams(running):
            way = "try"  # while nobody takes their items it may wait for ever
        while True:
            since = self._doing(f"execution {number} of {running.spec.name}")
            try:
                if way == "try":
                    refs = running.graph.try_execute(*args, **kwargs)
                elif way == "timeout":
                    refs = running.graph.execute(*args, timeout=rng.random() * 0.003, **kwargs)
                elif way == "interrupted":
                    refs = self._interrupt(lambda: running.graph.execute(*args, **kwargs))
                    if isinstance(refs, Interrupted):
                        way, running.interrupted = "execute", True
                        continue
                else:
                    refs = running.graph.execute(*args, **kwargs)
                break
            except (CapacityError, WaitTimeoutError):
                self.tally.timeouts += 1
                way = "execute"
                if not running.spec.roomy:
                    self._take_what_is_in_the_way(running)
            except DeadlineExceededError as error:
                # There was no room until then. It has no number yet, so the next one is in its place.
                self._check_error(error, running, number, 0, since, "execute")
                kwargs["deadline"] *= 2
                if not running.spec.roomy:
                    self._take_what_is_in_the_way(running)
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
        if rng.random() < 0.06:
            what = "interrupted"
        elif rng.random() < 0.15:
            what = "get together" if running.exact or rng.random() < 0.6 else "cancel"
        elif rng.random() < 0.25:
            what = "some items" if running.spec.streams else "eager stream"
        if what in ("get", "newest") and numbers:
            self._get(running, numbers[0 if what == "get" else -1])
        elif what == "get all":
            for number in numbers:
                self._get(running, number)
        elif what == "glance" and numbers:
            self._get(running, rng.choice(numbers), rng.choice([0, 0.0005, 0.002]))
        elif what == "drop" and numbers:
            number = rng.choice(numbers)
            # The last one tells that all have been. A stream that is dropped may not have run at all.
            all_run = not running.exact or not running.spec.streams
            if number + 1 < running.spec.executions and all_run:
                self.tally.dropped += len(running.pending.pop(number))
                running.dropped = True
        elif what == "some items" and numbers:
            self._take_some(running, rng.choice(numbers))
        elif what == "eager stream":
            self._call_stream()
        elif what == "get together" and numbers:
            self._get_together(running, rng.choice(numbers))
        elif what == "cancel" and numbers:
            number = rng.choice(numbers)
            self._doing(f"cancel of execution {number} of {running.spec.name}")
            refs = [ref for ref in running.pending[number] if ref is not None]
            if refs and rng.choice(refs).cancel():
                running.cancelled.add(number)
                self.tally.cancelled += 1
            self._get(running, number)
        elif what == "interrupted" and numbers:
            self._break_off(running, rng.choice(numbers))
        elif what == "eager":
            self._eager(rng.randrange(len(self.members)))
        elif what == "wait" and numbers:
            every = [ref for n in numbers for ref in running.pending[n] if ref is not None]
            refs = list({id(ref): ref for ref in every}.values())
            if not refs:
                return
            self._doing(f"conveyor.wait for one of {len(refs)} of {running.spec.name}")
            ready, rest = conveyor.wait(refs, timeout=rng.choice([None, 0.001]))
            if len(ready) + len(rest) != len(refs):
                raise Wrong("wait() lost refs")

    def _break_off(self, running: Running, number: int) -> None:
        """Ctrl-C while a result is waited for, which can be got afterwards all the same."""
        refs = running.pending[number]
        places = [
            i for i, ref in enumerate(refs) if ref is not None and not isinstance(ref, StreamRef)
        ]
        if not places:
            return
        place = self.rng.choice(places)
        where = f"{running.spec.name}, execution {number}, result {place}, which is broken off"
        if not running.spec.roomy:
            self._take_what_is_in_the_way(running, number)
        since = self._doing(f"get of {where}")
        expected = running.expected[number][place]
        try:
            value = self._interrupt(refs[place].get)
        except BaseException as error:
            self._check_error(error, running, number, expected, since, where)
        else:
            if not isinstance(value, Interrupted):
                self._check_value(value, expected, where, keep=False)
        self._get(running, number)

    def _interrupt(self, work: Callable[[], Any]) -> Any:
        rng = self.rng
        delay = rng.choice([0, rng.uniform(0, 0.0005), rng.uniform(0, 0.01)])
        since = time.monotonic_ns()
        done = interrupt(delay, work)
        if isinstance(done, Interrupted):
            self.tally.interrupts.append(done.ms)
            self._check_late("Ctrl-C", done.ms, since)
        return done

    def _get_together(self, running: Running, number: int) -> None:
        """All results of an execution at once: the first error of any of them is raised."""
        if None in running.pending[number]:
            return  # of a stream that was dropped
        where = f"{running.spec.name}, execution {number}, all results"
        expected = running.expected[number]
        if not running.spec.roomy:
            self._take_what_is_in_the_way(running, number)
        since = self._doing(f"get of {where}")
        try:
            values = conveyor.get(running.pending[number])
        except BaseException as error:
            for place in running.spec.streams:
                running.taken[number, place] = None
            every = [item.failed if isinstance(item, Stream) else item for item in expected]
            blamed = [item.blamed for item in every if isinstance(item, Failed)]
            any_of_them = Failed(frozenset().union(*blamed)) if blamed else 0
            self._check_error(error, running, number, any_of_them, since, where)
            self._get(running, number)
            return
        del running.pending[number]
        for place, value in enumerate(values):
            self._check_all(running, number, place, value, f"{where} ({place})")

    def _get(self, running: Running, number: int, timeout: float | None = None) -> None:
        if timeout is None and not running.spec.roomy:
            self._take_what_is_in_the_way(running, number)
        refs = running.pending.pop(number)
        late = False
        order = [i for i, ref in enumerate(refs) if ref is not None]
        self.rng.shuffle(order)
        for i in order:
            late = self._check(running, number, i, refs[i], timeout) is None or late
            self._check_the_rest(running, number, refs)
        if late:
            running.pending[number] = refs  # to be got again

    def _check(
        self, running: Running, number: int, place: int, ref: Any, timeout: float | None = None
    ) -> bool | None:
        """One result. None: it has not come within ``timeout``."""
        where = f"{running.spec.name}, execution {number}, result {place}"
        if isinstance(ref, StreamRef):
            return self._check_items(running, number, place, ref, timeout)
        since = self._doing(f"get of {where}")
        try:
            value = ref.get(timeout)
        except WaitTimeoutError as error:
            self._check_timeout(error, running, timeout, where)
            return None
        except BaseException as error:
            expected = running.expected[number][place]
            self._check_error(error, running, number, expected, since, where)
            return True
        if self.rng.random() < 0.1:
            self._check_value(value, running.expected[number][place], where, keep=False)
            scribble(value)  # every get gives a value of its own
            value, where = ref.get(), f"{where}, got again"
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
        args, kwargs = self._arguments(running, number, rng)
        where = f"{running.spec.name}, execution {number}"
        since = self._doing(f"{where} in a thread")
        try:
            refs = list(flatten(running.graph.execute(*args, **kwargs), running.spec.outputs))
        except (ActorDiedError, GraphTornDownError, DeadlineExceededError) as error:
            self._check_error(error, running, number, 0, since, where)
            return
        self.tally.executions += 1
        if rng.random() < 0.1 and number + 1 < running.spec.executions:
            self.tally.dropped += len(refs)
            running.dropped = True
            return
        if not running.spec.roomy:
            self._take_in_turns(running, {number: refs})
        rng.shuffle(order := list(range(len(refs))))
        for i in order:
            self._check(running, number, i, refs[i])
            self._check_the_rest(running, number, refs)

    def _asyncio(self) -> None:
        async def one(running: Running, number: int) -> None:
            args, kwargs = self._arguments(running, number, self.rng)
            where = f"{running.spec.name}, execution {number}"
            since = time.monotonic_ns()
            try:
                refs = await running.graph.execute_async(*args, **kwargs)
            except (ActorDiedError, GraphTornDownError, DeadlineExceededError) as error:
                self._check_error(error, running, number, 0, since, where)
                return
            self.tally.executions += 1
            patience = self.rng.choice([0, 0.002, 0.01]) if self.rng.random() < 0.1 else None
            refs = list(flatten(refs, running.spec.outputs))
            # Streams wait until their items are taken, so that is done while others are waited for.
            streams = running.spec.streams
            taking = [result(running, number, i, refs, patience) for i in streams]
            tasks = [asyncio.ensure_future(coroutine) for coroutine in taking]
            if not running.spec.roomy:
                await asyncio.gather(*tasks)
            for i in range(len(refs)):
                if i not in streams:
                    await result(running, number, i, refs, patience)
            await asyncio.gather(*tasks)

        async def result(
            running: Running, number: int, i: int, refs: list[Any], patience: float | None
        ) -> None:
            expected = running.expected[number][i]
            where = f"{running.spec.name}, execution {number}, result {i}"
            whole = not isinstance(refs[i], StreamRef) or self.rng.random() < 0.3
            while True:
                since = time.monotonic_ns()
                waiting = refs[i] if whole else refs[i].__anext__()
                try:
                    value = await (
                        waiting if patience is None else asyncio.wait_for(waiting, patience)
                    )
                except StopAsyncIteration:
                    self._check_end(running, number, i)
                    return
                except BaseException as error:
                    if isinstance(error, TimeoutError) and not isinstance(error, ConveyorError):
                        running.cancelled.add(number)  # with the last await of it
                        self.tally.cancelled += 1
                        refs[i] = None  # or a stream would wait until somebody takes its items
                        return
                    self._check_error(error, running, number, expected, since, where)
                    if number in running.failures:
                        running.failures[number].refs = refs
                    return
                finally:
                    del waiting
                    self._doing(f"an event loop after {where}")
                if whole:
                    self._check_all(running, number, i, value, where)
                    return
                self._check_item(running, number, i, value)

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

    # What all of them may do

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
