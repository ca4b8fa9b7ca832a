"""Tensors come while their actor computes: measured over a transport that takes its time, and simulated."""

from __future__ import annotations

import asyncio
import sys
import time

import cloudpickle
import pytest
from integration_helpers import measured

import conveyor
from conveyor import transport
from conveyor.dag import InputNode
from conveyor.exceptions import TaskError, TransportError
from conveyor.testing import FaultyTransport

torch = pytest.importorskip("torch")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.alone
PRELOAD = ["torch"]
DELAY, BUSY = 0.06, 0.08


@conveyor.remote
class Maker:
    def make(self, n):
        return torch.full((4,), float(n))

    def make_late(self, n):
        time.sleep(BUSY - DELAY)
        return self.make(n)

    def made(self, n):
        return n


@conveyor.remote
class Reader:
    def work(self, n):
        time.sleep(BUSY)
        return n

    async def work_async(self, n):
        await asyncio.sleep(BUSY)
        return n

    def join(self, n, tensor):
        return n + float(tensor.sum())


@pytest.fixture
def slow():
    """Registers a transport that takes its time, and fails when it is told."""
    names = []

    def register(**options):
        one = FaultyTransport("slow", delay=(DELAY, DELAY), **options)
        transport.register(one)
        names.append(one.name)
        return one.name

    yield register
    for name in names:
        transport.unregister(name)


def dag_over(name, make="make", work="work"):
    maker, reader = Maker.remote(), Reader.remote()
    with InputNode() as inp:
        tensor = getattr(maker, make).bind(inp).with_tensor_transport(name)
        return reader.join.bind(getattr(reader, work).bind(inp), tensor)


@pytest.mark.usefixtures("local")
@measured
def test_it_is_hidden_as_the_simulation_says(slow):
    maker, reader = Maker.remote(), Reader.remote()
    with InputNode() as inp:
        tensor = maker.make.bind(inp).with_tensor_transport(slow())
        # The maker has sent its tensor when the reader begins to work, however late the machine runs either.
        dag = reader.join.bind(reader.work.bind(maker.made.bind(inp)), tensor)
    took = {}
    for overlap in (False, True):
        with dag.compile(overlap=overlap, depth=1) as graph:
            times = []
            for n in range(5):
                begin = time.monotonic()
                assert conveyor.get(graph.execute(n)) == 5 * n
                times.append(time.monotonic() - begin)
            # A machine that has other work makes some of them longer, and none shorter.
            took[overlap] = min(times)
            # What waits for the tensors is counted, and what happens meanwhile is not.
            waits = [e.waits[0].waiting for e in graph.stats().edges if e.source == "Maker.make"]
            assert (waits[0].p50_s < DELAY / 2) == overlap
            made = graph.simulate(
                {"make": 0, "made": 0, "work": BUSY, "join": 0},
                # The delay is told as what copying a value takes.
                sizes={e.source: DELAY for e in graph.plan.edges if e.out_of_band},
                bandwidth=1,
                executions=5,
            )
            assert made.latency_p50 == pytest.approx(took[overlap], rel=0.2)
            other = graph.simulate(0.01, overlap=not overlap)
            assert other.plan.overlap is not overlap
    assert took[False] > DELAY + BUSY
    assert took[True] < took[False] - DELAY / 2


@pytest.mark.usefixtures("local")
@measured
def test_a_frame_that_comes_while_a_coroutine_runs_is_taken(slow):
    """To wait for it first would take as much longer as it comes late; not to look, as the transfer takes."""
    with dag_over(slow(), "make_late", "work_async").compile(overlap=True, depth=1) as graph:
        times = []
        for n in range(4):
            begin = time.monotonic()
            assert conveyor.get(graph.execute(n)) == 5 * n
            times.append(time.monotonic() - begin)
    assert min(times) < BUSY + (BUSY - DELAY)


@pytest.mark.usefixtures("local")
def test_what_fails_meanwhile_is_that_executions_error(slow):
    dag = dag_over(slow(receives=[1]))
    with dag.compile(overlap=True, fail_fast=False) as graph:
        refs = [graph.execute(n) for n in range(3)]
        assert conveyor.get(refs[0]) == 0
        with pytest.raises((TaskError, TransportError), match="slow"):
            conveyor.get(refs[1])
        assert conveyor.get(refs[2]) == 10


@pytest.fixture
def inline(leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine="inline")
        yield
        conveyor.shutdown()


@pytest.mark.usefixtures("inline")
def test_in_one_process_and_by_rays_name(slow):
    dag = dag_over(slow())
    with dag.experimental_compile(_overlap_gpu_communication=True) as graph:
        assert graph.config.overlap
        assert "ahead of" in graph.explain()
        assert conveyor.get([graph.execute(n) for n in range(3)]) == [0, 5, 10]
        early = [n for n in graph.visualize(None, format="ascii").splitlines() if "wait" in n]
        assert early
