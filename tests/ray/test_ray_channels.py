"""Channels whose ends are on nodes that share no memory."""

import asyncio
import dataclasses
import os
import signal
import sys
import threading
from functools import partial

import cloudpickle
import numpy as np
import pytest

import conveyor
from conveyor.exceptions import ActorDiedError, ChannelClosedError, WaitTimeoutError
from conveyor.runtime import context

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

    def close(self):
        self.kept.close()

    def send(self, *values):
        for value in values:
            self.kept.send(value, WAIT)

    def try_send(self, value, timeout):
        self.kept.send(value, timeout)

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

    def statistics(self):
        return dataclasses.asdict(self.kept.statistics())

    def relay(self, receiver, sender):
        with sender:
            for value in receiver:
                sender.send(value + 1, WAIT)


class AsyncPeer:
    async def double(self, numbers, doubled):
        async for number in numbers:
            await doubled.send_async(2 * number)
        doubled.close()


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


def spread():
    """Numbers of the segments that the driver has had other hosts make."""
    return set(context.running().abroad._segments)


@pytest.mark.parametrize("turned", [False, True], ids=["there", "back"])
def test_actors_of_two_nodes(pair, turned, wait_until):
    before = spread()
    a, b = pair[::-1] if turned else pair
    sender, receiver = conveyor.channel.open[int](depth=4)
    received = b.collect.remote(receiver)
    get(a.count_to.remote(sender, 1000))
    assert get(received) == list(range(1000))
    del sender, receiver
    wait_until(lambda: spread() <= before, WAIT, "the end of the channel's memory on all hosts")


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


def test_the_driver_at_either_end(pair):
    there = pair[1]
    sender, receiver = conveyor.channel.open[int](depth=4)
    received = there.collect.remote(receiver)
    with sender:
        for i in range(300):
            sender.send(i, WAIT)
    assert get(received) == list(range(300))
    sender, receiver = conveyor.channel.open[int](depth=4)
    done = there.count_to.remote(sender, 300)
    del sender
    assert list(receiver) == list(range(300))
    get(done)


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


def test_so_many_are_under_way_at_most(pair):
    there = pair[1]
    sender, receiver = conveyor.channel.open[int](depth=4)
    get(there.keep.remote(sender))
    del sender
    sent = there.send.remote(*range(4))
    assert receiver.receive(WAIT) == 0  # they have met
    get(sent)
    get(there.send.remote(4))
    with pytest.raises(WaitTimeoutError, match="room in channel"):
        get(there.try_send.remote("too many", 0.3))
    counted = get(there.statistics.remote())
    assert (counted["depth"], counted["values"], counted["waiting"]) == (4, 5, 4)
    assert receiver.receive(WAIT) == 1
    get(there.send.remote(5))
    assert [receiver.receive(WAIT) for _ in range(4)] == [2, 3, 4, 5]
    assert receiver.statistics().values == 6
    receiver.close()
    get(there.drop.remote())


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


def test_a_receiving_end_that_is_closed(pair):
    there = pair[1]
    sender, receiver = conveyor.channel.open[int](depth=2)
    get(there.keep.remote(receiver))
    del receiver
    received = there.receive.remote(1)
    sender.send(1, WAIT)
    assert get(received) == [1]
    get(there.close.remote())
    with pytest.raises(ChannelClosedError, match="the receiving end"):
        send_some(sender)


def test_who_waits_for_room_hears_that_the_end_is_gone(pair):
    """The last reference's going closes it."""
    there = pair[1]
    sender, receiver = conveyor.channel.open[int](depth=1)
    get(there.keep.remote(receiver))
    del receiver
    received = there.receive.remote(1)
    sender.send(1, WAIT)
    get(received)
    sender.send(2, WAIT)
    failed = []

    def wait():
        try:
            sender.send(3, WAIT)
        except ChannelClosedError as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    get(there.drop.remote())
    waiting.join(WAIT)
    assert len(failed) == 1


def test_an_end_that_is_closed_before_it_was_used(pair):
    there = pair[1]
    for closed in (0, 1):
        ends = list(conveyor.channel.open[int]())
        get(there.keep.remote(ends[closed]))
        kept = ends[1 - closed]
        del ends
        get(there.close.remote())
        use = partial(kept.send, 1) if closed else kept.receive
        with pytest.raises(ChannelClosedError):
            use(timeout=WAIT)


def test_the_death_of_the_process_that_sends(far):
    there = peer(THERE)
    sender, receiver = conveyor.channel.open[int](depth=8)
    get(there.keep.remote(sender))
    del sender
    sent = there.send.remote(1, 2, 3)
    assert [receiver.receive(WAIT) for _ in range(3)] == [1, 2, 3]
    get(sent)
    os.kill(get(there.pid.remote()), signal.SIGKILL)
    with pytest.raises(ActorDiedError, match="Peer"):
        receiver.receive(WAIT)


def test_the_death_of_the_process_that_receives(far, wait_until):
    before = spread()
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
    wait_until(lambda: spread() <= before, WAIT, "the end of the channel's memory on all hosts")


def test_references_go_with_values(pair):
    sender, receiver = conveyor.channel.open(depth=2)
    get(pair[1].keep.remote(receiver))
    del receiver
    received = pair[1].receive.remote(1)
    sender.send({"ref": conveyor.put("a value")}, WAIT)
    (got,) = get(received)
    assert get(got["ref"]) == "a value"
    sender.close()


def test_with_asyncio(far):
    there = peer(THERE, AsyncPeer)

    async def main():
        numbers, numbers_there = conveyor.channel.open[int](depth=2)
        doubled_there, doubled = conveyor.channel.open[int](depth=2)
        done = there.double.remote(numbers_there, doubled_there)
        del numbers_there, doubled_there
        for number in range(20):
            await numbers.send_async(number)
            assert await doubled.receive_async() == 2 * number
        numbers.close()
        await done
        return [value async for value in doubled]

    assert asyncio.run(asyncio.wait_for(main(), WAIT)) == []
    conveyor.kill(there)


def test_opened_by_an_actor_of_the_other_node(pair):
    def opens(self):
        sender, self.kept = conveyor.channel.open[int](depth=4)
        return sender

    there = peer(THERE, type("Opener", (Peer,), {"opens": opens}))
    sender = get(there.opens.remote())
    received = there.receive.remote(3)
    for i in range(3):
        sender.send(i, WAIT)
    assert get(received) == [0, 1, 2]
    conveyor.kill(there)


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
