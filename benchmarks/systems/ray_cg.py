"""Ray Compiled Graph."""

from __future__ import annotations

from typing import Any

from benchmarks.systems.actors import GraphSystem
from benchmarks.systems.ray_cluster import RayCluster


class RayCompiledGraphSystem(RayCluster, GraphSystem):
    name = "ray_cg"
    main_threads_work = False

    def compile(self, bound: Any, asyncio: bool = False) -> Any:
        return bound.experimental_compile(enable_asyncio=asyncio)
