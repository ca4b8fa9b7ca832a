"""Actors that wait for each other all the time, on a machine that is busy, and not in a cycle."""

import os
import random
import subprocess
import sys
import time

import pytest
import test_cycles
from test_cycles import GIVER, LOOP, PLAIN, WAIT, WAYS, steps

import conveyor

pytestmark = pytest.mark.usefixtures("session")
make = test_cycles.make


@pytest.fixture
def load():
    """Others want the processors, too."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    yield
    for other in others:
        other.kill()
        other.wait()


def test_no_false_alarm_under_load(make, load):
    # Each calls only those behind it, and they are few: they wait for each other all the time.
    nodes = make(GIVER, (test_cycles.Giver, {"max_concurrency": 3}), GIVER, LOOP, PLAIN)
    names = "abcde"
    seed = random.randrange(10**9)
    rng = random.Random(seed)

    def some_path(after):
        behind = names[after + 1 :]
        return "".join(sorted(rng.sample(behind, rng.randint(1, len(behind)))))

    def one():
        first = rng.randrange(2)
        way = rng.choice([*WAYS, "as_argument", "get_what_is_lent"])
        if way == "as_argument":
            return nodes[0].as_argument.remote(some_path(0))
        if way == "get_what_is_lent":
            return nodes[first].get_what_is_lent.remote("c", some_path(2))
        return getattr(nodes[first], way).remote(some_path(first))

    with steps(*nodes[:4]) as graph:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            refs = [one() for _ in range(20)]
            refs += [graph.execute(some_path(3)) for _ in range(5)]
            assert conveyor.get(refs, timeout=WAIT) == ["pong"] * 25, seed
