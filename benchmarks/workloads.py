"""The registry of workloads: every name that ``--only`` can select."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from benchmarks.measure.core import CALLS, VALUES, WAYS
from benchmarks.measure.growth import KINDS
from benchmarks.model import (
    PLACEMENTS,
    AllReduce,
    AsyncEcho,
    Core,
    Death,
    Device,
    Direct,
    EagerCall,
    Executor,
    Growth,
    Idle,
    ImportTime,
    InPlace,
    Latency,
    Lifecycle,
    Memory,
    Overlap,
    Placement,
    Start,
    Throughput,
    Tier,
    Topology,
    Transfer,
    Workload,
)

SYSTEMS = (
    "conveyor",
    "floor",
    "memcpy",
    "ray_cg",
    "ray_core",
    "ray_gloo",
    "ray_nixl",
    "pipe",
    "zmq",
    "handmade",
    "gloo",
    "nixl",
    "torchmp",
)
FREE_AND_PINNED: tuple[Placement, ...] = ("free", "pinned")

TOPOLOGIES = {
    "echo": Topology("chain", 1),
    "chain2": Topology("chain", 2),
    "chain4": Topology("chain", 4),
    "chain8": Topology("chain", 8),
    "fan2": Topology("fan", 2),
    "fan4": Topology("fan", 4),
    "fan8": Topology("fan", 8),
    "args8": Topology("args", 1, "first_of"),
}
HEADLINE = ("echo", "chain8", "fan8")
SIZES = {"1KB": 1 << 10, "64KB": 64 << 10, "1MB": 1 << 20, "16MB": 16 << 20, "64MB": 64 << 20}
DEVICES: tuple[Device, ...] = ("numpy", "torch")


def _tiers(own: Tier, peers: Tier, **others: Tier) -> dict[str, Tier]:
    """Conveyor and the floor from ``own`` on, every peer from ``peers`` on, but for ``others``."""
    tiers = dict.fromkeys(("ray_cg", "ray_core", "pipe", "zmq"), peers)
    return {"conveyor": own, "floor": own} | tiers | others


def _own(placements: tuple[Placement, ...]) -> dict[str, tuple[Placement, ...]]:
    """Conveyor and the floor are compared in the same placement, the peers run free."""
    return {"conveyor": placements, "floor": placements}


def _latency() -> Iterator[Workload]:
    for name, topology in TOPOLOGIES.items():
        headline = name in HEADLINE
        own: Tier = "quick" if headline else "default"
        rare: Tier = "default" if headline or name == "args8" else "full"
        yield Workload(
            f"{name}/hot",
            "latency",
            Latency(topology),
            name,
            _tiers(own, own, ray_core=rare),
            placements=_own(PLACEMENTS if name in ("echo", "args8") else FREE_AND_PINNED),
        )
        for pace in (1, 20, 100):
            requested = headline or pace == 20
            yield Workload(
                f"{name}/paced{pace}ms",
                "paced",
                Latency(topology, float(pace)),
                name,
                _tiers(
                    "quick" if headline and pace == 20 else "default",
                    "default" if requested else "full",
                    ray_core="default" if headline else "full",
                ),
            )
    for name, topology in (("echo", TOPOLOGIES["echo"]), ("chain3", Topology("chain", 3))):
        for count in (1, 4, 10):
            tier: Tier = "quick" if name == "echo" and count == 10 else "default"
            yield Workload(
                f"{name}/flight{count}",
                "throughput",
                Throughput(topology, count),
                name,
                _tiers(tier, tier, ray_core="default"),
                placements=_own(PLACEMENTS if name == "echo" else FREE_AND_PINNED),
            )


def _transfers() -> Iterator[Workload]:
    for device in DEVICES:
        for label, size in SIZES.items():
            for back in (False, True):
                quick = not back and label in ("1MB", "64MB")
                peers: Tier = (
                    "quick" if quick else "full" if back and label != "64MB" else "default"
                )
                tiers = _tiers("quick" if quick else "default", peers)
                tiers["memcpy"] = tiers["conveyor"]
                del tiers["floor"]
                way = "back" if back else "one-way"
                yield Workload(
                    f"{device}/{label}/{way}",
                    "payload",
                    Transfer(device, size, back),
                    f"{device}/{label}/{way}",
                    tiers,
                    limit_s=60.0,
                )
        for label in ("1KB", "64MB"):
            yield Workload(
                f"{device}/{label}/in-place",
                "in-place",
                InPlace(device, SIZES[label]),
                f"{device}/in-place",
                {"conveyor": "quick"},
            )


def _calls() -> Iterator[Workload]:
    yield Workload(
        "eager",
        "calls",
        EagerCall(),
        "eager",
        {"conveyor": "quick", "ray_core": "quick"},
        placements={"conveyor": FREE_AND_PINNED},
    )
    yield Workload(
        "asyncio",
        "calls",
        AsyncEcho(),
        "asyncio",
        {"conveyor": "quick", "ray_cg": "quick", "ray_core": "default"},
        placements={"conveyor": FREE_AND_PINNED},
    )


def _lifecycles() -> Iterator[Workload]:
    shapes = {"1": (1, 1), "4": (4, 4), "16": (16, 16), "2x50tasks": (2, 50)}
    for label, (actors, tasks) in shapes.items():
        tier: Tier = "quick" if label == "16" else "default"
        yield Workload(
            f"compile/{label}",
            "lifecycle",
            Lifecycle(actors, tasks),
            f"compile/{label}",
            {"conveyor": tier, "ray_cg": tier},
            limit_s=120.0,
        )
    for actors in (1, 10):
        yield Workload(
            f"start/{actors}",
            "start",
            Start(actors),
            f"start/{actors}",
            {"conveyor": "quick", "ray_core": "quick"},
            limit_s=90.0,
        )
    yield Workload(
        "start/2-torch",
        "start",
        Start(2, torch=True),
        "start/2-torch",
        {"conveyor": "default", "floor": "default", "ray_core": "default"},
        limit_s=90.0,
    )
    yield Workload(
        "import", "start", ImportTime(), "import", {"conveyor": "quick", "ray_core": "quick"}
    )


def _footprint() -> Iterator[Workload]:
    yield Workload("idle/8", "idle", Idle(8), "idle/8", {"conveyor": "quick", "ray_cg": "quick"})
    yield Workload(
        "memory/10", "memory", Memory(10), "memory", {"conveyor": "quick", "ray_core": "quick"}
    )
    yield Workload(
        "death/graph",
        "death",
        Death(),
        "death/graph",
        {"conveyor": "quick", "ray_cg": "quick", "pipe": "quick"},
        limit_s=60.0,
    )
    yield Workload(
        "death/call",
        "death",
        Death(eager=True),
        "death/call",
        {"conveyor": "quick", "ray_core": "quick"},
        limit_s=60.0,
    )
    yield Workload(
        "death/graph-1GiB",
        "death",
        Death(mebibytes=1024),
        "death/graph",
        {"conveyor": "default", "ray_cg": "full", "pipe": "default"},
        limit_s=60.0,
    )


def _executors() -> Iterator[Workload]:
    for stage_ms in (1, 5, 20):
        tier: Tier = "quick" if stage_ms == 1 else "default"
        yield Workload(
            f"executor/4x{stage_ms}ms",
            "executor",
            Executor(4, float(stage_ms)),
            f"executor/4x{stage_ms}ms",
            {"conveyor": tier, "handmade": tier, "ray_cg": tier},
            limit_s=90.0,
        )
    for stage_ms in (1, 5):
        yield Workload(
            f"executor/2x2x{stage_ms}ms",
            "executor",
            Executor(2, float(stage_ms), ranks=2),
            f"executor/2x2x{stage_ms}ms",
            dict.fromkeys(("conveyor", "handmade", "ray_cg"), "default"),
            limit_s=90.0,
        )


def _collectives() -> Iterator[Workload]:
    sizes = (
        ("8B", 8),
        ("4KB", 4 << 10),
        ("64KB", 64 << 10),
        ("1MB", 1 << 20),
        ("16MB", 16 << 20),
        ("64MB", 64 << 20),
    )
    tiers: dict[str, dict[str, Tier]] = {
        "": {"conveyor": "default", "gloo": "default"},
        "/bound": {"conveyor": "default"},
    }
    for ranks in (2, 4):
        for form, systems in tiers.items():
            for size_name, size in sizes:
                yield Workload(
                    f"allreduce{ranks}{form}/{size_name}",
                    "collectives",
                    AllReduce(ranks, size, bool(form)),
                    f"allreduce{ranks}{form}",
                    systems,
                    limit_s=60.0,
                )


def _overlaps() -> Iterator[Workload]:
    for label, on in (("without", False), ("with", True)):
        yield Workload(
            f"overlap/3x(20+30)ms/{label}",
            "overlap",
            Overlap(3, 20.0, 30.0, on),
            "overlap",
            {"conveyor": "default"},
            limit_s=60.0,
        )


def _directs() -> Iterator[Workload]:
    rays = ("ray_core", "ray_gloo", "ray_nixl")
    every = (*rays, "nixl", "gloo")
    shapes: list[tuple[str, Direct, tuple[str, ...], bool]] = [
        ("4KB/call", Direct("call", 4 << 10), every, True),
        ("4KB/again", Direct("again", 4 << 10), every, False),
        ("4KB/busy", Direct("busy", 4 << 10), (*rays, "nixl"), False),
        ("64KB/used", Direct("used", 64 << 10), (*every, "torchmp"), False),
        ("1MB/used", Direct("used", 1 << 20), (*every, "torchmp"), False),
        ("16MB/used", Direct("used", 16 << 20), (*every, "torchmp"), False),
        ("64MB/used", Direct("used", 64 << 20), (*every, "torchmp"), True),
        ("64MB/cold", Direct("cold", 64 << 20), (*rays, "torchmp"), False),
        ("64MB/4readers", Direct("used", 64 << 20, readers=4), rays, False),
        ("64MB/into", Direct("into", 64 << 20), ("ray_nixl", "nixl", "gloo"), False),
        ("10000x200KB/used", Direct("used", 200 << 10, count=10_000), every, False),
        ("4KB/in-place", Direct("in-place", 4 << 10), (), True),
        ("64MB/in-place", Direct("in-place", 64 << 20), (), True),
    ]
    for label, spec, peers, headline in shapes:
        tiers: dict[str, Tier] = dict.fromkeys(peers, "default" if headline else "full")
        tiers["conveyor"] = "quick" if headline else "default"
        if spec.use != "in-place" and spec.readers == 1:
            tiers["floor"] = tiers["conveyor"]
        yield Workload(
            f"direct/{label}",
            "direct",
            spec,
            f"direct/{label}",
            tiers,
            limit_s=240.0 if spec.count > 1 else 90.0,
        )


def _core() -> Iterator[Workload]:
    for what in CALLS:
        yield Workload(
            f"core/{what}",
            "core",
            Core(what),
            "core/calls",
            {"conveyor": "quick", "ray_core": "quick"},
        )
    for what in VALUES:
        for way in WAYS:
            tier: Tier = "default" if what == "bytes256MB" else "quick"
            peer: dict[str, Tier] = {"ray_cg": "default"} if way == "edge" else {"ray_core": tier}
            yield Workload(
                f"core/{what}/{way}",
                "core values",
                Core(what, way),
                "core/values",
                {"conveyor": tier} | peer,
                limit_s=90.0,
            )


def _growth() -> Iterator[Workload]:
    counts = {"actors": (2, 20, 64), "graphs": (1, 10, 100, 800)}
    for what in KINDS:
        yield Workload(
            f"growth/{what}",
            "growth",
            Growth(what, counts.get(what.split("/")[0], (10, 100, 1_000, 10_000))),
            "growth",
            {"conveyor": "quick"},
            limit_s=120.0,
        )


@cache
def workloads() -> dict[str, Workload]:
    """All workloads by name, in the order in which they run and are shown."""
    found: dict[str, Workload] = {}
    for source in (
        _latency,
        _transfers,
        _calls,
        _lifecycles,
        _footprint,
        _executors,
        _collectives,
        _overlaps,
        _directs,
        _core,
        _growth,
    ):
        for workload in source():
            assert workload.name not in found, workload.name
            found[workload.name] = workload
    return found
