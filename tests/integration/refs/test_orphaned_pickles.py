"""A process that is killed while it pickles a ref: nothing is kept for the pickle, which nobody gets."""

import os
import signal
import time
import weakref

import inside
import numpy as np
import pytest

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import ActorDiedError, WaitTimeoutError

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

    def ask(self, other, refs):
        """Keep two results of the other's, and get a later one."""
        self.requested = other.same.remote(refs), other.same.remote(refs)
        conveyor.get(other.same.remote())

    def answers(self):
        return [number_in(one) for one in self.requested]


def number_in(result):
    return int(np.sum(conveyor.get(conveyor.get(result)[0])))


def end_at_a_return(maker, wait_until, left=0):
    """It is killed, and what it had pickled is settled: of a pickle that nobody gets nothing is kept, so that
    what actors hold is ``left``."""
    with pytest.raises(ActorDiedError):
        conveyor.get(maker.end_at_the_return.remote([conveyor.put(np.arange(10))]), timeout=WAIT)
    wait_until(lambda: inside.kept() == left)


@pytest.fixture
def ref(fresh_session):
    return conveyor.put(np.arange(1000))


def test_of_a_call_to_another_actor(ref, wait_until):
    maker, reader = Stage.remote(), Stage.remote()
    died = maker.end_at_the_call.remote(reader, [ref])
    with pytest.raises(ActorDiedError):
        conveyor.get(died, timeout=WAIT)
    del ref, died
    wait_until(lambda: inside.kept() == 0)
    assert conveyor.get(reader.same.remote(1), timeout=WAIT) == 1


def test_of_a_result_for_the_driver(ref, wait_until):
    died = Stage.remote().end_at_the_return.remote([ref])
    with pytest.raises(ActorDiedError):
        conveyor.get(died, timeout=WAIT)
    del ref, died
    wait_until(lambda: inside.kept() == 0)


def test_what_the_dead_had_sent_before_is_still_got(ref, wait_until, latches):
    """It waits in the ring of the reader, which is busy until the other's death is known to all."""
    maker, reader = Stage.remote(), Stage.remote()
    latch = latches()
    busy = reader.wait.remote(latch.path)
    died = maker.end_after_a_call.remote(reader, [ref])
    with pytest.raises(ActorDiedError):
        conveyor.get(died, timeout=WAIT)
    del ref, died
    assert inside.kept() == 1
    latch.open()
    conveyor.get(busy, timeout=WAIT)
    wait_until(lambda: inside.kept() == 0)
    assert conveyor.get(reader.last.remote(), timeout=WAIT) == [499500]


def test_results_that_came_before_are_got_after_their_makers_end(fresh_session, wait_until):
    """They have left their ring, since a later one was got, and are decoded when they are got."""
    maker, ref = Stage.remote(), conveyor.put(np.arange(1000))
    results = [maker.same.remote([ref]) for _ in range(2)]
    conveyor.get(maker.same.remote(), timeout=WAIT)
    del ref
    end_at_a_return(maker, wait_until)
    assert [number_in(one) for one in results] == [499500, 499500]


def test_results_that_came_before_are_dropped_after_their_makers_end(fresh_session, wait_until):
    maker, ref = Stage.remote(), conveyor.put(np.arange(1000))
    results = [maker.same.remote([ref]) for _ in range(2)]
    conveyor.get(maker.same.remote(), timeout=WAIT)
    value = weakref.ref(ref)
    del ref
    end_at_a_return(maker, wait_until)
    assert value() is not None
    del results
    wait_until(lambda: value() is None)


def test_results_of_a_graph_that_came_before_are_got_after_their_makers_end(
    fresh_session, wait_until
):
    maker, ref = Stage.remote(), conveyor.put(np.arange(1000))
    with InputNode() as inp:
        graph = maker.same.bind(inp).compile()
    results = [graph.execute([ref]) for _ in range(2)]
    conveyor.get(graph.execute([]), timeout=WAIT)
    del ref
    end_at_a_return(maker, wait_until)
    assert {number_in(one) for one in results} == {499500}


def test_an_actor_gets_what_came_to_it_before(fresh_session, wait_until):
    maker, reader, ref = Stage.remote(), Stage.remote(), conveyor.put(np.arange(1000))
    conveyor.get(reader.ask.remote(maker, [ref]), timeout=WAIT)
    del ref
    end_at_a_return(maker, wait_until, 1)
    assert conveyor.get(reader.answers.remote(), timeout=WAIT) == [499500, 499500]


@conveyor.remote
class Ended:
    """It has an end of a channel."""

    def take(self, ends):
        (self.end,) = ends

    def look(self):
        with pytest.raises(WaitTimeoutError):
            self.end.receive(timeout=0)

    def send(self, refs):
        self.end.send(refs, timeout=WAIT)

    def receive(self):
        return int(np.sum(conveyor.get(self.end.receive(timeout=WAIT))[0]))

    def close(self):
        self.end.close()

    def end_at_the_return(self, refs):
        return [*refs, Kills()]


@pytest.mark.parametrize("how", ["receives", "closes"])
def test_what_a_channel_has_brought_before_it_was_looked_at(ref, wait_until, how):
    """Its reader does not know yet from whom that is: it has used its end, and met nobody."""
    sending, receiving = conveyor.channel.open(depth=8)
    maker, reader = Ended.remote(), Ended.remote()
    conveyor.get([maker.take.remote([sending]), reader.take.remote([receiving])])
    del sending, receiving
    conveyor.get(reader.look.remote(), timeout=WAIT)
    conveyor.get(maker.send.remote([ref]), timeout=WAIT)
    died = maker.end_at_the_return.remote([ref])
    with pytest.raises(ActorDiedError):
        conveyor.get(died, timeout=WAIT)
    del ref, died
    assert inside.kept() > 0
    if how == "receives":
        assert conveyor.get(reader.receive.remote(), timeout=WAIT) == 499500
    else:
        conveyor.get(reader.close.remote(), timeout=WAIT)
    wait_until(lambda: inside.kept() == 0)
