"""Simulations are of the Plan: on either engine they say what processes would do."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
from nodes_apart import APART

import conveyor
from conveyor.dag import InputNode

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Echo:
    def echo(self, x):
        return x


@pytest.mark.usefixtures("engine")
def test_simulate():
    one, other = Echo.remote(), Echo.remote()
    with InputNode() as inp, other.echo.bind(one.echo.bind(inp)).compile(depth=8) as graph:
        conveyor.get(graph.execute(1))
        made = graph.simulate(0.01, latency=0)
        assert made.throughput == pytest.approx(100)
        assert made.plan.depth == made.depth == 8
        assert graph.simulate().executions == 64
        assert graph.simulate({"echo": 0.02}, depth=1, executions=5).latency_max < 0.041
    # What was counted can be read after the end, and so this as well. What actors on other nodes have counted
    # went with the graph (docs/limits.md).
    if not APART:
        assert graph.simulate().throughput > 0
