"""A process that is killed while it pickles a ref: nothing is kept for the pickle, which nobody gets."""

import os
import signal
import time

import numpy as np
import pytest

import conveyor
from conveyor.exceptions import ActorDiedError
from conveyor.runtime import context

WAIT = 60


class Kills:
    """Pickling it ends the process: what stands before it is pickled by then."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")


@conveyor.remote
class Stage:
    def same(self, value=None):
        return value

    def numbers(self, refs):
        self.found = [int(np.sum(value)) for value in conveyor.get(list(refs))]

    def end_at_the_call(self, other, refs):
        other.same.remote([*refs, Kills()])

    def end_at_the_return(self, refs):
        return [*refs, Kills()]

    def end_after_a_call(self, other, refs):
        other.numbers.remote(refs)
        other.same.remote([*refs, Kills()])

    def wait(self, path):
        while not os.path.exists(path):
            time.sleep(0.001)

    def last(self):
        return self.found


def kept():
    """References to values, and pickles of them, that are noted."""
    exports = context.running().exports
    exports.tidy()
    return exports.kept


@pytest.fixture
def ref(fresh_session):
    return conveyor.put(np.arange(1000))


def test_of_a_call_to_another_actor(ref, wait_until):
    maker, reader = Stage.remote(), Stage.remote()
    died = maker.end_at_the_call.remote(reader, [ref])
    with pytest.raises(ActorDiedError):
        conveyor.get(died, timeout=WAIT)
    del ref, died
    wait_until(lambda: kept() == 0)
    assert conveyor.get(reader.same.remote(1), timeout=WAIT) == 1


def test_of_a_result_for_the_driver(ref, wait_until):
    died = Stage.remote().end_at_the_return.remote([ref])
    with pytest.raises(ActorDiedError):
        conveyor.get(died, timeout=WAIT)
    del ref, died
    wait_until(lambda: kept() == 0)


def test_what_the_dead_had_sent_before_is_still_got(ref, wait_until, latches):
    """It waits in the ring of the reader, which is busy until the other's death is known to all."""
    maker, reader = Stage.remote(), Stage.remote()
    latch = latches()
    busy = reader.wait.remote(latch.path)
    died = maker.end_after_a_call.remote(reader, [ref])
    with pytest.raises(ActorDiedError):
        conveyor.get(died, timeout=WAIT)
    del ref, died
    assert kept() == 1
    latch.open()
    conveyor.get(busy, timeout=WAIT)
    wait_until(lambda: kept() == 0)
    assert conveyor.get(reader.last.remote(), timeout=WAIT) == [499500]
