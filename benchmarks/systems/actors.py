"""What Conveyor and Ray share: the same programs, with only the module exchanged."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from benchmarks.model import ARGUMENTS, Topology
from benchmarks.systems.base import AsyncPath, Path, System
from benchmarks.worker import Worker


class ActorSystem(System):
    """Actors of ``self.api``: the module ``conveyor`` or ``ray``."""

    api: ModuleType

    def spawn(self, cls: type) -> Any:
        """One actor of ``cls`` that reserves nothing."""
        return self.api.remote(cls).remote()

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
