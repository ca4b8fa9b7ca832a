"""What Conveyor and Ray share: the same programs, with only the module exchanged."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

from benchmarks.making import Maker, Reader
from benchmarks.model import ARGUMENTS, Direct, Executor, Topology
from benchmarks.stage import Stage
from benchmarks.systems.base import AsyncPath, DirectPath, Path, System
from benchmarks.worker import Worker

WAKE = 5


class ActorSystem(System):
    """Actors of ``self.api``: the module ``conveyor`` or ``ray``."""

    api: ModuleType

    def spawn(self, cls: type, *args: Any, **options: Any) -> Any:
        """One actor of ``cls`` that reserves nothing."""
        return self.api.remote(cls).options(**options).remote(*args)

    def start_actors(self, count: int, cls: type = Worker) -> tuple[list[Any], list[int]]:
        """``count`` actors that have answered, and their process ids."""
        actors = [self.spawn(cls) for _ in range(count)]
        pids = self.api.get([actor.pid.remote() for actor in actors])
        return actors, pids

    def stop_actors(self, actors: list[Any]) -> None:
        for actor in actors:
            self.api.kill(actor)

    def call_path(self, method: str) -> Path:
        actors, pids = self.start_actors(1)
        get, call = self.api.get, getattr(actors[0], method).remote

        def once(value: Any) -> Any:
            return get(call(value))

        return Path(once, call, get, lambda: self.stop_actors(actors), pids)

    def items(self, stream: Any) -> Iterator[Any]:
        """The values of a stream, as they come."""
        return (self.api.get(item) for item in stream)

    #: What the values of ``direct_path`` stay by; ``None``: they travel.
    transport: ClassVar[str | None] = None

    def spawn_staying(self, cls: type, *args: Any) -> Any:
        """An actor whose results may stay with it."""
        return self.spawn(cls, *args)

    def meet(self, actors: list[Any]) -> None:
        """What has to be done before values pass between them."""

    def makers(self) -> dict[str, type]:
        """The class of the maker where it is not the usual one, by use."""
        return {}

    def get_into(self, ref: Any, target: Any) -> None:
        """Fetch a value into a tensor."""
        raise NotImplementedError

    def direct_path(self, spec: Direct) -> DirectPath:
        get, wait = self.api.get, self.api.wait
        maker = self.spawn_staying(self.makers().get(spec.use, Maker), spec)
        readers = [self.spawn_staying(Reader) for _ in range(spec.readers)]
        actors = [maker, *readers]
        pids = get([actor.pid.remote() for actor in actors])
        self.meet(actors)
        make, give = maker.make, maker.give
        if self.transport is not None:
            make, give = (m.options(tensor_transport=self.transport) for m in (make, give))
        look = "keep" if spec.use == "cold" else "peek" if spec.peeks else "read"
        looks = [getattr(reader, look).remote for reader in readers]
        target = None
        if spec.use == "into":
            import torch

            target = torch.zeros(spec.size, dtype=torch.uint8)

        def pull(ref: Any) -> list[int]:
            if target is not None:
                self.get_into(ref, target)
                return []
            found: list[int] = get([look(ref) for look in looks])
            return found

        # Whoever has just got one value has what it runs for the next one in its caches. Otherwise the time
        # of a value that nobody copies is that of loading all this anew, however small the value is.
        before = None
        if spec.use == "in-place":
            before = make.remote(1)
            wait([before])

        def wake() -> None:
            for _ in range(WAKE):
                get([reader.pid.remote() for reader in readers])
            if before is not None:
                for _ in range(WAKE):
                    pull(before)

        return DirectPath(
            (lambda _: give.remote()) if spec.use == "call" else make.remote,
            pull,
            lambda ref: wait([ref]),
            wake,
            maker.compute.remote,
            lambda: self.stop_actors(actors),
            target,
            pids[0],
        )


class GraphSystem(ActorSystem):
    """Actors and compiled graphs of them."""

    def bind(self, actors: list[Any], topology: Topology) -> Any:
        """The graph of ``topology`` over ``actors``, not compiled."""
        dag = self.api.dag
        methods = [getattr(actor, topology.method) for actor in actors]
        with dag.InputNode() as given:
            if topology.kind == "fan":
                return dag.MultiOutputNode([method.bind(given) for method in methods])
            if topology.kind == "args":
                return methods[0].bind(*(given[i] for i in range(ARGUMENTS)))
            node = given
            for task in range(topology.hops):
                node = methods[task % len(methods)].bind(node)
            return node

    def compile(self, bound: Any, asyncio: bool = False) -> Any:
        raise NotImplementedError

    def path(self, topology: Topology) -> Path:
        actors, pids = self.start_actors(topology.size)
        graph = self.compile(self.bind(actors, topology))
        get, execute = self.api.get, graph.execute

        def close() -> None:
            graph.teardown()
            self.stop_actors(actors)

        if topology.kind == "args":

            def submit(value: Any) -> Any:
                return execute(*((value,) * ARGUMENTS))

            def once(value: Any) -> Any:
                return get(execute(*((value,) * ARGUMENTS)))

        else:
            submit = execute

            def once(value: Any) -> Any:
                return get(execute(value))

        return Path(once, submit, get, close, pids)

    def executor_path(self, spec: Executor) -> Path:
        seconds = spec.stage_ms / 1e3
        actors = [self.spawn(Stage, seconds) for _ in range(spec.stages * spec.ranks)]
        pids = self.api.get([actor.pid.remote() for actor in actors])
        stages = [actors[i : i + spec.ranks] for i in range(0, len(actors), spec.ranks)]
        if spec.ranks > 1:
            self.join(actors, spec)
        with self.api.dag.InputNode() as given:
            made = [actor.first.bind(given) for actor in stages[0]]
            for workers in stages[1:]:
                made = self.reduced(made)
                last = workers is stages[-1] and spec.ranks == 1
                made = [
                    (worker.last if last else worker.step).bind(given, node)
                    for worker, node in zip(workers, made, strict=True)
                ]
            node = made[0]
            if spec.ranks > 1:
                # Of the other ranks of the last stage nobody uses the result, but they take part.
                node = self.picked(stages[-1], self.reduced(made))
        graph = self.compile(node)
        get, execute = self.api.get, graph.execute

        def close() -> None:
            graph.teardown()
            self.stop_actors(actors)

        return Path(lambda step: get(execute(step)), execute, get, close, pids)

    def join(self, actors: list[Any], spec: Executor) -> None:
        """Have the workers of an executor meet, where ``reduced`` does nothing."""

    def reduced(self, nodes: list[Any]) -> list[Any]:
        """The hidden states of a stage's ranks, reduced, by the system's own collectives."""
        return nodes

    def picked(self, workers: list[Any], nodes: list[Any]) -> Any:
        """The tokens of the last stage."""
        return workers[0].pick.bind(nodes[0])

    async def async_path(self) -> AsyncPath:
        actors, _ = self.start_actors(1)
        graph = self.compile(self.bind(actors, Topology("chain", 1)), asyncio=True)
        execute = graph.execute_async

        async def once(value: Any) -> Any:
            return await (await execute(value))

        def close() -> None:
            graph.teardown()
            self.stop_actors(actors)

        return AsyncPath(once, close)
