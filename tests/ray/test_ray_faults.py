"""Ray's engine when something goes wrong with Ray, or at the worst moment."""

import fcntl
import os
import subprocess
import sys
import threading

import cloudpickle
import pytest
from ray_nodes import WAIT, get

import conveyor
from conveyor.exceptions import ActorDiedError
from conveyor.runtime import context

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Place:
    def pid(self):
        return os.getpid()

    def add(self, x):
        return x + 1

    def leave(self, how):
        how()


def hosts():
    return context.running()._engine


def test_what_ray_does_not_answer_holds_up_no_start(rt, monkeypatch):
    """Ray asked for its resources while it is busy, or gone, may take for ever, natively."""
    import ray

    from conveyor.engines.ray import process_engine as module

    requested, answer = threading.Event(), threading.Event()

    def resources():
        requested.set()
        assert answer.wait(WAIT)
        return {}

    monkeypatch.setattr(module, "_SAID_AFTER", 0.0)
    monkeypatch.setattr(ray, "available_resources", resources)
    try:
        actor = Place.remote()
        assert requested.wait(WAIT)
        assert not answer.is_set()
        assert get(actor.add.remote(1)) == 2
    finally:
        answer.set()


def test_rays_own_lines_are_not_the_actors_last_words(rt):
    with pytest.raises(ActorDiedError) as caught:
        get(Place.remote().leave.remote(lambda: os._exit(3)))
    assert ":job_id:" not in str(caught.value)
    assert ":actor_name:" not in str(caught.value)


def test_a_pidfd_that_is_closed_is_signalled_no_more(rt, wait_until):
    """Its number may be another actor's by then: a late kill of the one would end the other."""
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    theirs, taken = os.pidfd_open(victim.pid), []

    def has_the_number_of_a_killed_actor():
        """Unless another thread has that: to close it would break what is that one's."""
        actor = Place.remote()
        pid = get(actor.pid.remote())
        known = hosts()._living[pid]
        number = known.pidfd
        conveyor.kill(actor)
        wait_until(lambda: pid not in hosts()._living and known.pidfd != number, WAIT)
        taken.append(fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, number))
        return known if taken[-1] == number else None

    try:
        known = wait_until(has_the_number_of_a_killed_actor, WAIT)
        hosts()._give_up(known)  # an interrupt that comes late
        assert victim.communicate(b"go on\n", timeout=WAIT) == (None, None)
        assert victim.returncode == 0
    finally:
        victim.kill()
        victim.wait()
        for fd in (theirs, *taken):
            os.close(fd)
