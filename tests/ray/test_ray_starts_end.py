"""Starts that Ray has not placed end with the session."""

import sys
import threading

import cloudpickle
import pytest
import ray
from ray_nodes import WAIT

import conveyor
from conveyor.api import attach
from conveyor.exceptions import ActorStartError, SessionEndedError
from conveyor.runtime import context

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Waits:
    def run(self):
        return 1


def test_a_start_that_ray_has_not_placed_ends_with_the_session(
    two_nodes, leaves_nothing, wait_until
):
    raised = []

    def start():
        try:
            Waits.options(resources={"third": 1}).remote()
        except ActorStartError as error:
            raised.append(str(error))

    with leaves_nothing():
        conveyor.init()
        hosts = context.running()._hosts
        thread = threading.Thread(target=start, daemon=True)
        thread.start()
        wait_until(lambda: hosts._starts._under_way, WAIT)
        (end,) = hosts._starts._under_way.values()
        (pending,) = end.args
        wait_until(lambda: pending.ran is not None, WAIT)
        actor = pending.handle._actor_id.hex()
        conveyor.shutdown()
        thread.join(WAIT)
        assert not thread.is_alive()
        assert len(raised) == 1
        assert "the session has ended" in raised[0]
        # The program's connection to Ray stays, and nothing waits there.
        wait_until(lambda: ray._private.state.actors(actor)["State"] == "DEAD", WAIT)


@ray.remote(num_cpus=0, resources={"third": 1})
class Unplaced:
    def run(self):
        return 1


@pytest.mark.parametrize("described", [False, True])
def test_attaching_what_ray_has_not_placed_ends_with_the_session(
    two_nodes, leaves_nothing, wait_until, monkeypatch, described
):
    """Before it has said what it is, and (as one that is being started again) after that."""
    raised = []
    if described:
        monkeypatch.setattr(attach, "_described", lambda *_: {})
    actor = Unplaced.remote()

    def start():
        try:
            conveyor.attach(actor)
        except (ActorStartError, SessionEndedError) as error:
            raised.append(str(error))

    with leaves_nothing():
        conveyor.init()
        driver = context.running()
        thread = threading.Thread(target=start, daemon=True)
        thread.start()
        waiting = driver._hosts._starts._under_way if described else driver.table._waiting
        wait_until(lambda: waiting, WAIT)
        conveyor.shutdown()
        thread.join(WAIT)
        assert not thread.is_alive()
        assert len(raised) == 1
        assert "the session has ended" in raised[0]
    ray.kill(actor)
