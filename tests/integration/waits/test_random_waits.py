"""Random plans of who waits for whom: every cycle is found, and nothing else is taken for one."""

import os
import subprocess
import sys

import pytest
from wait_plans import Do, Held, Plan, Pool, random_plan

pytestmark = pytest.mark.usefixtures("session")

SEEDS = range(180, 190)


@pytest.fixture(scope="module")
def pool(session):
    made = Pool()
    yield made
    made.close()


@pytest.fixture(scope="module")
def load():
    """Others want the processors, too."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    yield
    for other in others:
        other.kill()
        other.wait()


@pytest.mark.parametrize("seed", SEEDS)
def test_cycles_are_found_and_nothing_else(pool, load, seed, tmp_path):
    pool.run(random_plan(seed), tmp_path / "plan")


@pytest.fixture(scope="module")
def pool_that_comes_back(session):
    made = Pool(kills=True)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(1001, 1005))
def test_the_same_where_actors_are_killed(pool_that_comes_back, load, seed, tmp_path):
    pool_that_comes_back.run(random_plan(seed, kills=True), tmp_path / "plan")


def test_the_plans_are_of_all_kinds():
    plans = [random_plan(seed) for seed in SEEDS]
    assert 3 < sum(bool(plan.stuck) for plan in plans) < len(plans) - 3
    kinds = {do.kind for plan in plans for one in plan.held for do in one.does}
    assert kinds == {"call", "all", "some", "argument", "execute", "lent", "own", "stream"}
    assert {one.is_step for plan in plans for one in plan.held} == {True, False}


def test_what_is_said_of_a_plan_is_true():
    """The truth of plans that are small enough to be read."""
    a, b = (
        Held("a", False, (Do("call", ("b",), (0,)),)),
        Held("b", False, (Do("call", ("a",), (0,)),)),
    )
    c = Held("c", False, (Do("call", ("a",), (0,)),))
    d = Held("d", False, (Do("call", ("d",), (0,)),))
    any_of = Held("b", False, (Do("some", ("a", "k"), (0, 0), enough=1),))
    assert Plan(0, [a]).stuck == []
    assert Plan(0, [a, b]).stuck == [a, b]
    assert Plan(0, [a, b, c]).stuck == [a, b, c]
    assert Plan(0, [a, any_of, c]).stuck == []
    assert Plan(0, [d]).stuck == []
    assert Plan(0, [d, d]).stuck == [d, d]
