"""Everyday work with actors, functions, references and values, by the same code on Conveyor and on Ray.

``CALLS`` has what the library does with small values, ``VALUES`` what programs pass, each by every one of
``WAYS``. A row prepares a step, and says how many of the things that it measures the step consists of.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

from benchmarks.measure.bench import Bench, Figures, run_for, spread, time_calls
from benchmarks.model import Core
from benchmarks.systems.actors import ActorSystem, GraphSystem
from benchmarks.worker import Worker

SMALL = {"step": 7, "loss": 0.5}
MANY = 100
"""Calls that are under way at once, of one caller."""
SIDE = 4
"""Actors, or callers, side by side."""
THREADS = 16
HELD = 10_000
WAITED = 1_000
ITEMS = 2
WARM_SECONDS = 0.2
SECONDS = 1.0
LEAST, MOST = 5, 20_000


# --- What runs in workers. ---


class AsyncWorker:
    async def echo(self, value: Any) -> Any:
        return value

    async def stream(self, count: int) -> AsyncIterator[Any]:
        for _ in range(count):
            yield SMALL


def echo(value: Any) -> Any:
    return value


class Caller:
    """An actor that calls others, or functions, or puts values."""

    def __init__(self, library: str) -> None:
        self._api = import_module(library)
        self._function = self._api.remote(echo)

    def call(self, workers: list[Any], value: Any) -> None:
        call_all(self._api, [worker.echo for worker in workers], value)

    def call_function(self, value: Any) -> None:
        call_all(self._api, [self._function], value)

    def call_with_reference(self, workers: list[Any], value: Any) -> None:
        call_all(self._api, [worker.echo for worker in workers], self._api.put(value))

    def put(self, size: int, count: int) -> None:
        value = array(size) if size else SMALL
        for _ in range(count):
            self._api.put(value)


def call_all(api: Any, methods: list[Any], value: Any) -> None:
    """Have ``MANY`` calls under way at once, dealt out to ``methods``."""
    api.get([methods[i % len(methods)].remote(value) for i in range(MANY)])


def call_from_function(library: str, worker: Any) -> None:
    call_all(import_module(library), [worker.echo], SMALL)


class Keeper:
    """An actor with a value of ``VALUES``."""

    def __init__(self, name: str) -> None:
        self._value = VALUES[name]()

    def give(self, _: Any = None) -> Any:
        return self._value

    def take(self, value: Any) -> int:
        return len(value)

    def stream(self, count: int) -> Iterator[Any]:
        for _ in range(count):
            yield self._value


# --- What is measured. ---


class Row(NamedTuple):
    step: Callable[[], Any]
    each: int = 1
    result: Any = None
    """Of a step; ``None`` if it does not matter."""


class Rows:
    """Preparations of steps."""

    def __init__(self, bench: Bench) -> None:
        assert isinstance(bench.system, ActorSystem)
        self.system = bench.system
        self.api: Any = bench.system.api
        self.library = bench.system.package
        self.actors = bench.actors

    def get_each(self, methods: list[Any], *args: Any) -> Any:
        return self.api.get([method.remote(*args) for method in methods])

    # Values that are put.

    def put(self, size: int) -> Row:
        value = array(size) if size else SMALL
        return Row(lambda: self.api.put(value))

    def get(self, size: int) -> Row:
        ref = self.api.put(array(size) if size else SMALL)
        return Row(lambda: self.api.get(ref))

    def put_by_actors(self, size: int, count: int) -> Row:
        puts = [caller.put for caller in self.actors(Caller, SIDE, self.library)]
        return Row(lambda: self.get_each(puts, size, count), SIDE * count)

    # Calls.

    def function(self) -> Any:
        return self.api.remote(echo)

    def one(self, method: Any, value: Any = SMALL) -> Row:
        return Row(lambda: self.api.get(method.remote(value)), 1, value)

    def many(self, methods: list[Any], value: Any = SMALL) -> Row:
        return Row(lambda: call_all(self.api, methods, value), MANY)

    def echoes(self, count: int = 1, cls: type = Worker, **options: Any) -> list[Any]:
        return [worker.echo for worker in self.actors(cls, count, **options)]

    def callers(self, cls: type = Worker, method: str = "call") -> Row:
        workers = self.actors(cls, SIDE)
        calls = [getattr(caller, method) for caller in self.actors(Caller, SIDE, self.library)]
        return Row(lambda: self.get_each(calls, workers, SMALL), SIDE * MANY)

    def functions_of_actors(self) -> Row:
        calls = [caller.call_function for caller in self.actors(Caller, SIDE, self.library)]
        return Row(lambda: self.get_each(calls, SMALL), SIDE * MANY)

    def functions_that_call(self) -> Row:
        (worker,) = self.actors(Worker, 1)
        functions = [self.api.remote(call_from_function)] * SIDE
        return Row(lambda: self.get_each(functions, self.library, worker), SIDE * MANY)

    def reference(self) -> Row:
        (call,), ref = self.echoes(), self.api.put(SMALL)
        return Row(lambda: self.api.get(call.remote(ref)), 1, SMALL)

    def small_items(self) -> Row:
        (worker,) = self.actors(AsyncWorker, 1)
        return Row(lambda: sum(1 for _ in self.items(worker.stream, MANY)), MANY, MANY)

    def items(self, method: Any, count: int) -> Iterator[Any]:
        return self.system.items(method.remote(count))

    # References in values, and waiting for them.

    def get_held(self) -> Row:
        refs = [self.api.put(i) for i in range(HELD)]
        ref = self.api.put(refs)
        return Row(lambda: len(self.api.get(ref)), 1, len(refs))

    def pass_held(self) -> Row:
        refs = [self.api.put(i) for i in range(MANY)]
        (call,) = self.echoes()
        return Row(lambda: len(self.api.get(call.remote(refs))), 1, MANY)

    def wait(self) -> Row:
        (call,) = self.echoes()

        def step() -> None:
            refs = [call.remote(SMALL) for _ in range(WAITED)]
            while refs:
                _, refs = self.api.wait(refs)

        return Row(step, WAITED)

    # Values as people pass them.

    def argument(self, name: str) -> Row:
        value = VALUES[name]()
        (keeper,) = self.actors(Keeper, 1, name)
        return Row(lambda: self.api.get(keeper.take.remote(value)), 1, len(value))

    def result(self, name: str) -> Row:
        (keeper,) = self.actors(Keeper, 1, name)
        return Row(lambda: len(self.api.get(keeper.give.remote())), 1, len(VALUES[name]()))

    def put_and_got(self, name: str) -> Row:
        value = VALUES[name]()
        return Row(lambda: len(self.api.get(self.api.put(value))), 1, len(value))

    def item(self, name: str) -> Row:
        (keeper,) = self.actors(Keeper, 1, name)
        size = ITEMS * len(VALUES[name]())
        return Row(lambda: sum(map(len, self.items(keeper.stream, ITEMS))), ITEMS, size)

    def edge(self, name: str) -> Row:
        assert isinstance(self.system, GraphSystem)
        maker, reader = self.actors(Keeper, 2, name)
        with self.api.dag.InputNode() as given:
            graph = self.system.compile(reader.take.bind(maker.give.bind(given)))
        return Row(lambda: self.api.get(graph.execute(0)), 1, len(VALUES[name]()))


def array(size: int) -> Any:
    import numpy as np

    return np.ones(size, np.uint8)


def _objects() -> Any:
    import numpy as np

    return np.array([f"text {i}" if i % 2 else float(i) for i in range(100_000)], dtype=object)


def _state() -> Any:
    import torch

    return {f"layers.{i}.weight": torch.ones(64, 64) for i in range(1_000)}


def _frame() -> Any:
    import numpy as np
    import pandas as pd

    count = 100_000
    cities = ["Oslo", "Lima", "Accra", "Hanoi"] * (count // 4)
    return pd.DataFrame({"id": np.arange(count), "price": np.linspace(0, 1, count), "city": cities})


def _images() -> Any:
    return [array(224 * 224 * 3).reshape(224, 224, 3) for _ in range(64)]


VALUES: dict[str, Callable[[], Any]] = {
    "dicts": lambda: [{"id": i, "name": f"row {i}", "score": i / 7} for i in range(100_000)],
    "strings": lambda: [f"line number {i}" for i in range(100_000)],
    "bytes1MB": lambda: b"x" * (1 << 20),
    "bytes256MB": lambda: b"x" * (256 << 20),
    "objects": _objects,
    "state": _state,
    "frame": _frame,
    "images": _images,
}

WAYS: dict[str, Callable[[Rows, str], Row]] = {
    "argument": Rows.argument,
    "result": Rows.result,
    "put": Rows.put_and_got,
    "item": Rows.item,
    "edge": Rows.edge,
}

CALLS: dict[str, Callable[[Rows], Row]] = {
    "put/small": lambda p: p.put(0),
    "put/1MB": lambda p: p.put(1 << 20),
    "put/64MB": lambda p: p.put(64 << 20),
    "put/4actors/small": lambda p: p.put_by_actors(0, MANY),
    "put/4actors/16MB": lambda p: p.put_by_actors(16 << 20, 4),
    "get/small": lambda p: p.get(0),
    "get/1MB": lambda p: p.get(1 << 20),
    "get/64MB": lambda p: p.get(64 << 20),
    "function/one": lambda p: p.one(p.function()),
    "function/many": lambda p: p.many([p.function()]),
    "function/4actors": Rows.functions_of_actors,
    "call/one": lambda p: p.one(*p.echoes()),
    "call/many": lambda p: p.many(p.echoes()),
    "call/1to4": lambda p: p.many(p.echoes(SIDE)),
    "call/4to4": Rows.callers,
    "call/4functions": Rows.functions_that_call,
    "call/4to4/reference": lambda p: p.callers(method="call_with_reference"),
    "call/one/reference": Rows.reference,
    "call/one/100references": Rows.pass_held,
    "threads/one": lambda p: p.one(*p.echoes(max_concurrency=THREADS)),
    "threads/many": lambda p: p.many(p.echoes(max_concurrency=THREADS)),
    "async/one": lambda p: p.one(*p.echoes(cls=AsyncWorker)),
    "async/many": lambda p: p.many(p.echoes(cls=AsyncWorker)),
    "async/many/1KB": lambda p: p.many(p.echoes(cls=AsyncWorker), bytes(1 << 10)),
    "async/1to4": lambda p: p.many(p.echoes(SIDE, AsyncWorker)),
    "async/4to4": lambda p: p.callers(AsyncWorker),
    "stream/small": Rows.small_items,
    "get/10000references": Rows.get_held,
    "wait/1of1000": Rows.wait,
}


def core(bench: Bench, spec: Core) -> Figures:
    rows = Rows(bench)
    row = WAYS[spec.way](rows, spec.what) if spec.way else CALLS[spec.what](rows)
    found = row.step()
    if row.result is not None and found != row.result:
        raise ValueError("wrong result")
    run_for(WARM_SECONDS * bench.effort, 1, MOST, row.step)
    least = max(2, round(LEAST * bench.effort))
    with bench.cpu() as cpu:
        times = time_calls(lambda _: row.step(), None, SECONDS * bench.effort, MOST, least)
    figures = spread([time / row.each for time in times])
    return figures | {"cpu_us": cpu.seconds / len(times) / row.each * 1e6}
