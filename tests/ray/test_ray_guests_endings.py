"""Guests whose part in a session ends otherwise than in good order, or before it has begun."""

import errno
import os
import re
import sys
import threading
import types

import cloudpickle
import pytest
import ray
from ray_guests_helpers import WAIT, Plain, Stage, get, nothing_left

import conveyor
from conveyor.engines.ray import attached, processes
from conveyor.engines.ray.bootstrap import Welcome
from conveyor.exceptions import ActorDiedError, ActorStartError, SystemLimitError
from conveyor.runtime import threads

for pickler in cloudpickle, ray.cloudpickle:
    pickler.register_pickle_by_value(sys.modules[__name__])


class Threadless(Plain):
    """Its process has no thread left for what is asked of it."""

    def refuse(self, name):
        def refusing(target, what, *args):
            if what == name:
                raise SystemLimitError(11, f"no thread for {name}, by the test")
            return threads.start(target, what, *args)

        attached.threads = types.SimpleNamespace(start=refusing)


@pytest.mark.parametrize("name", ["attached-actor", "with-driver"])
def test_one_whose_process_has_no_thread_for_it(rt, two_nodes, wait_until, caplog, name):
    stage = ray.remote(num_cpus=0)(Threadless).remote()
    ray.get(stage.refuse.remote(name))
    with pytest.raises(ActorDiedError):
        get(conveyor.attach(stage).pid.remote())
    if name == "attached-actor":  # it has been let in by then
        said = "Threadless of Ray cannot take part: .*no thread for attached-actor, by the test"
        wait_until(lambda: re.search(said, caplog.text, re.S), WAIT)
    nothing_left(wait_until, stage)
    ray.get(stage.refuse.remote("nothing"))
    assert get(conveyor.attach(stage).add.remote(1)) == 2
    ray.kill(stage)


class Listens(Plain):
    """Runs a method that waits for the driver."""

    def receive(self, channel, met):
        try:
            channel.receive()
            open(met, "w").close()
            channel.receive()
        except Exception as error:
            self.seen.append(f"{type(error).__name__}: {error}")
            raise


def test_one_that_waits_for_the_driver_as_the_session_ends(
    leaves_nothing, two_nodes, tmp_path, wait_until
):
    stage = ray.remote(num_cpus=0)(Listens).remote()

    held = []  # the driver does not close it

    def waits():
        actor = conveyor.attach(stage)
        sender, receiver = conveyor.channel.open()
        held.append(sender)
        actor.receive.remote(receiver, str(tmp_path / "met"))
        sender.send(1)
        wait_until((tmp_path / "met").exists, WAIT)

    with leaves_nothing():
        conveyor.init()
        waits()
        conveyor.shutdown()
        held.clear()
    nothing_left(wait_until, stage)
    (said,) = ray.get(stage.list.remote())
    # The driver's end hangs up; its wait may hear first that the session is over.
    assert said.startswith("ChannelClosedError") or "session" in said
    with leaves_nothing():
        conveyor.init()
        assert get(conveyor.attach(stage).add.remote(1)) == 2
        conveyor.shutdown()
    ray.kill(stage)


def test_it_is_one_actor_though_two_threads_attach_it(rt, two_nodes):
    for _ in range(3):
        stage = Stage.remote()
        ready = threading.Barrier(3)
        outcome = []

        def attach(stage=stage, ready=ready, outcome=outcome):
            ready.wait(WAIT)
            try:
                outcome.append(get(conveyor.attach(stage).add.remote(1)))
            except BaseException as error:
                outcome.append(error)

        threads = [threading.Thread(target=attach) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert outcome == [2, 2, 2]
        ray.kill(stage)


def test_one_that_what_it_needs_cannot_be_sent_to(rt, stage, monkeypatch):
    """The system lets a user have so many descriptors under way; then it is as if it had not come."""

    def full(said):
        if isinstance(said, Welcome):
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return write(said)

    write = processes.write
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(processes, "write", full)
            with pytest.raises(ActorStartError, match="descriptors could not be sent"):
                conveyor.attach(stage)
    assert get(conveyor.attach(stage).add.remote(1)) == 2
