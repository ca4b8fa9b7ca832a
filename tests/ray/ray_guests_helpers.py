"""Actors of Ray's that take part in sessions, for the tests of that."""

import contextlib
import os
import sys
import threading

import cloudpickle
import pytest
import ray
from ray_nodes import WAIT, get

import conveyor
from conveyor.engines.ray import attached
from conveyor.exceptions import ActorDiedError

for pickler in cloudpickle, ray.cloudpickle:
    pickler.register_pickle_by_value(sys.modules[__name__])


class Plain:
    def __init__(self):
        self.seen = []

    def add(self, x, y=1):
        self.seen.append("add")
        return x + y

    def list(self):
        return list(self.seen)

    def pid(self):
        return os.getpid()

    @ray.method(num_returns=2)
    def both(self, x):
        return x, x + 1

    def items(self, n):
        yield from range(n)

    def hold(self, started, go, wait_until):
        self.seen.append("hold")
        open(started, "w").close()
        wait_until(lambda: os.path.exists(go), WAIT)
        self.seen.append("held")

    def leave(self):
        sys.exit(3)

    def ask(self, actor):
        return conveyor.get(actor.add.remote(1))

    def host(self):
        """The pid of the driver that it is with; 0 while it asks to be let in."""
        return attached._driver_pid

    def left(self):
        """What a session has left in the process."""
        files = list(_open_files())
        with open("/proc/self/maps") as maps:
            files += [line.split()[-1] for line in maps]
        threads = [thread.name for thread in threading.enumerate()]
        return [name for name in (*files, *threads) if "conveyor" in name and ".so" not in name]


def _open_files():
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it meanwhile
            yield os.readlink(f"/proc/self/fd/{fd}")


Stage = ray.remote(num_cpus=0)(Plain)


@conveyor.remote
class Ours:
    def add(self, x, y=1):
        return x + y

    def ask(self, actor):
        return get(actor.add.remote(1))


def until_it_raises(call):
    """What is told sooner or later, but comes as an error then."""
    while True:
        call()


def nothing_left(wait_until, *stages):
    for stage in stages:
        wait_until(lambda stage=stage: ray.get(stage.left.remote()) == [], WAIT)


def is_killed_and_leaves(stage, wait_until):
    """It is killed as an actor of a session, twice: as Ray's it goes on, and may come again."""
    attached = conveyor.attach(stage)
    assert get(attached.add.remote(1)) == 2
    conveyor.kill(attached)
    with pytest.raises(ActorDiedError, match=r"killed by conveyor\.kill"):
        attached.add.remote(1)
    assert ray.get(stage.add.remote(1)) == 2
    nothing_left(wait_until, stage)
    again = conveyor.attach(stage)
    assert again != attached
    assert get(again.add.remote(1)) == 2
    conveyor.kill(again, graceful=True)
    nothing_left(wait_until, stage)
