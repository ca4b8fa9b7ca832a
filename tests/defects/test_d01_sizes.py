"""Sizes that a user gives."""

import gc
import sys

import cloudpickle
import numpy as np
import pytest
from defect_actors import WAIT

import conveyor
from conveyor import _core
from conveyor.dag import InputNode
from conveyor.graph.telemetry import EVENT_CAPACITY

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")

MB = 1 << 20


def channel_bytes():
    """The channel memory that this process maps; arenas are something else."""
    total = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:conveyor-segment" in line:
                start, _, end = line.split()[0].partition("-")
                total += int(end, 16) - int(start, 16)
    return total


@conveyor.remote
class Stage:
    def echo(self, x):
        return x

    def channel_bytes(self):
        return channel_bytes()


@pytest.fixture(scope="module")
def stages(session):
    return Stage.remote(), Stage.remote()


def chain(stages):
    with InputNode() as inp:
        node = inp
        for stage in stages:
            node = stage.echo.bind(node)
    return node


def test_d01_the_size_given_is_the_size_of_the_channels(stages):
    """Elsewhere the size of a channel's buffers can be given and is dropped on the way: every
    channel is made with the default of the process that writes to it. Here each channel of a graph
    must have as many slots of the given size as the graph is deep, whoever writes to it."""
    depth, edges = 8, 3  # driver, stage, stage, driver

    def sizes():
        gc.collect()
        return [
            channel_bytes(),
            *conveyor.get([s.channel_bytes.remote() for s in stages], timeout=WAIT),
        ]

    before = sizes()
    for slot_bytes in (256, 64 * 1024, MB):
        with chain(stages).compile(depth=depth, slot_bytes=slot_bytes) as graph:
            assert graph.config.slot_bytes == slot_bytes
            # Behind the rings are addresses for a trace of each of the three processes, without memory.
            least = edges * depth * slot_bytes + 3 * EVENT_CAPACITY * _core.EVENT_BYTES
            for now, then in zip(sizes(), before, strict=True):
                # And rings on which two actors tell of failures, as sparse.
                failures = 2 * depth * max(slot_bytes, 64 * 1024)
                assert least <= now - then <= least + edges * depth * 256 + failures + 128 * 1024
        del graph
        assert sizes() == before


@pytest.mark.parametrize("size", [1000, 10 * MB])
def test_d01_a_size_given_in_the_old_way_limits_no_value(stages, size):
    """Elsewhere a program cannot make room for its values, because the size it asks for is ignored.
    Here no value needs a size: what is far larger than any slot must pass every edge unchanged."""
    graph = chain(stages).experimental_compile(_buffer_size_bytes=size)
    array = np.arange(3 * MB // 8)
    for value in (b"x" * (5 * MB), {"k": ["y" * (2 * MB)]}, b"", None):
        assert conveyor.get(graph.execute(value), timeout=WAIT) == value
    assert np.array_equal(conveyor.get(graph.execute(array), timeout=WAIT), array)
    graph.teardown()
