"""Values between two hosts over a network that delays, reorders and loses packets, and resets connections."""

import inside
import numpy as np
import pytest
from netns_actors import get, on
from weather_run import run
from wire import IN, OUT

import conveyor
from conveyor.dag import InputNode

pytestmark = pytest.mark.cold_start
#: Connections are not to be lost because the machine has other work.
TIMEOUT = 30
MEGABYTES = np.arange(1 << 18)
LARGE = np.arange(1 << 19)


def lost(cluster):
    return sum(cluster.wires[1].counts(way).lost for way in (IN, OUT))


def test_executions_while_connections_are_reset(cluster, session):
    """``python tests/netns`` does it for minutes."""
    with session(TIMEOUT):
        report = run(cluster, 6, 500, jitter=0.05, loss=0.01, reset=1.5, in_flight=64)
    print("\n".join(report.lines()))
    assert report.executions >= 500
    assert report.resets > 1
    assert report.connections > 1
    assert report.packets[1] > 0


def test_calls_and_streams(cluster, session):
    with session(TIMEOUT):
        near, far = on(0, 1), on(1, 10)
        before = lost(cluster)
        cluster.wires[1].set(jitter=0.02, loss=0.02)
        for _ in range(5):
            items = far.count.remote(50)
            refs = [far.note.remote(i) for i in range(64)]
            assert get(refs) == list(range(64))
            assert [int(item[0]) for item in items] == list(range(50))
        assert get(far.noted.remote()) == list(range(64)) * 5
        assert get(near.run.remote(far.run.remote(1))) == 12
        assert lost(cluster) > before


def test_large_values_in_both_directions(cluster, session):
    with session(TIMEOUT):
        far, near = on(1, 10), on(0, 1)
        with InputNode() as given:
            dag = near.run.bind(far.run.bind(given))
        with dag.compile(depth=4) as graph:
            before = lost(cluster)
            cluster.wires[1].set(jitter=0.005, loss=0.005)
            refs = [graph.execute(MEGABYTES + i) for i in range(3)]
            # A piece of a value that had come when a connection broke does not come again.
            assert cluster.reset_connections() == 1
            for i, ref in enumerate(refs):
                assert np.array_equal(get(ref), MEGABYTES + i + 11)
            assert lost(cluster) > before
        assert inside.pump().counts(1)[4] > 1


def test_the_last_result_of_an_actor_that_nobody_holds(cluster, session):
    """It ends as soon as it has answered, while its answer is still on its way."""
    with session(TIMEOUT):
        cluster.wires[1].set(jitter=0.02, loss=0.01)
        for reset in False, True:
            ref = on(1, 1).run.remote(LARGE)
            if reset:
                conveyor.wait([ref], timeout=0.5)
                cluster.reset_connections()
            assert np.array_equal(get(ref), LARGE + 1)
