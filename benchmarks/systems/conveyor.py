"""Conveyor: compiled graphs and eager calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import conveyor
from benchmarks.making import FILLED, Maker
from benchmarks.model import AllReduce, Direct, Overlap
from benchmarks.reducing import Steps
from benchmarks.systems.actors import GraphSystem
from benchmarks.systems.base import Path
from conveyor.experimental import collective


class _Rank(Steps):
    def time_calls(self, calls: int) -> list[float]:
        return self.time(collective.allreduce, collective.barrier, calls)


class _InPlaceMaker(Maker):
    """Makes each value in memory that others may read. It fills as much for each, the rest elsewhere, so the
    caches are in the same state whatever the size."""

    def __init__(self, spec: Direct) -> None:
        import torch

        super().__init__(spec)
        self._size = spec.size
        self._rest = torch.ones(max(0, FILLED - spec.size), dtype=torch.uint8)

    def make(self, number: int) -> Any:
        import torch

        made = conveyor.empty_tensor((self._size,), torch.uint8)
        self._rest.fill_(number)
        made.fill_(number)
        return made


class ConveyorSystem(GraphSystem):
    name = "conveyor"
    package = "conveyor"
    api = conveyor
    transport = "auto"

    def makers(self) -> dict[str, type]:
        return {"in-place": _InPlaceMaker}

    def get_into(self, ref: Any, target: Any) -> None:
        conveyor.get(ref, into=target)

    def items(self, stream: Any) -> Iterator[Any]:
        return iter(stream)

    def close(self) -> None:
        conveyor.shutdown()

    def compile(self, bound: Any, asyncio: bool = False) -> Any:
        del asyncio  # every graph serves get and await
        return bound.compile()

    def allreduce_path(self, spec: AllReduce) -> Path:
        actors = [self.spawn(_Rank, rank, spec.size) for rank in range(spec.ranks)]
        if spec.bound:
            return self._bound_path(actors)
        group = collective.create_collective_group(actors)

        def once(calls: int) -> Any:
            return conveyor.get([actor.time_calls.remote(calls) for actor in actors])[0]

        def close() -> None:
            collective.destroy_collective_group(group)
            self.stop_actors(actors)

        return Path(once, once, once, close)

    def _bound_path(self, actors: list[Any]) -> Path:
        """The same steps, each an execution of a graph."""
        with conveyor.dag.InputNode() as given:
            written = collective.barrier.bind([actor.write.bind(given) for actor in actors])
            begun = [a.begin.bind(node) for a, node in zip(actors, written, strict=True)]
            reduced = collective.allreduce.bind(begun)
            read = [a.read.bind(node) for a, node in zip(actors, reduced, strict=True)]
        graph = conveyor.dag.MultiOutputNode(read).compile()

        def once(calls: int) -> Any:
            times = [conveyor.get(graph.execute(step))[0] for step in range(calls + 1)]
            return times[1:]

        def close() -> None:
            graph.teardown()
            self.stop_actors(actors)

        return Path(once, once, once, close)

    def overlap_path(self, spec: Overlap) -> tuple[Path, float]:
        from benchmarks.overlapping import TorchTensorWorker, install

        install(spec)
        senders = [self.spawn(TorchTensorWorker, spec, 1) for _ in range(spec.senders)]
        receiver = self.spawn(TorchTensorWorker, spec, 0)
        with conveyor.dag.InputNode() as given:
            made = [sender.send.bind(given) for sender in senders]
            sent = [node.with_tensor_transport("sim_ipc") for node in made]
            dag = conveyor.dag.MultiOutputNode([receiver.recv_and_matmul.bind(n) for n in sent])
        graph = dag.compile(overlap=spec.overlap)
        durations = {"send": 0.0, "recv_and_matmul": spec.kernel_ms / 1e3}
        sizes = {edge.source: spec.copy_ms / 1e3 for edge in graph.plan.edges if edge.out_of_band}
        simulated = graph.simulate(durations, sizes=sizes, bandwidth=1, depth=1).latency_p50

        def once(value: Any) -> Any:
            got = conveyor.get(graph.execute(value))
            if got != [value] * spec.senders:
                raise ValueError(f"{value} comes back as {got}")
            return got

        def close() -> None:
            graph.teardown()
            self.stop_actors([*senders, receiver])

        return Path(once, graph.execute, conveyor.get, close), simulated

    def reduced(self, nodes: list[Any]) -> list[Any]:
        if len(nodes) == 1:
            return nodes
        return list(collective.allreduce.bind(nodes, collective.ReduceOp.AVG))

    def empty(self, device: str, size: int) -> Any:
        if device == "torch":
            import torch

            return conveyor.empty_tensor((size,), torch.uint8)
        import numpy as np

        return conveyor.empty((size,), np.uint8)
