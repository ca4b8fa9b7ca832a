"""Starts that Ray has not placed end with the session."""

import sys
import threading

import cloudpickle
import pytest
import ray
from ray_nodes import WAIT

import conveyor
from conveyor.api import attach
from conveyor.exceptions import (
    ActorDiedError,
    ActorStartError,
    SessionEndedError,
    WaitTimeoutError,
)
from conveyor.runtime import context

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Waits:
    def run(self):
        return 1


@pytest.mark.parametrize("end", ["session", "kill"])
def test_a_start_that_ray_has_not_placed_holds_up_nothing_and_ends_with_who_wants_it(
    two_nodes, leaves_nothing, wait_until, end
):
    with leaves_nothing():
        conveyor.init()
        hosts = context.running()._engine
        waits = Waits.options(resources={"third": 1}).remote()
        (one,) = hosts._starts._under_way.values()
        actor = one.args[0].handle._actor_id.hex()
        ref = waits.run.remote()
        placed = [Waits.remote() for _ in range(3)]
        assert conveyor.get([one.run.remote() for one in placed], timeout=WAIT) == [1, 1, 1]
        with pytest.raises(WaitTimeoutError, match=r"Waits\.run \(call 1\); Waits is starting"):
            conveyor.get(ref, timeout=0.01)
        if end == "kill":
            conveyor.kill(waits)
            with pytest.raises(ActorDiedError, match="actor Waits was killed by conveyor"):
                conveyor.get(ref, timeout=WAIT)
        else:
            conveyor.shutdown()
            with pytest.raises(SessionEndedError):
                conveyor.get(ref, timeout=WAIT)
        # The program's connection to Ray stays, and nothing waits there.
        wait_until(lambda: ray._private.state.actors(actor)["State"] == "DEAD", WAIT)
        conveyor.shutdown()


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
        waiting = driver._engine._starts._under_way if described else driver.table._waiting
        wait_until(lambda: waiting, WAIT)
        conveyor.shutdown()
        thread.join(WAIT)
        assert not thread.is_alive()
        assert len(raised) == 1
        assert "the session has ended" in raised[0]
    ray.kill(actor)
