"""Ctrl-C that comes while something is let go of, where nothing can be raised: it is printed, as Python does
in finalizers, and what it has broken off is done all the same."""

import signal
import sys

import cloudpickle
import pytest
from integration_helpers import get, large

import conveyor
from conveyor.codec import borrows
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
    """Is interrupted where it begins to give borrows up, so many times."""

    def __init__(self, holder, times):
        self.holder = holder
        self.times = times
        self.requested = 0

    def confirm(self, made):
        self.holder.confirm(made)

    def take(self, made):
        return self.holder.take(made)

    def withdraw(self, made, readers):
        self.holder.withdraw(made, readers)

    def give_up(self, made):
        self.requested += 1
        if self.requested <= self.times:
            signal.raise_signal(signal.SIGINT)
        self.holder.give_up(made)


@pytest.fixture
def interrupted(monkeypatch):
    """``interrupted(times)``: have the giving up of borrows interrupted so often. Then what was printed."""
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: printed.append(u.exc_type))
    before = borrows._directory

    def begin(times):
        borrows.install(Keeper(before, times))
        return printed

    yield begin
    borrows.install(before)


@pytest.mark.parametrize("times", [1, 2])
def test_a_value_with_refs_that_cannot_be_read(leaves_nothing, interrupted, wait_until, times):
    with leaves_nothing():
        conveyor.init(engine="inline")
        exports = conveyor.runtime.context.current().exports
        actor = Actor.remote()
        ref = conveyor.put(large(1))
        printed = interrupted(times)
        with pytest.raises(SerializationError, match="cannot be rebuilt"):
            get(actor.take.remote([ref, Unreadable()]))
        assert printed == [KeyboardInterrupt] * times
        del ref
        wait_until(
            lambda: exports.tidy() or exports.entry_count == 0, what="the end of exported refs"
        )
        del actor
        conveyor.shutdown()
