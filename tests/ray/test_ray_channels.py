"""Channels whose ends are on nodes that share no memory."""

import os
import signal
import sys

import cloudpickle
import inside
import numpy as np
import pytest

import conveyor
from conveyor.exceptions import ActorDiedError, ChannelClosedError, WaitTimeoutError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAIT = 60
HERE, THERE = {"resources": {"first": 0.01}}, {"resources": {"second": 0.01}}
MIB = 1 << 20


class Peer:
    def __init__(self):
        self.kept = None

    def pid(self):
        return os.getpid()

    def keep(self, end):
        self.kept = end

    def drop(self):
        self.kept = None

    def receive(self, count):
        return [self.kept.receive(WAIT) for _ in range(count)]

    def count_to(self, sender, n):
        with sender:
            for i in range(n):
                sender.send(i, WAIT)

    def collect(self, receiver):
        return list(receiver)

    def arrays(self, sender, sizes):
        with sender:
            for size in sizes:
                sender.send(np.full(size, size % 251, np.uint8), WAIT)

    def relay(self, receiver, sender):
        with sender:
            for value in receiver:
                sender.send(value + 1, WAIT)


def peer(where, cls=Peer, **options):
    return conveyor.remote(cls).options(**where, **options).remote()


@pytest.fixture(scope="module")
def pair(far):
    made = peer(HERE), peer(THERE)
    conveyor.get([one.pid.remote() for one in made], timeout=WAIT)  # what they need is there
    yield made
    for one in made:
        conveyor.kill(one)


def send_some(sender):
    """More than there is room for."""
    for value in range(4):
        sender.send(value, WAIT)


def get(ref):
    return conveyor.get(ref, timeout=WAIT)


@pytest.mark.parametrize("turned", [False, True], ids=["there", "back"])
def test_actors_of_two_nodes(pair, turned, wait_until):
    before = inside.spread_segments()
    a, b = pair[::-1] if turned else pair
    sender, receiver = conveyor.channel.open[int](depth=4)
    received = b.collect.remote(receiver)
    get(a.count_to.remote(sender, 1000))
    assert get(received) == list(range(1000))
    del sender, receiver
    wait_until(
        lambda: inside.spread_segments() <= before,
        WAIT,
        "its memory's end on all hosts",
    )


def test_two_actors_of_the_other_node(pair):
    other = peer(THERE)
    sender, receiver = conveyor.channel.open[int](depth=2)
    received = pair[1].collect.remote(receiver)
    get(other.count_to.remote(sender, 100))
    assert get(received) == list(range(100))
    conveyor.kill(other)


def test_one_actor_of_the_other_node_with_itself(far):
    def both(self):
        sender, receiver = self.kept
        sender.send(5)
        return receiver.receive(WAIT)

    there = peer(THERE, type("Own", (Peer,), {"both": both}))
    sender, receiver = conveyor.channel.open[int](depth=8)
    get(there.keep.remote((sender, receiver)))
    del sender, receiver
    assert get(there.both.remote()) == 5
    conveyor.kill(there)


def test_what_was_sent_before_the_end_was_closed_comes(pair):
    """The word that says it goes ahead of large values."""
    sizes = [64 * MIB, 1, 8 * MIB, 3]
    sender, receiver = conveyor.channel.open(depth=8)
    done = pair[1].arrays.remote(sender, sizes)
    for size in sizes:
        array = receiver.receive(WAIT)
        assert array.size == size
        assert (array == size % 251).all()
    with pytest.raises(ChannelClosedError, match="the sending end"):
        receiver.receive(WAIT)
    get(done)


def test_a_timeout_says_what_the_other_end_does(pair, tmp_path):
    def come(self, path):
        self.kept.receive(WAIT)
        with open(path) as fifo:
            fifo.read()

    path = tmp_path / "fifo"
    os.mkfifo(path)
    there = pair[1]
    sender, receiver = conveyor.channel.open[int](depth=1)
    get(there.keep.remote(receiver))
    del receiver
    busy = there.__ray_call__.remote(come, str(path))
    sender.send(1, WAIT)
    with open(path, "w"):  # it has opened it, too
        sender.send(2, WAIT)
        with pytest.raises(WaitTimeoutError, match=r"Peer\S* is running \S+"):
            sender.send(3, 0.2)
    get(busy)
    get(there.drop.remote())


def test_the_death_of_the_process_that_receives(far, wait_until):
    before = inside.spread_segments()
    there = peer(THERE)
    sender, receiver = conveyor.channel.open[int](depth=2)
    get(there.keep.remote(receiver))
    del receiver
    received = there.receive.remote(1)
    sender.send(1, WAIT)
    get(received)
    os.kill(get(there.pid.remote()), signal.SIGKILL)
    with pytest.raises(ActorDiedError, match="Peer"):
        send_some(sender)
    sender.close()
    wait_until(
        lambda: inside.spread_segments() <= before,
        WAIT,
        "its memory's end on all hosts",
    )


def test_a_ring_of_channels_over_both_nodes(pair):
    first, first_there = conveyor.channel.open[int](depth=2)
    between_there, between = conveyor.channel.open[int](depth=2)
    last_there, last = conveyor.channel.open[int](depth=2)
    done = [
        pair[1].relay.remote(first_there, between_there),
        pair[0].relay.remote(between, last_there),
    ]
    del first_there, between_there, between, last_there
    for i in range(200):
        first.send(i, WAIT)
        assert last.receive(WAIT) == i + 2
    first.close()
    assert list(last) == []
    get(done)
