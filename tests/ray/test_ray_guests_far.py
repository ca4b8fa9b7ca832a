"""Actors of a Ray program on nodes that share no memory take part, by way of their node's agent."""

import os
import signal

import inside
import pytest
import ray
from ray_guests_helpers import Ours, Stage, is_killed_and_leaves, nothing_left, until_it_raises
from ray_nodes import HERE, THERE, TIMEOUT, WAIT, get

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError


def begin():
    conveyor.init(engine="ray", shared_memory="node", node_timeout=TIMEOUT)


@pytest.fixture(scope="module")
def apart(two_nodes):
    """One on the driver's node, and one on another."""
    return Stage.options(**HERE).remote(), Stage.options(**THERE).remote()


@pytest.fixture(scope="module")
def far(two_nodes, leaves_nothing):
    with leaves_nothing():
        begin()
        yield
        conveyor.shutdown()


@pytest.fixture
def stage(two_nodes):
    made = Stage.options(**THERE).remote()
    yield made
    ray.kill(made)


def agent():
    (host,) = [host for host in inside.agents() if not host.lost]
    return host.agent


def test_they_take_part_and_go_on_when_the_session_has_ended(apart, leaves_nothing, wait_until):
    pids = ray.get([stage.pid.remote() for stage in apart])
    with leaves_nothing():
        for _ in range(2):
            begin()
            here, there = map(conveyor.attach, apart)
            assert conveyor.attach(apart[1]) == there
            out_of_band = Ours.options(**THERE).remote()
            with InputNode() as inp:
                dag = here.add.bind(out_of_band.add.bind(there.add.bind(inp), y=10), y=100)
            with dag.compile() as graph:
                for i in range(50):
                    ref = graph.execute(i)
                    assert ray.get(apart[1].add.remote(i)) == i + 1
                    assert get(ref) == i + 111
            assert get(there.both.remote(1)) == [1, 2]
            assert list(there.items.remote(3)) == [0, 1, 2]
            assert get(out_of_band.ask.remote(there)) == get(there.ask.remote(here)) == 2
            assert get(here.ask.remote(there)) == 2
            with pytest.raises(TypeError, match="can only concatenate str"):
                get(there.add.remote("text"))
            conveyor.shutdown()
            assert ray.get([stage.add.remote(1) for stage in apart]) == [2, 2]
            nothing_left(wait_until, *apart)
    assert ray.get([stage.pid.remote() for stage in apart]) == pids


def test_one_at_work_holds_up_no_end_of_a_session(leaves_nothing, stage, latches, wait_until):
    started, go = latches(), latches()
    with leaves_nothing():
        conveyor.init(engine="ray", shared_memory="node", node_timeout=TIMEOUT, grace_seconds=0.1)
        ref = conveyor.attach(stage).hold.remote(started.path, go.path, wait_until)
        wait_until(lambda: started.is_open, WAIT)
        conveyor.shutdown()
        del ref
    go.open()
    nothing_left(wait_until, stage)
    assert ray.get(stage.list.remote()) == ["hold", "held"]


def test_one_that_is_killed_leaves(far, stage, wait_until):
    is_killed_and_leaves(stage, wait_until)


def test_its_death(far, stage):
    attached, other = conveyor.attach(stage), Ours.options(**THERE).remote()
    with InputNode() as inp:
        graph = other.add.bind(attached.add.bind(inp)).compile()
    os.kill(get(attached.pid.remote()), signal.SIGKILL)
    with pytest.raises(ActorDiedError, match=r"Plain.*(SIGKILL|how cannot be known)"):
        until_it_raises(lambda: get(graph.execute(1)))
    graph.teardown()
    assert get(other.add.remote(1)) == 2


def test_left_by_sys_exit(far, two_nodes):
    attached = conveyor.attach(Stage.options(**THERE).remote())
    with pytest.raises(ActorDiedError, match=r"left by sys\.exit: it exited with code 3"):
        get(attached.leave.remote())


def test_it_outlives_its_nodes_agent(far, stage, wait_until):
    attached = conveyor.attach(stage)
    assert get(attached.add.remote(1)) == 2
    os.kill(ray.get(agent().__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
    with pytest.raises(ActorDiedError, match="was lost with its node"):
        until_it_raises(lambda: get(attached.add.remote(1)))
    nothing_left(wait_until, stage)
    assert ray.get(stage.add.remote(1)) == 2
    assert get(conveyor.attach(stage).add.remote(1)) == 2
