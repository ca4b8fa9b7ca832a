"""The same calls as in ``test_cycles`` where everything is in one process."""

import pytest
import test_cycles
from test_cycles import LOOP, PLAIN, deadlocks, steps, threads

import conveyor

make = test_cycles.make
# Items of one's own generator are not found there.
WAYS = [way for way in test_cycles.WAYS if way != "items_of"]


@pytest.fixture(scope="module", autouse=True)
def inline(leaves_nothing):
    with leaves_nothing():
        conveyor.init(engine="inline")
        yield
        conveyor.shutdown()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", ["a", "ba", "bca"])
@pytest.mark.parametrize("kind", [PLAIN, LOOP], ids=["plain", "loop"])
def test_a_cycle_is_refused(make, kind, path, way):
    nodes = make(kind, PLAIN, PLAIN)
    deadlocks(getattr(nodes[0], way).remote(path), " waits for ")
    assert conveyor.get([n.ping.remote() for n in nodes], timeout=test_cycles.WAIT) == ["pong"] * 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", ["a", "ba", "bca"])
def test_with_threads_left_it_is_answered(make, path, way):
    nodes = make(threads(4), threads(4), threads(4))
    assert conveyor.get(getattr(nodes[0], way).remote(path), timeout=test_cycles.WAIT) == "pong"


@pytest.mark.parametrize("path", ["a", "aaa", "ba"])
def test_awaiting_is_answered(make, path):
    a, _ = make(LOOP, LOOP)
    assert conveyor.get(a.awaits.remote(path), timeout=test_cycles.WAIT) == "pong"


def test_blocking_an_event_loop_is_refused(make):
    a, _ = make(LOOP, PLAIN)
    deadlocks(a.blocks.remote("a"), " waits for ")
    deadlocks(a.blocks.remote("ba"), " waits for ")
    assert conveyor.get(a.ping.remote(), timeout=test_cycles.WAIT) == "pong"


@pytest.mark.parametrize("path", ["a", "ba"])
def test_a_step_of_a_graph(make, path):
    a, b = make(PLAIN, PLAIN)
    with steps(a) as graph:
        deadlocks(graph.execute(path), " waits for ")
        assert conveyor.get(graph.execute("b"), timeout=test_cycles.WAIT) == "pong"
    with steps(b, a) as graph:
        deadlocks(a.execute.remote(graph, ""), " waits for ")


def test_what_another_actor_has_made(make):
    a, b = make(test_cycles.GIVER, test_cycles.GIVER)
    deadlocks(a.get_what_is_lent.remote("b", "a"), " waits for ")
    deadlocks(a.as_argument.remote("a"), " waits for ")
    assert conveyor.get([a.ping.remote(), b.ping.remote()], timeout=test_cycles.WAIT)
