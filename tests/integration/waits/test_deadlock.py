"""Actors that wait for each other in a circle, and those that only look like it."""

import os
import random
import sys
import threading
import time

import cloudpickle
import pytest
from integration_helpers import WAIT

import conveyor
from conveyor.exceptions import ConveyorError, DeadlockError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")


@conveyor.remote
class Node:
    """Calls along a path of handles: each gets what the next one returns."""

    def __init__(self):
        self.peers = {}

    def meet(self, **peers):
        self.peers.update(peers)

    def walk(self, path, pause=0.0):
        if pause:
            time.sleep(pause)
        if not path:
            return "end"
        return conveyor.get(self.peers[path[0]].walk.remote(path[1:], pause))

    def walk_with_wait(self, path):
        if not path:
            return "end"
        ref = self.peers[path[0]].walk_with_wait.remote(path[1:])
        conveyor.wait([ref])
        return conveyor.get(ref)

    def start(self, barrier, path):
        """Call the next one once every member of the circle is in its method."""
        open(f"{barrier}-{os.getpid()}", "w").close()
        folder, prefix = os.path.split(barrier)
        end = time.monotonic() + WAIT
        while sum(name.startswith(prefix) for name in os.listdir(folder)) < 2:
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.002)
        return conveyor.get(self.peers[path[0]].walk.remote(path[1:]))

    def pass_on(self, path):
        """Hands the reference on instead of getting it: no cycle."""
        return self.peers[path[0]].walk.remote(path[1:]) is not None

    def name(self):
        return "alive"


def circle(n, **options):
    names = [f"{'ABCDEFG'[i]}-{random.getrandbits(32):x}" for i in range(n)]
    nodes = [Node.options(name=name, **options).remote() for name in names]
    for node in nodes:
        node.meet.remote(**dict(zip("abcdefg", nodes, strict=False)))
    conveyor.get([node.name.remote() for node in nodes], timeout=WAIT)
    return names, nodes


@pytest.fixture
def made():
    nodes = []
    yield nodes
    for node in nodes:
        conveyor.kill(node)


def make(made, n, **options):
    names, nodes = circle(n, **options)
    made.extend(nodes)
    return names, nodes


@pytest.mark.parametrize("how", ["walk", "walk_with_wait"])
def test_two_actors(made, how):
    names, (a, b) = make(made, 2)
    with pytest.raises(DeadlockError) as caught:
        conveyor.get(getattr(a, how).remote("ba"), timeout=WAIT)
    for name in names:
        assert name in str(caught.value)
    assert set(caught.value.cycle) == set(names)
    assert isinstance(caught.value, ConveyorError)
    # Both go on.
    assert conveyor.get([a.name.remote(), b.name.remote()], timeout=WAIT) == ["alive"] * 2


def test_oneself(made):
    names, (a,) = make(made, 1)
    with pytest.raises(DeadlockError) as caught:
        conveyor.get(a.walk.remote("a"), timeout=WAIT)
    assert names[0] in str(caught.value)
    assert conveyor.get(a.name.remote(), timeout=WAIT) == "alive"


def test_three_actors(made):
    names, (a, b, c) = make(made, 3)
    with pytest.raises(DeadlockError) as caught:
        conveyor.get(a.walk.remote("bca"), timeout=WAIT)
    for name in names:
        assert name in str(caught.value)
    assert set(caught.value.cycle) == set(names)
    assert conveyor.get([x.name.remote() for x in (a, b, c)], timeout=WAIT) == ["alive"] * 3


def test_a_circle_behind_a_line(made):
    # The driver and `a` wait for a circle of b and c, and are not part of it.
    names, (a, b, c) = make(made, 3)
    with pytest.raises(DeadlockError) as caught:
        conveyor.get(a.walk.remote("bcb"), timeout=WAIT)
    assert set(caught.value.cycle) == set(names[1:])
    assert conveyor.get([x.name.remote() for x in (a, b, c)], timeout=WAIT) == ["alive"] * 3


def test_two_calls_that_cross(made, tmp_path):
    # Both start at the same time and call each other.
    _, (a, b) = make(made, 2)
    barrier = str(tmp_path / "here")
    refs = [a.start.remote(barrier, "b"), b.start.remote(barrier, "a")]
    outcomes = []
    for ref in refs:
        try:
            outcomes.append(conveyor.get(ref, timeout=WAIT))
        except DeadlockError:
            outcomes.append(DeadlockError)
    # At least one is told; the other may then be served.
    assert DeadlockError in outcomes
    assert conveyor.get([a.name.remote(), b.name.remote()], timeout=WAIT) == ["alive"] * 2


def test_with_max_concurrency_there_is_no_deadlock(made):
    _, (a, _) = make(made, 2, max_concurrency=4)
    assert conveyor.get(a.walk.remote("ba"), timeout=WAIT) == "end"


def test_async_actors_call_each_other_in_a_circle():
    class Async:
        async def meet(self, peer):
            self.peer = peer

        async def walk(self, n):
            return "end" if n == 0 else await self.peer.walk.remote(n - 1)

    a, b = (conveyor.remote(Async).remote() for _ in range(2))
    conveyor.get([a.meet.remote(b), b.meet.remote(a)], timeout=WAIT)
    assert conveyor.get(a.walk.remote(10), timeout=WAIT) == "end"


def test_passing_the_reference_on_is_no_deadlock(made):
    _, (a, _) = make(made, 2)
    assert conveyor.get(a.pass_on.remote("b"), timeout=WAIT) is True


def test_no_false_alarm_in_a_storm_of_nested_calls(made):
    # a calls b calls c, from many threads, with pauses that let everybody wait for everybody
    # legally (a < b < c < d in every path, so there never is a circle).
    _, (a, b, c, d) = make(made, 4)
    paths = [(a, "bcd"), (a, "cd"), (b, "cd"), (b, "d"), (c, "d"), (a, "d"), (d, ""), (a, "b")]
    failures = []

    def storm(seed):
        rng = random.Random(seed)
        try:
            for _ in range(60):
                start, path = rng.choice(paths)
                ref = start.walk.remote(path, rng.choice([0, 0, 0.0002]))
                assert conveyor.get(ref, timeout=60) == "end"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=storm, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures[0]


def test_no_false_alarm_where_the_circle_opens_by_itself(made):
    # b calls a while a is busy with a call of the driver's that ends: long waits, no circle.
    _, (a, b) = make(made, 2)
    refs = []
    for _ in range(20):
        refs += [a.walk.remote("", 0.005), b.walk.remote("a", 0.005)]
    assert conveyor.get(refs, timeout=60) == ["end"] * 40
