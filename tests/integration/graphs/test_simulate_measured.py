"""What is simulated happens: graphs whose tasks sleep, measured and predicted."""

from __future__ import annotations

import json
import sys
import time
from collections import deque

import cloudpickle
import numpy as np
import pytest
from integration_helpers import measured

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import RuntimeStateError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.alone

#: For machines with fewer cores than processes, and other work.
NEAR = 0.2


@conveyor.remote
class Stage:
    def __init__(self, seconds):
        self.seconds = seconds

    def run(self, *values):
        time.sleep(self.seconds)
        return len(values)

    async def run_async(self, value):
        import asyncio

        await asyncio.sleep(self.seconds)
        return value

    def make(self, count):
        return np.zeros(count, np.uint8)

    def simulate(self, graph, *args):
        try:
            return graph.simulate(*args)
        except RuntimeStateError as error:
            return str(error)

    def compile_and_simulate(self, other):
        with InputNode() as inp, other.run.bind(inp).compile() as graph:
            return graph.simulate(0.01, executions=4).throughput


@pytest.fixture(scope="module")
def stages(session):
    made = {}

    def stage(number, seconds):
        key = number, seconds
        if key not in made:
            made[key] = Stage.remote(seconds)
        return made[key]

    return stage


def chain(stages, *seconds, method="run"):
    with InputNode() as inp:
        value = inp
        for number, one in enumerate(seconds):
            value = getattr(stages(number, one), method).bind(value)
    return value


def rate_and_latency(graph, count, depth):
    """Executions in a second, and their usual latency."""
    conveyor.get(graph.execute(0))  # the first one is slow
    before = graph.stats().latency.count
    begin = time.monotonic()
    refs = deque()
    for i in range(count):
        refs.append(graph.execute(i))
        if len(refs) == depth:
            conveyor.get(refs.popleft())
    while refs:
        conveyor.get(refs.popleft())
    rate = count / (time.monotonic() - begin)
    assert graph.stats().latency.count == before + count
    return rate, graph.stats().latency.p50_s


def predicted(graph, count, depth):
    made = graph.simulate(executions=count, depth=depth)
    return count / made.makespan, made.latency_p50


@measured
def check(dag, depth, count=16):
    with dag.compile(depth=depth) as graph:
        found = rate_and_latency(graph, count, depth)
        assert predicted(graph, count, depth) == pytest.approx(found, rel=NEAR)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("seconds", [(0.02, 0.02), (0.01, 0.03, 0.02), (0.02,) * 4])
def test_chains(stages, seconds, depth):
    check(chain(stages, *seconds), depth)


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_fan_out_and_fan_in(stages, depth):
    with InputNode() as inp:
        first = stages(0, 0.02).run.bind(inp)
        branches = [stages(1, 0.02), stages(1, 0.03), stages(2, 0.02)]
        dag = stages(3, 0.02).run.bind(*[branch.run.bind(first) for branch in branches])
    check(dag, depth)


def test_an_actor_that_is_used_twice(stages):
    with InputNode() as inp:
        there = stages(0, 0.02).run.bind(inp)
        dag = stages(0, 0.02).run.bind(stages(1, 0.02).run.bind(there))
    check(dag, 4)


def test_async_methods_hold_their_program(stages):
    check(chain(stages, 0.02, 0.02, method="run_async"), 4)


@measured
def test_sizes_and_times_are_those_of_the_counters(stages):
    one, other = stages(0, 0.01), stages(1, 0.02)
    with InputNode() as inp, other.run.bind(one.make.bind(inp)).compile(depth=2) as graph:
        with pytest.raises(RuntimeStateError, match=r"no times of .*\.make, .*\.run yet: execute"):
            graph.simulate()
        label = graph.plan.tasks[0].label
        assert graph.simulate(0.01).actors[0].sending == 0
        for _ in range(4):
            conveyor.get(graph.execute(8_000_000))
        made = graph.simulate(bandwidth=1e9, executions=3)
        sent = [s for s in made.timeline.spans if s.kind == "send" and s.label == label]
        assert sent[1].seconds == pytest.approx(0.008, rel=0.01)
        assert graph.simulate().actors[0].sending > 0  # with the bandwidth that was measured
        assert made.actors[1].computing == pytest.approx(0.7, abs=0.25)


def test_both_traces_name_the_same_things(stages, tmp_path):
    dag = chain(stages, 0.02, 0.02)
    with dag.compile(name="both") as graph:
        with graph.trace(tmp_path / "measured.json"):
            conveyor.get([graph.execute(i) for i in range(3)])
        graph.simulate(executions=3).trace(tmp_path / "simulated.json")

    def slices(name, *categories):
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        found = [e for e in events if e["ph"] == "X" and e["cat"] in categories]
        return sorted((e["cat"], e["name"], e["args"]["execution"]) for e in found)

    kinds = ("task", "send", "execute")
    wanted = [s for s in slices("measured.json", *kinds) if s[1] != "send input"]
    assert slices("simulated.json", *kinds) == wanted


@measured
def test_in_an_actor_and_over_a_handle(stages):
    one, other = stages(0, 0.02), stages(1, 0.02)
    assert conveyor.get(one.compile_and_simulate.remote(other)) == pytest.approx(99.9, rel=0.01)
    with InputNode() as inp, one.run.bind(inp).compile(name="mine") as graph:
        told = conveyor.get(other.simulate.remote(graph, 0.01))
        assert "mine" in told
        assert "simulated" in told


@measured
def test_a_graph_with_several_results(stages):
    with InputNode() as inp:
        value = stages(0, 0.02).run.bind(inp)
        dag = MultiOutputNode([value, stages(1, 0.03).run.bind(value)])
    with dag.compile(depth=2) as graph:
        for _ in range(6):
            conveyor.get(graph.execute(1))
        assert graph.simulate().latency_p50 == pytest.approx(graph.stats().latency.p50_s, rel=NEAR)
