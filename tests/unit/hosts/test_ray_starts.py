"""Starts of actors that Ctrl-C breaks off hold up nobody."""

from types import SimpleNamespace

import pytest
from interrupted import goes_on, interrupted_when_entered

from conveyor.engines.ray import hosts
from conveyor.engines.ray.hosts import Starts
from conveyor.runtime.events import EventLoop


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


def test_what_an_actor_waits_for_is_told():
    ray = SimpleNamespace(available_resources=lambda: {"CPU": 4})
    said = hosts.still_waits(ray, {"num_cpus": 8, "placement_group": "pg"})
    assert "it wants num_cpus=8, where 'pg' says, and available are {'CPU': 4}" in said
    assert "raylet.out" in said
