"""The systems under test, by name. A system's packages are imported only when it is made."""

from __future__ import annotations

from importlib import import_module

from benchmarks.systems.base import System

_CLASSES = {
    "conveyor": ("conveyor", "ConveyorSystem"),
    "floor": ("floor", "FloorSystem"),
    "memcpy": ("memcpy", "MemcpySystem"),
    "ray_cg": ("ray_cg", "RayCompiledGraphSystem"),
    "ray_core": ("ray_core", "RayCoreSystem"),
    "pipe": ("pipe", "PipeSystem"),
    "zmq": ("zmq", "ZmqSystem"),
    "handmade": ("handmade", "HandmadeSystem"),
    "gloo": ("gloo", "GlooSystem"),
    "nixl": ("nixl", "NixlSystem"),
    "torchmp": ("torchmp", "TorchMultiprocessingSystem"),
    "ray_gloo": ("ray_direct", "RayGlooSystem"),
    "ray_nixl": ("ray_direct", "RayNixlSystem"),
}


def make(name: str) -> System:
    """The system ``name``; ``ImportError`` if its package is not there."""
    module, cls = _CLASSES[name]
    system: System = getattr(import_module(f"benchmarks.systems.{module}"), cls)()
    return system
