"""Rounds in which memory is short: results are hoarded until there is none, and then dropped."""

from __future__ import annotations

from random import Random
from typing import Any

from chaos_around import Around, Running, Wrong
from chaos_course import Course
from chaos_graphs import arguments, build, chain, evaluate, plain_objects
from chaos_values import MB, digest

import conveyor
from conveyor.exceptions import ArenaFullError, WaitTimeoutError


class Memory(Course):
    """A chain whose results are large, under a cap: the graph's own, or that of a session of its own."""

    title = "memory"
    DIFFERENT = 5  # executions that differ

    @staticmethod
    def session_cap(seed: int) -> int | None:
        """Of the session that the round with this seed needs; ``None``: any session will do."""
        rng = Random(seed ^ 1)  # what kind of round it is was drawn from the same seed
        return rng.choice([32, 48, 64]) * MB if rng.random() < 0.5 else None

    def __init__(self, seed: int, around: Around, rng: Random) -> None:
        super().__init__(seed, around, rng)
        self._choose_members()
        self._session_cap = self.session_cap(seed)
        self._cap = self._session_cap or rng.choice([24, 32, 48]) * MB
        self._size = rng.choice([100_000, 300_000, MB, 2 * MB])
        given = rng.choice([5000, self._size])
        places = list(range(len(self.members)))[:3]
        spec = chain("hoard", places, self.DIFFERENT, False, self._size, given)
        self.specs = [spec]
        self._held: list[tuple[Any, int]] = []  # with the number of their executions
        # Of one actor the addresses are limited for a while: to how much more than it has.
        self._limited = rng.choice([0, MB, 8 * MB]) if rng.random() < 0.5 else None
        self._last = ""  # what the last ArenaFullError said

    def describe(self) -> str:
        whose = "the session's" if self._session_cap else "the graph's"
        return f"{self._size} bytes each, {self._cap >> 20} MiB are {whose}, {super().describe()}"

    def run(self) -> None:
        self._doing("begin")
        self.around.clock.clear()
        conveyor.get([member.handle.begin.remote({}) for member in self.members])
        spec = self.specs[0]
        objects = plain_objects({}, set(range(len(self.members))))
        expected = evaluate(spec, objects, self.DIFFERENT)
        memory = None if self._session_cap else self._cap
        self._doing("compile")
        dag = build(spec, [m.handle for m in self.members])
        graph = dag.compile(depth=spec.depth, name=spec.name, memory_bytes=memory)
        running = Running(0, spec, graph, expected)
        self.running.append(running)
        self.tally.graphs += 1
        for _ in range(self.rng.randint(1, 3)):
            self._hoard(running)
            dropped = len(self._held) // 2
            self._drop(dropped)
            # There is room at once, for as many as were dropped: each of these holds up to two.
            for _ in range(min(3, dropped // 2)):
                if not self._execute(running):
                    raise Wrong(
                        f"no memory, though half of what was held was dropped: {self._last}"
                    )
        self._drop(len(self._held))
        for _ in range(3):
            if not self._execute(running):
                raise Wrong(f"no memory, though nothing is held: {self._last}")
        self._drop(len(self._held))
        if self._limited is not None:
            self._limit_addresses(running)
        self._doing("teardown")
        graph.teardown()
        self.running.clear()
        for place in range(len(self.members)):
            self._eager(place)
        self._count()

    def _hoard(self, running: Running) -> None:
        for _ in range(4 * self._cap // self._size + 100):
            if not self._execute(running):
                held = len(self._held) * self._size
                if held < self._cap // 4:
                    raise Wrong(f"no memory, though only {held} bytes are held: {self._last}")
                return
        raise Wrong(f"{len(self._held) * self._size} bytes are held under {self._cap}")

    def _execute(self, running: Running) -> bool:
        """Hold the results of one or two executions; whether there was memory for all of them."""
        started: list[tuple[int, Any]] = []
        good = True
        for _ in range(self.rng.choice([1, 1, 2])):
            number = running.next
            running.next += 1
            args, kwargs = arguments(running.spec, number % self.DIFFERENT)
            self._doing(f"execution {number} of hoard")
            try:
                started.append((number, running.graph.execute(*args, **kwargs)))
            except ArenaFullError as error:
                good = self._full(error)
            self.tally.executions += 1
        for number, ref in started:
            self._doing(f"get of execution {number} of hoard")
            try:
                value = ref.get()
            except ArenaFullError as error:
                good = self._full(error)
                continue
            if digest(value) != running.expected[number % self.DIFFERENT][0]:
                raise Wrong(f"execution {number} of hoard is wrong")
            self.tally.results += 1
            self._held.append((value, number))
        return good

    def _limit_addresses(self, running: Running) -> None:
        """Whatever does not fit then is that execution's error, and the actor lives on."""
        handle = self.rng.choice(self.members[: len(running.spec.tasks)]).handle
        self._doing("a limit of addresses")
        conveyor.get(handle.limit_memory.remote(self._limited))
        for number in range(running.next, running.next + 10):
            running.next += 1
            args, kwargs = arguments(running.spec, number % self.DIFFERENT)
            self._doing(f"execution {number} of hoard, with few addresses")
            self.tally.executions += 1
            try:
                value = running.graph.execute(*args, **kwargs).get()
            except (MemoryError, OSError) as error:
                if isinstance(error, WaitTimeoutError):
                    raise
                self.tally.fulls += 1
                continue
            if digest(value) != running.expected[number % self.DIFFERENT][0]:
                raise Wrong(f"execution {number} of hoard is wrong")
            self._held.append((value, number))
        self._doing("the end of the limit")
        conveyor.get(handle.limit_memory.remote(None))
        self._drop(len(self._held))
        for _ in range(3):
            if not self._execute(running):
                raise Wrong(f"no memory, though there is again: {self._last}")
        self._drop(len(self._held))

    def _full(self, error: ArenaFullError) -> bool:
        self.tally.fulls += 1
        self._last = str(error)
        # Of what lies in other processes' arenas the driver's error says how much it is.
        if not error.held and "the session's arenas" not in str(error):
            raise Wrong("no memory, and nobody holds any") from error
        return False

    def _drop(self, count: int) -> None:
        """Some of what is held, none of which has changed."""
        self.rng.shuffle(self._held)
        expected = self.running[0].expected
        while count > 0:
            value, number = self._held.pop()
            count -= 1
            if digest(value) != expected[number % self.DIFFERENT][0]:
                raise Wrong(f"what was held of execution {number} of hoard has changed")
