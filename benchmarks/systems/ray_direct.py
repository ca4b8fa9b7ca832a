"""Ray Direct Transport: values that stay with the actor that made them, fetched over gloo or NIXL."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from ray.experimental.collective import create_collective_group

from benchmarks.systems.ray_cluster import ray
from benchmarks.systems.ray_core import RayCoreSystem


class _RayDirect(RayCoreSystem):
    #: Imported first: nobody finds out in the middle of a case that it is not there.
    needs: ClassVar[str]

    def __init__(self) -> None:
        importlib.import_module(self.needs)

    def spawn_staying(self, cls: type, *args: Any) -> Any:
        # Readers, too: without it nothing ever comes to them.
        staying = ray.remote(enable_tensor_transport=True)(cls)
        return staying.options(num_cpus=0).remote(*args)


class RayGlooSystem(_RayDirect):
    name = "ray_gloo"
    needs = "torch"
    transport = "gloo"

    def meet(self, actors: list[Any]) -> None:
        create_collective_group(actors, backend="torch_gloo")


class RayNixlSystem(_RayDirect):
    name = "ray_nixl"
    needs = "nixl"
    transport = "nixl"

    def get_into(self, ref: Any, target: Any) -> None:
        ray.experimental.set_target_for_ref(ref, [target])
        ray.get(ref)
