"""How each kind of workload is measured: one function for each class in ``model.Spec``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import model
from benchmarks.measure import (
    calls,
    collectives,
    core,
    death,
    direct,
    execution,
    executor,
    footprint,
    growth,
    lifecycle,
    overlap,
    transfer,
)
from benchmarks.measure.bench import Bench, Figures

_MEASURES: dict[type, Callable[[Bench, Any], Figures]] = {
    model.Latency: execution.latency,
    model.Throughput: execution.throughput,
    model.Transfer: transfer.transfer,
    model.InPlace: transfer.in_place,
    model.EagerCall: calls.eager,
    model.AsyncEcho: calls.async_echo,
    model.Lifecycle: lifecycle.compile_and_teardown,
    model.Start: lifecycle.start,
    model.ImportTime: lifecycle.import_time,
    model.Idle: footprint.idle,
    model.Memory: footprint.memory,
    model.Death: death.death,
    model.Executor: executor.executor,
    model.AllReduce: collectives.allreduce,
    model.Overlap: overlap.overlap,
    model.Direct: direct.direct,
    model.Core: core.core,
    model.Growth: growth.growth,
}


def measure(bench: Bench, spec: model.Spec) -> Figures:
    """The figures of one case; raises whatever went wrong."""
    return _MEASURES[type(spec)](bench, spec)
