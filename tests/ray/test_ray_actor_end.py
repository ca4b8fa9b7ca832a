"""Actors of the program's own on Ray, which have begun a session or take part in one, and end."""

import os
import sys

import cloudpickle
import psutil
import pytest
import ray
from ray_guests_helpers import Plain

import conveyor
from conveyor.exceptions import ActorDiedError

for pickler in cloudpickle, ray.cloudpickle:
    pickler.register_pickle_by_value(sys.modules[__name__])

WAIT = 60


def inner():
    @conveyor.remote(num_cpus=0)
    class Inner:
        def pid(self):
            return os.getpid()

    return Inner.remote()


class Begins:
    def begin(self):
        conveyor.init(engine="ray")
        self.inner = inner()
        return os.getpid(), conveyor.get(self.inner.pid.remote())

    def leave(self):
        ray.actor.exit_actor()

    def begin_and_leave(self, path):
        with open(path, "w") as told:
            told.write(" ".join(map(str, self.begin())))
        ray.actor.exit_actor()

    def begin_and_end(self):
        self.begin()
        conveyor.shutdown()
        return ray.actor.exit_actor.__closure__ is None


class BeginsLater:
    async def begin(self):
        conveyor.init(engine="ray")
        self.inner = inner()
        return os.getpid(), await self.inner.pid.remote()

    async def leave(self):
        ray.actor.exit_actor()


def made(cls=Begins):
    return ray.remote(num_cpus=0)(cls).remote()


def all_gone(pids):
    return not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("cls", [Begins, BeginsLater])
def test_who_has_begun_a_session_leaves(two_nodes, wait_until, cls):
    actor = made(cls)
    pids = ray.get(actor.begin.remote())
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.leave.remote(), timeout=WAIT)
    wait_until(lambda: all_gone(pids), WAIT)


def test_the_method_that_has_begun_it_leaves(two_nodes, wait_until, tmp_path):
    actor = made()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.begin_and_leave.remote(str(tmp_path / "pids")), timeout=WAIT)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_until(lambda: all_gone(pids), WAIT)


@pytest.mark.parametrize("how", ["kill", "drop"])
def test_who_has_begun_a_session_is_ended(two_nodes, wait_until, how):
    actor = made()
    pids = ray.get(actor.begin.remote())
    if how == "kill":
        ray.kill(actor)
    del actor
    wait_until(lambda: all_gone(pids), WAIT)


def test_after_a_session_ray_is_as_it_was(two_nodes):
    actor = made()
    for _ in range(2):
        assert ray.get(actor.begin_and_end.remote(), timeout=WAIT)
    ray.kill(actor)


class Guest(Plain):
    def leave(self):
        ray.actor.exit_actor()


@pytest.mark.parametrize("how", ["exit_actor", "kill"])
def test_a_guest_ends(rt, two_nodes, wait_until, how):
    stage = made(Guest)
    attached_actor = conveyor.attach(stage)
    pid = conveyor.get(attached_actor.pid.remote(), timeout=WAIT)
    if how == "exit_actor":
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(stage.leave.remote(), timeout=WAIT)
    else:
        ray.kill(stage)
    wait_until(lambda: not psutil.pid_exists(pid), WAIT)
    with pytest.raises(ActorDiedError):
        conveyor.get(attached_actor.pid.remote(), timeout=WAIT)
