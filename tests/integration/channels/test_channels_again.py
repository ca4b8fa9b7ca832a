"""Ends that come to a process which has them already, or too late, and ends that are closed within a send."""

import copy
import gc
import pickle

import inside
import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.exceptions import ActorDiedError, ChannelClosedError, WaitTimeoutError


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
    inside.do_cleanup()


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


def test_ends_that_are_loaded_when_their_maker_has_died(local, wait_until):
    maker, other = Party.remote(), Party.remote()
    ref = maker.open.remote()
    conveyor.wait([ref], timeout=WAIT)
    conveyor.kill(maker)
    wait_until(lambda: not inside.channels_known(), what="the channel to be forgotten")
    sender, receiver = get(ref)
    get(other.keep.remote(receiver))
    with pytest.raises(ActorDiedError, match="actor Party "):
        get(other.receive.remote())
    with pytest.raises(ActorDiedError, match="actor Party "):
        sender.send(1, WAIT)


class Closing:
    """Closes an end while a value is sent there, as a signal handler may."""

    def __init__(self, sender, meanwhile):
        self.sender, self.meanwhile = sender, meanwhile

    def __reduce__(self):
        self.sender.close()
        self.meanwhile()
        return str, ("sent",)


def test_an_end_that_is_closed_while_it_sends_sends_that_before(engine):
    sender, receiver = conveyor.channel.open()
    sender.send(0)
    assert receiver.receive() == 0

    def receives_nothing():
        with pytest.raises(WaitTimeoutError):
            receiver.receive(timeout=0)

    sender.send(Closing(sender, receives_nothing))
    assert sender.closed
    assert list(receiver) == ["sent"]
    with pytest.raises(ChannelClosedError):
        sender.send(1)
