"""Ray Core: plain actor calls, refs passed from call to call."""

from __future__ import annotations

from typing import Any

from benchmarks.model import ARGUMENTS, Topology
from benchmarks.systems.actors import ActorSystem
from benchmarks.systems.base import AsyncPath, Path
from benchmarks.systems.ray_cluster import RayCluster


class RayCoreSystem(RayCluster, ActorSystem):
    name = "ray_core"

    def path(self, topology: Topology) -> Path:
        actors, pids = self.start_actors(topology.size)
        get = self.api.get
        calls = [getattr(actor, topology.method).remote for actor in actors]

        def submit(value: Any) -> Any:
            if topology.kind == "fan":
                return [call(value) for call in calls]
            if topology.kind == "args":
                return calls[0](*((value,) * ARGUMENTS))
            for task in range(topology.hops):
                value = calls[task % len(calls)](value)
            return value

        def once(value: Any) -> Any:
            return get(submit(value))

        return Path(once, submit, get, lambda: self.stop_actors(actors), pids)

    async def async_path(self) -> AsyncPath:
        actors, _ = self.start_actors(1)
        call = actors[0].echo.remote

        async def once(value: Any) -> Any:
            return await call(value)

        return AsyncPath(once, lambda: self.stop_actors(actors))
