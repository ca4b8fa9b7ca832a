"""The targets that Conveyor set itself, evaluated over a run: met, or missed by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.model import PLACEMENTS, Placement
from benchmarks.results import Results
from benchmarks.units import show

OURS = "conveyor"

Point = tuple[str, str, str, Placement]
"""Workload, system, figure, placement."""


@dataclass(frozen=True)
class Bar:
    """``ours`` has to be at most (or at least) ``limit`` of what ``reference`` measured.

    applies: of the reference's own figures; a bar that does not apply is left out.
    """

    text: str
    ours: Point
    limit: Callable[[float], float]
    reference: Point | None = None
    at_least: bool = False
    applies: Callable[[Results], bool] = lambda _: True


@dataclass(frozen=True)
class Verdict:
    """How a bar came out. ``factor``: measured / limit, or its inverse for a bar of at least."""

    text: str
    state: str
    measured: str = ""
    limit: str = ""
    reference: str = ""
    factor: float | None = None


def _point(workload: str, figure: str, system: str = OURS, placement: Placement = "free") -> Point:
    return workload, system, figure, placement


def _against_floor() -> Iterator[Bar]:
    for place in PLACEMENTS:
        yield Bar(
            f"echo, {place}: at most the floor + 2 us",
            _point("echo/hot", "p50_us", placement=place),
            lambda floor: floor + 2.0,
            _point("echo/hot", "p50_us", "floor", place),
        )
        for shape in ("chain8", "fan8"):
            yield Bar(
                f"{shape}, {place}: within 2x of the floor (wanted: 1.5x)",
                _point(f"{shape}/hot", "p50_us", placement=place),
                lambda floor: 2.0 * floor,
                _point(f"{shape}/hot", "p50_us", "floor", place),
            )
    for shape in ("echo", "chain8"):
        for pace in (1, 20, 100):
            yield Bar(
                f"{shape}, {pace} ms between executions: within 1.5x of the floor",
                _point(f"{shape}/paced{pace}ms", "p50_us"),
                lambda floor: 1.5 * floor,
                _point(f"{shape}/paced{pace}ms", "p50_us", "floor"),
            )


def _tails() -> Iterator[Bar]:
    for shape in ("echo", "chain8", "fan8"):
        for place in PLACEMENTS:
            yield Bar(
                f"{shape}, {place}: p99 at most 3x p50, where the floor's is",
                _point(f"{shape}/hot", "p99_us", placement=place),
                lambda p50: 3.0 * p50,
                _point(f"{shape}/hot", "p50_us", placement=place),
                applies=_floor_has_no_tail(f"{shape}/hot", place),
            )


def _floor_has_no_tail(workload: str, place: Placement) -> Callable[[Results], bool]:
    def applies(results: Results) -> bool:
        p50 = results.figure(workload, "floor", "p50_us", place)
        p99 = results.figure(workload, "floor", "p99_us", place)
        return p50 is not None and p99 is not None and p99 <= 3 * p50

    return applies


def _against_ray() -> Iterator[Bar]:
    for name, figure, peer, factor in (
        ("chain8/hot", "p50_us", "ray_cg", 15),
        ("fan8/hot", "p50_us", "ray_cg", 20),
        ("eager", "p50_us", "ray_core", 40),
        ("asyncio", "p50_us", "ray_cg", 10),
    ):
        yield Bar(
            f"{name.removesuffix('/hot')}: at most 1/{factor} of {peer}",
            _point(name, figure),
            lambda theirs, factor=factor: theirs / factor,  # type: ignore[misc]
            _point(name, figure, peer),
        )
    yield Bar(
        "executions/s, 10 in flight on 1 actor: at least 10x ray_cg",
        _point("echo/flight10", "per_s"),
        lambda theirs: 10 * theirs,
        _point("echo/flight10", "per_s", "ray_cg"),
        at_least=True,
    )


def _payloads() -> Iterator[Bar]:
    for device in ("numpy", "torch"):
        yield Bar(
            f"64 MB one way, {device}, warm: at most 1.3x one memcpy plus the reader's sweep",
            _point(f"{device}/64MB/one-way", "p50_us"),
            lambda floor: 1.3 * floor,
            _point(f"{device}/64MB/one-way", "p50_us", "memcpy"),
        )
        yield Bar(
            f"made in place, {device}: 64 MB costs what 1 KB costs (read as: 1.25x at most)",
            _point(f"{device}/64MB/in-place", "p50_us"),
            lambda small: 1.25 * small,
            _point(f"{device}/1KB/in-place", "p50_us"),
        )


def _fixed() -> Iterator[Bar]:
    for text, workload, figure, limit in (
        ("idle, graph of 8 actors: below 1 % of a core", "idle/8", "idle_percent", 1.0),
        ("compile + first execution, 16 actors: under 60 ms", "compile/16", "compile_ms", 60.0),
        ("teardown, 16 actors: under 50 ms", "compile/16", "teardown_ms", 50.0),
        ("first actor: under 0.5 s", "start/1", "start_ms", 500.0),
        ("ten actors: under 1 s", "start/10", "start_ms", 1000.0),
        ("import: under 0.15 s", "import", "import_ms", 150.0),
        ("memory per bare actor: under 20 MiB PSS", "memory/10", "pss_mib", 20.0),
        ("SIGKILL to the exception, graph: within 100 ms", "death/graph", "death_ms", 100.0),
        ("SIGKILL to the exception, call: within 100 ms", "death/call", "death_ms", 100.0),
        ("SIGKILL, 1 GiB resident: within 100 ms", "death/graph-1GiB", "death_ms", 100.0),
    ):
        yield Bar(text, _point(workload, figure), lambda _, limit=limit: limit)  # type: ignore[misc]
    yield Bar(
        "two actors that import torch: no worse than the import itself (read as: 1.1x at most)",
        _point("start/2-torch", "start_ms"),
        lambda floor: 1.1 * floor,
        _point("start/2-torch", "start_ms", "floor"),
    )


def _executors() -> Iterator[Bar]:
    for stage_ms, share in ((5, 0.98), (1, 0.95)):
        ideal = 1e3 / stage_ms
        yield Bar(
            f"executor, 4 stages of {stage_ms} ms: at least {100 * share:.0f} % of the ideal throughput",
            _point(f"executor/4x{stage_ms}ms", "per_s"),
            lambda _, least=share * ideal: least,  # type: ignore[misc]
            at_least=True,
        )
    for stage_ms, factor in ((1, 1.1), (5, 1.0), (20, 1.0)):
        yield Bar(
            f"executor, 4 stages of {stage_ms} ms: at least {factor:g}x the hand-made one",
            _point(f"executor/4x{stage_ms}ms", "per_s"),
            lambda theirs, factor=factor: factor * theirs,  # type: ignore[misc]
            _point(f"executor/4x{stage_ms}ms", "per_s", "handmade"),
            at_least=True,
        )


def _directs() -> Iterator[Bar]:
    def against(
        text: str,
        workload: str,
        factor: float,
        system: str,
        other: str = "",
        figure: str = "p50_us",
    ) -> Bar:
        return Bar(
            f"{text}: at most {factor:g}x {system if system != OURS else 'that'}",
            _point(f"direct/{workload}", figure),
            lambda theirs: factor * theirs,
            _point(f"direct/{other or workload}", figure, system),
        )

    yield Bar(
        "4 KB tensor, call, ref and fetch: at most the floor's copy + 15 us",
        _point("direct/4KB/call", "p50_us"),
        lambda floor: floor + 15.0,
        _point("direct/4KB/call", "p50_us", "floor"),
    )
    yield against(
        "fetch while the maker computes, beside one that waits", "4KB/busy", 2, OURS, "4KB/again"
    )
    used = "64MB/used"
    for system, factor in (
        ("floor", 1.2),
        ("nixl", 0.45),
        ("gloo", 0.6),
        ("ray_gloo", 0.25),
        ("ray_core", 0.125),
    ):
        yield against("64 MB tensor, fetched and read once", used, factor, system)
    yield against("64 MB into a tensor that is there", "64MB/into", 1.2, "floor", figure="had_us")
    yield against(
        "64 MB into memory nobody has used, beside used memory", "64MB/cold", 2, OURS, used
    )
    many = "10000x200KB/used"
    for system, factor in (("floor", 1.25), ("nixl", 0.45), ("ray_nixl", 0.1)):
        yield against("10,000 tensors of 200 KB in one value", many, factor, system)
    yield against(
        "64 MB to 4 readers, the maker's processor time, beside that of one copy",
        "64MB/4readers",
        1,
        "floor",
        used,
        "maker_cpu_us",
    )
    for size in ("4KB", "64MB"):
        yield Bar(
            f"{size} made in place: at most 20 us",
            _point(f"direct/{size}/in-place", "p50_us"),
            lambda _: 20.0,
        )


def bars() -> list[Bar]:
    return [
        *_against_floor(),
        *_tails(),
        *_against_ray(),
        *_payloads(),
        *_fixed(),
        *_executors(),
        *_directs(),
    ]


def compared() -> set[tuple[str, str]]:
    """Workload and system of every case that some bar looks at."""
    points = [point for bar in bars() for point in (bar.ours, bar.reference) if point is not None]
    return {(workload, system) for workload, system, _, _ in points}


def _value(results: Results, point: Point) -> float | None:
    workload, system, figure, placement = point
    return results.figure(workload, system, figure, placement)


def _judge(results: Results, bar: Bar) -> Verdict | None:
    ours = _value(results, bar.ours)
    if ours is None:
        row = results.row(bar.ours[0], OURS, bar.ours[3])
        if row is None or row.status == "unavailable":
            return None
        return Verdict(bar.text, "missed", measured=f"{row.status}: {row.reason}")
    if not bar.applies(results):
        return None
    theirs = 0.0
    reference = ""
    if bar.reference is not None:
        found = _value(results, bar.reference)
        if found is None:
            return Verdict(bar.text, "nothing to compare with", show(ours, bar.ours[2]))
        theirs = found
        reference = show(theirs, bar.reference[2])
    limit = bar.limit(theirs)
    factor = limit / ours if bar.at_least else ours / limit
    return Verdict(
        bar.text,
        "met" if factor <= 1.0 else f"missed by {factor:.2f}x",
        show(ours, bar.ours[2]),
        show(limit, bar.ours[2]),
        reference,
        factor,
    )


def evaluate(results: Results) -> list[Verdict]:
    """The bars that this run measured."""
    return [verdict for bar in bars() if (verdict := _judge(results, bar)) is not None]
