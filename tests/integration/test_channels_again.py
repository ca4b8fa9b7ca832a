"""Ends that come to a process which has them already: they are the same, and stay open."""

import copy
import gc
import pickle
import threading

import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.channel.end import make
from conveyor.exceptions import ChannelClosedError
from conveyor.runtime import context
from conveyor.runtime.meeting import SENDING


@conveyor.remote
class Party:
    def keep(self, end):
        self.end = end
        return id(end)

    def receive(self):
        return self.end.receive(timeout=WAIT)

    def open(self):
        return tuple(conveyor.channel.open())


def settled():
    """Wait until the driver has done what finalizers have noted."""
    gc.collect()
    done = threading.Event()
    context.running().chores.soon(done.set)
    assert done.wait(WAIT)


def test_an_end_that_is_loaded_where_it_is(local):
    sender, receiver = conveyor.channel.open()
    assert pickle.loads(pickle.dumps(sender)) is sender
    assert copy.deepcopy(receiver) is receiver
    settled()
    sender.send(1, WAIT)
    assert receiver.receive(WAIT) == 1


def test_an_end_that_comes_to_an_actor_twice(local):
    sender, receiver = conveyor.channel.open()
    party = Party.remote()
    assert get(party.keep.remote(receiver)) == get(party.keep.remote(receiver))
    received = party.receive.remote()
    sender.send(2, WAIT)
    assert get(received) == 2


def test_ends_in_a_result_that_is_got_twice(local):
    ref = Party.remote().open.remote()
    sender, receiver = get(ref)
    again = get(ref)
    assert again[0] is sender
    assert again[1] is receiver
    del again
    settled()
    sender.send(3, WAIT)
    assert receiver.receive(WAIT) == 3


@pytest.mark.parametrize("how", ["the last reference", "a circle of garbage"])
def test_an_end_that_has_come_twice_is_closed_with_its_last_reference(local, how):
    sender, receiver = conveyor.channel.open()
    assert pickle.loads(pickle.dumps(sender)) is sender
    if how == "a circle of garbage":
        circle = [sender]
        circle.append(circle)
        del circle
    del sender
    settled()
    with pytest.raises(ChannelClosedError, match="sending end"):
        receiver.receive(WAIT)


def test_threads_that_load_an_end_have_the_same(local):
    runtime = context.running()
    for number in range(1_000_000, 1_000_200):
        barrier, made = threading.Barrier(4), []

        def load(number=number, barrier=barrier, made=made):
            barrier.wait()
            made.append(make(runtime, number, SENDING, 8))

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(map(id, made))) == 1
