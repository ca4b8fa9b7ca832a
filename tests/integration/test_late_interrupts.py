"""Ctrl-C that comes while something is let go of, where nothing can be raised: it is raised as soon as the
program goes on, and what it has broken off is done all the same."""

import signal
import sys

import cloudpickle
import pytest
from integration_helpers import get

import conveyor
from conveyor.channel import claims
from conveyor.exceptions import SerializationError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def rebuild():
    raise ValueError("cannot be rebuilt")


class Unreadable:
    def __reduce__(self):
        return rebuild, ()


@conveyor.remote
class Actor:
    def take(self, x):
        return 1


class Keeper:
    """Is interrupted where it begins to give claims up, so many times."""

    def __init__(self, keeper, times):
        self.keeper = keeper
        self.times = times
        self.asked = 0

    def take(self, made):
        return self.keeper.take(made)

    def withdraw(self, made, readers):
        self.keeper.withdraw(made, readers)

    def give_up(self, made):
        self.asked += 1
        if self.asked <= self.times:
            signal.raise_signal(signal.SIGINT)
        self.keeper.give_up(made)


@pytest.fixture
def interrupted(monkeypatch):
    """Has the giving up of claims interrupted; nothing may be printed instead of raised."""
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    before = claims._keeper

    def begin(times):
        keeper = Keeper(before, times)
        claims.install(keeper)
        return keeper

    yield begin
    claims.install(before)
    assert not unraisable, [u.exc_value for u in unraisable]


def send_in_vain(actor, ref):
    actor.take.remote([ref, Unreadable()])
    for _ in range(1000):  # where a signal handler may raise
        pass


@pytest.mark.parametrize("times", [1, 2, 10])
def test_a_value_with_refs_that_cannot_be_read(leaves_nothing, interrupted, times):
    with leaves_nothing():
        conveyor.init(engine="inline")
        actor = Actor.remote()
        ref = conveyor.put(1)
        keeper = interrupted(times)
        with pytest.raises(KeyboardInterrupt):
            send_in_vain(actor, ref)
        assert keeper.asked == min(times + 1, 3)
        claims.install(keeper.keeper)
        with pytest.raises(SerializationError, match="cannot be rebuilt"):
            get(actor.take.remote([ref, Unreadable()]))
        assert get(actor.take.remote([ref])) == 1
        del ref, actor
        conveyor.shutdown()
