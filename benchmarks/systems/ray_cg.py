"""Ray Compiled Graph."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from benchmarks.model import Executor
from benchmarks.systems.actors import GraphSystem
from benchmarks.systems.ray_cluster import RayCluster


class RayCompiledGraphSystem(RayCluster, GraphSystem):
    name = "ray_cg"
    main_threads_work = False

    def join(self, actors: list[Any], spec: Executor) -> None:
        # Ray's collectives inside of a graph need GPUs: the workers reduce over gloo.
        meeting = os.path.join(tempfile.mkdtemp(), "meeting")
        self.api.get(
            [
                actor.join.remote(meeting, place, spec.stages, spec.ranks)
                for place, actor in enumerate(actors)
            ]
        )

    def picked(self, workers: list[Any], nodes: list[Any]) -> Any:
        # Ray wants every result used, and computes what it is told to.
        picked = [worker.pick.bind(node) for worker, node in zip(workers, nodes, strict=True)]
        return self.api.dag.MultiOutputNode(picked)

    def compile(self, bound: Any, asyncio: bool = False) -> Any:
        return bound.experimental_compile(enable_asyncio=asyncio)
