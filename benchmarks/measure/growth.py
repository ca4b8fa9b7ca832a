"""How the time for many things of one kind grows with their number: tasks, actors, references and so on.

A kind of ``KINDS`` prepares a step that makes, uses and lets go of so many things at once. The report makes
slopes of the times: 1 is a line, 2 a square.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.measure.bench import Bench, Figures
from benchmarks.model import Growth
from benchmarks.systems.actors import GraphSystem
from benchmarks.worker import Worker

ACTORS = 2
REPEATS = 15
SECONDS = 2.0
"""For one number of things; a step that takes longer is taken once."""

Step = Callable[[], Any]


class Streamer(Worker):
    def numbers(self) -> Iterator[int]:
        yield from range(3)


class Kinds:
    """Preparations of steps, each of ``count`` things."""

    def __init__(self, bench: Bench, ends: ExitStack) -> None:
        assert isinstance(bench.system, GraphSystem)
        self.system = bench.system
        self.api: Any = bench.system.api
        self.ends = ends
        self._actors = bench.actors
        self._workers = bench.actors(Streamer, ACTORS)
        self.api.get([worker.pid.remote() for worker in self._workers])

    def _echoes(self, count: int) -> list[Any]:
        return [self._workers[i % ACTORS].echo for i in range(count)]

    def _chain(self, count: int) -> Any:
        with self.api.dag.InputNode() as node:
            for echo in self._echoes(count):
                node = echo.bind(node)
        return node

    def _fan(self, echoes: list[Any]) -> Any:
        with self.api.dag.InputNode() as node:
            return self.api.dag.MultiOutputNode([echo.bind(node) for echo in echoes])

    def _compiled(self, bound: Callable[[], Any]) -> Step:
        """Bind, compile, execute once, tear down."""

        def step() -> None:
            graph = self.system.compile(bound())
            self.api.get(graph.execute(1))
            graph.teardown()

        return step

    def _executed(self, bound: Any) -> Step:
        graph = self.system.compile(bound)
        self.ends.callback(graph.teardown)
        return lambda: self.api.get(graph.execute(1))

    def tasks_compiled(self, count: int) -> Step:
        return self._compiled(lambda: self._chain(count))

    def tasks(self, count: int) -> Step:
        return self._executed(self._chain(count))

    def readers_compiled(self, count: int) -> Step:
        return self._compiled(lambda: self._fan(self._echoes(count)))

    def readers(self, count: int) -> Step:
        return self._executed(self._fan(self._echoes(count)))

    def started(self, count: int) -> Step:
        def step() -> None:
            actors, _ = self.system.start_actors(count)
            self.system.stop_actors(actors)

        return step

    def _many(self, count: int) -> list[Any]:
        actors = self._actors(Worker, count)
        self.api.get([actor.pid.remote() for actor in actors])
        return [actor.echo for actor in actors]

    def called(self, count: int) -> Step:
        echoes = self._many(count)
        return lambda: self.api.get([echo.remote(1) for echo in echoes])

    def reading(self, count: int) -> Step:
        return self._executed(self._fan(self._many(count)))

    def graphs(self, count: int) -> Step:
        def step() -> None:
            graphs = [self.system.compile(self._chain(ACTORS)) for _ in range(count)]
            self.api.get([graph.execute(1) for graph in graphs])
            for graph in graphs:
                graph.teardown()

        return step

    def calls(self, count: int) -> Step:
        echoes = self._echoes(count)
        return lambda: self.api.get([echo.remote(1) for echo in echoes])

    def passed(self, count: int) -> Step:
        """References in a value that an actor gets and returns."""
        echo = self._workers[0].echo

        def step() -> None:
            self.api.get(self.api.get(echo.remote([self.api.put(i) for i in range(count)])))

        return step

    def put(self, count: int) -> Step:
        return lambda: self.api.get([self.api.put(i) for i in range(count)])

    def waited(self, count: int) -> Step:
        echoes = self._echoes(count)

        def step() -> None:
            refs = [echo.remote(1) for echo in echoes]
            while refs:
                _, refs = self.api.wait(refs)

        return step

    def streams(self, count: int) -> Step:
        def step() -> None:
            opened = [self._workers[i % ACTORS].numbers.remote() for i in range(count)]
            for stream in opened:
                if list(self.system.items(stream)) != [0, 1, 2]:
                    raise ValueError("wrong items")

        return step

    def awaited(self, count: int) -> Step:
        echoes = self._echoes(count)

        async def one(echo: Any) -> None:
            await echo.remote(1)

        async def all_of_them() -> None:
            await asyncio.gather(*map(one, echoes))

        return lambda: asyncio.run(all_of_them())


KINDS: dict[str, Callable[[Kinds, int], Step]] = {
    "tasks/compiled": Kinds.tasks_compiled,
    "tasks/executed": Kinds.tasks,
    "readers/compiled": Kinds.readers_compiled,
    "readers/executed": Kinds.readers,
    "graphs": Kinds.graphs,
    "references/called": Kinds.calls,
    "references/passed": Kinds.passed,
    "references/waited": Kinds.waited,
    "kept": Kinds.put,
    "streams": Kinds.streams,
    "awaits": Kinds.awaited,
    "actors/started": Kinds.started,
    "actors/called": Kinds.called,
    "actors/reading": Kinds.reading,
}


def growth(bench: Bench, spec: Growth) -> Figures:
    """For each number of things the median time, and the processor time of all processes of which slopes are
    made: other work on the machine does not bend them. The numbers take turns."""
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in spec.counts}
    with ExitStack() as ends:
        kinds = Kinds(bench, ends)
        steps = {count: KINDS[spec.what](kinds, count) for count in spec.counts}
        for _ in range(REPEATS):
            for count, step in steps.items():
                if sum(seconds for seconds, _ in found[count]) < SECONDS * bench.effort:
                    with bench.cpu() as cpu:
                        start = time.perf_counter()
                        step()
                        seconds = time.perf_counter() - start
                    found[count].append((seconds, cpu.seconds))
    figures = {}
    for count, times in found.items():
        # The first one is another matter, but where it takes so long that there is no other.
        seconds, used = zip(*(times[1:] or times), strict=True)
        figures |= {f"of{count}_us": median(seconds) * 1e6, f"cpu{count}_us": median(used) * 1e6}
    return figures
