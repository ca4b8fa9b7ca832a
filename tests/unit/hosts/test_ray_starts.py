"""Starts of actors that Ctrl-C breaks off hold up nobody."""

from types import SimpleNamespace

import pytest
from interrupted import goes_on, interrupted_when_entered

from conveyor.engine.events import EventLoop
from conveyor.engine.ray import ray_hosts
from conveyor.engine.ray.starts import Starts


@pytest.mark.parametrize("of", ["under_way", "asking"])
def test_a_session_ends_behind_a_start_that_was_broken_off(of):
    starts, events = Starts(), EventLoop("starts-test")
    begun = starts.under_way(1, lambda: None) if of == "under_way" else starts.asking("start it")
    try:
        with interrupted_when_entered(), begun:
            pass
    except KeyboardInterrupt:
        pass
    assert goes_on(lambda: starts.close(events))
    events.close()


FREE = {"CPU": 4.0, "GPU": 1.0, "memory": 1e9, "disk": 2.0}


@pytest.mark.parametrize(
    ("asked", "nodes", "free"),
    [
        ({}, [{}], True),
        ({"num_cpus": 2, "resources": {"disk": 2}}, [{}, FREE], True),
        ({"num_cpus": 0, "num_gpus": None, "memory": 1e8}, [FREE], True),
        ({"num_cpus": 5}, [FREE, FREE], False),  # one node has to have it all
        ({"num_gpus": 1, "resources": {"tape": 0.1}}, [FREE], False),
        ({"accelerator_type": "H100"}, [FREE], False),
        ({"scheduling_strategy": "SPREAD"}, [FREE], False),
        ({}, [], False),
    ],
)
def test_what_is_free(asked, nodes, free):
    assert ray_hosts.is_free(asked, nodes) is free


@pytest.mark.parametrize(
    ("wants", "told"),
    [
        ({"num_cpus": 1}, "all that it wants is free (num_cpus=1), so Ray makes its environment"),
        ({"num_cpus": 8}, "Ray has to place it, and it wants num_cpus=8; available are {'CPU': 4}"),
    ],
)
def test_ray_is_said_to_place_only_what_it_has_to_place(wants, told):
    node = SimpleNamespace(get_logs_dir_path=lambda: "/tmp/ray/logs")
    state = SimpleNamespace(available_resources_per_node=lambda: {"a": FREE})
    private = SimpleNamespace(
        state=state, worker=SimpleNamespace(global_worker=SimpleNamespace(node=node))
    )
    ray = SimpleNamespace(_private=private, available_resources=lambda: {"CPU": 4})
    said = ray_hosts.still_waits(ray, wants)
    assert told in said
    assert ("/tmp/ray/logs, raylet.out" in said) is ("free" in told)
