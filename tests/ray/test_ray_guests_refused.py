"""Actors and graphs of Ray's that cannot take part in a session, and why."""

import os
import re
import sys

import cloudpickle
import pytest
import ray
from ray.dag import InputNode as RaysInput
from ray_guests_helpers import Ours, Plain, Stage, nothing_left, until_it_raises
from ray_nodes import WAIT, get

import conveyor
from conveyor.engines.ray import attached
from conveyor.exceptions import ActorDiedError, ActorStartError, RuntimeStateError
from conveyor.worker import worker

for pickler in cloudpickle, ray.cloudpickle:
    pickler.register_pickle_by_value(sys.modules[__name__])


class Async(Plain):
    async def later(self):
        pass


class Without(Plain):
    def __init__(self):
        sys.modules["conveyor.engines.ray.bootstrap"] = None


class Other(Plain):
    def __init__(self):
        conveyor.engines.ray.bootstrap.version = lambda: "Conveyor 0.0 on Python 2"


class Own(Plain):
    def __init__(self):
        conveyor.init(engine="inline")


@pytest.mark.parametrize(
    ("cls", "kind", "text"),
    [
        (Async, NotImplementedError, "async methods"),
        (Without, RuntimeStateError, "cannot import this version of conveyor"),
        (Other, RuntimeStateError, r"has Conveyor 0\.0 on Python 2, and the driver has Conveyor"),
        (Own, ActorStartError, "has started a session of its own"),
    ],
)
def test_one_whose_process_cannot_take_part(rt, two_nodes, cls, kind, text):
    stage = ray.remote(num_cpus=0)(cls).remote()
    with pytest.raises(kind, match=text):
        conveyor.attach(stage)
    ray.kill(stage)


class Stumbles(Plain):
    """Its process cannot take part, once it has been given all that it needs for that."""

    def stumble(self, at):
        def fails(*_):
            raise RuntimeError("by the test")

        owner = attached if at == "after_version" else worker
        setattr(owner, at, fails)

    def open(self):
        return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("at", ["after_version", "WorkerState"])
def test_one_that_fails_on_its_way_has_no_descriptor_more(rt, two_nodes, wait_until, at):
    stage = ray.remote(num_cpus=0)(Stumbles).remote()
    ray.get(stage.stumble.remote(at))
    with pytest.raises(ActorDiedError):
        get(conveyor.attach(stage).pid.remote())
    nothing_left(wait_until, stage)
    before = ray.get(stage.open.remote())
    for _ in range(3):
        with pytest.raises(ActorDiedError):
            get(conveyor.attach(stage).pid.remote())
        nothing_left(wait_until, stage)
    wait_until(lambda: ray.get(stage.open.remote()) <= before + 8, WAIT)  # Ray has some of its own
    ray.kill(stage)


def test_one_that_is_dead(rt, two_nodes):
    stage = Stage.remote()
    ray.get(stage.pid.remote())
    ray.kill(stage)
    with pytest.raises(ActorDiedError, match="Plain of Ray is dead"):
        until_it_raises(lambda: conveyor.attach(stage))


def test_one_of_another_cluster(rt, stage, monkeypatch):
    monkeypatch.setattr(stage, "_ray_cluster_and_job", (None, None))
    with pytest.raises(RuntimeStateError, match="another cluster"):
        conveyor.attach(stage)


def test_what_is_no_actor(rt):
    with pytest.raises(TypeError, match="not int"):
        conveyor.attach(3)
    with pytest.raises(RuntimeStateError, match=re.escape('init(engine="ray")')):
        get(Ours.remote().__ray_call__.remote(lambda self: conveyor.attach(3)))


def test_a_session_that_is_not_on_ray(stages):
    conveyor.init(engine="inline")
    with pytest.raises(RuntimeStateError, match=re.escape('init(engine="ray")')):
        conveyor.attach(stages[0])
    conveyor.shutdown()


def test_a_graph_of_rays_that_has_no_counterpart(rt, stages):
    function = ray.remote(lambda x: x)
    with RaysInput() as inp:
        dag = stages[0].add.bind(function.bind(inp))
    with pytest.raises(NotImplementedError, match="FunctionNode"):
        conveyor.attach(dag)
    with RaysInput() as inp:
        dag = Stage.bind().add.bind(inp)
    with pytest.raises(NotImplementedError, match="not started"):
        conveyor.attach(dag)
