"""Channels of a process that has died, at a process that has met its successor, which has the same slot."""

import os

import pytest
from integration_helpers import WAIT, get

import conveyor
from conveyor.exceptions import ActorDiedError, WaitTimeoutError

numpy = pytest.importorskip("numpy")

#: Such values lie in the arena of the process that sends them.
LENGTH = 200_000


def only(array):
    """What all of ``array`` is."""
    return sorted(set(array.tolist()))


@conveyor.remote
class Mortal:
    def send_and_die(self, sender, numbers):
        for number in numbers:
            sender.send(numpy.full(LENGTH, number))
        os._exit(1)

    def array(self, number):
        return numpy.full(LENGTH, number)

    def pid(self):
        return os.getpid()


@conveyor.remote
class Receiving:
    """It uses its end before the other process does, so both are introduced when that one does."""

    def use(self, receiver, sender):
        self.receiver, self.sender = receiver, sender
        with pytest.raises(WaitTimeoutError):
            receiver.receive(timeout=0)

    def meet_the_successor(self, numbers):
        self.held = [get(self.sender.array.remote(number)) for number in numbers]

    def receive(self, count):
        values = [self.receiver.receive(timeout=WAIT) for _ in range(count)]
        return [only(value) for value in values]

    def hold_on(self):
        """What is held, once the successor has made more."""
        for number in range(100, 110):
            get(self.sender.array.remote(number))
        return [only(value) for value in self.held]


def introduced_late(numbers):
    """A receiver that knows the successor of a process which has sent it ``numbers``."""
    sender, receiver = conveyor.channel.open()
    mortal, receiving = Mortal.options(max_restarts=1).remote(), Receiving.remote()
    pid = get(mortal.pid.remote())
    get(receiving.use.remote(receiver, mortal))
    with pytest.raises(ActorDiedError):
        get(mortal.send_and_die.remote(sender, numbers))
    assert get(mortal.pid.remote()) != pid
    return receiving


def test_what_a_process_has_sent_is_not_read_out_of_its_successors_memory(local):
    receiving = introduced_late([7, 8])
    get(receiving.meet_the_successor.remote([42, 43]))
    assert get(receiving.receive.remote(2)) == [[7], [8]]


def test_what_is_held_of_the_successor_stays_as_it_is(local):
    receiving = introduced_late([7])
    get(receiving.meet_the_successor.remote([42]))
    assert get(receiving.receive.remote(1)) == [[7]]
    assert get(receiving.hold_on.remote()) == [[42]]
