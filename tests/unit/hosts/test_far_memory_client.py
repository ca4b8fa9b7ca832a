"""What an actor has its host fetch, when its connection to that ends."""

import errno
import gc
import os
import socket
import threading
import weakref

import pytest

from conveyor import descriptors
from conveyor.cluster.fetches import FarMemoryService
from conveyor.runtime.messages import Files
from conveyor.runtime.remote_memory import Brought, Wanted
from conveyor.worker.remote_memory import FarMemoryClient

WAIT = 60
WANTED = Wanted((3, 1), 7, 0, bytes(16), joined=True)


def test_the_end_of_a_connection_is_no_end_of_what_was_asked_for_over_the_next(wait_until):
    hosts_ends, goes_on = [], threading.Event()

    def ask(_):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hosts_ends.append(there)
        return None, Files([here.detach()])

    client = FarMemoryClient(ask, 1)
    on_end = client._on_end

    def end_late(lease):
        assert goes_on.wait(WAIT)
        on_end(lease)

    client._on_end = end_late
    first, second = [], []
    client.fetch(WANTED, None, first.append)
    hosts_ends[0].close()
    wait_until(lambda: client._line.connection.ended, WAIT)
    client.fetch(WANTED, None, second.append)
    assert len(hosts_ends) == 2
    goes_on.set()
    wait_until(lambda: first, WAIT)
    assert first[0].error == errno.ECONNRESET
    assert list(client._waiting) == [2]
    assert not second
    hosts_ends[1].close()
    wait_until(lambda: second, WAIT)
    client.close()


class Room:
    """Memory that a host writes to."""

    def __init__(self):
        self.fd, self.at = os.memfd_create("room"), 0

    def __del__(self):
        os.close(self.fd)


class Fetches:
    """Of a host that goes on writing until the test says that it does not."""

    def __init__(self):
        self.writing, self.services, self.given_up = [], [], 0

    def note(self, slot, number, done):
        """All slots are there."""

    def bring(self, _wanted, waiter):
        self.writing.append(waiter)
        return self.give_up

    def give_up(self):
        self.given_up += 1

    def ask(self, _):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.services.append(FarMemoryService(self, there, lambda _: None))
        return None, Files([here.detach()])


@pytest.fixture
def host():
    made = Fetches()
    yield made
    for waiter in made.writing:
        waiter.done(Brought())
    for service in made.services:
        service.connection.close()


def fetch(client, told):
    """Into a room that nobody but the client has; a weak reference to that."""
    room = Room()
    client.fetch(WANTED, room, told.append)
    return weakref.ref(room)


def is_gone(room):
    gc.collect()
    return room() is None


def test_a_room_is_given_back_when_the_host_has_let_go_of_it_behind_the_end(host, wait_until):
    client, told = FarMemoryClient(host.ask, 1), []
    rooms = [fetch(client, told) for _ in range(2)]
    wait_until(lambda: len(host.writing) == 2, WAIT)
    host.services[0].connection.hang_up()
    wait_until(lambda: len(told) == 2 and host.given_up == 2, WAIT)
    assert {brought.error for brought in told} == {errno.ECONNRESET}
    # It is in the middle of writing, and another connection does not change that.
    rooms.append(fetch(client, told))
    wait_until(lambda: len(host.writing) == 3, WAIT)
    host.writing.pop(0).done(Brought())
    assert not any(map(is_gone, rooms))
    host.writing.pop(0).done(Brought())
    wait_until(lambda: is_gone(rooms[0]) and is_gone(rooms[1]), WAIT)
    assert not is_gone(rooms[2])
    assert len(client._leases) == 1
    host.writing.pop().done(Brought())
    wait_until(lambda: len(told) == 3 and is_gone(rooms[2]), WAIT)
    assert told[2].error == 0
    client.close()


def test_rooms_are_given_back_when_the_host_is_gone(wait_until):
    """It has never read what it was asked."""
    ends = []

    def ask(_):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ends.append(there)
        return None, Files([here.detach()])

    client, told = FarMemoryClient(ask, 1), []
    room = fetch(client, told)
    assert not is_gone(room)
    ends[0].close()
    wait_until(lambda: told and is_gone(room) and not client._leases, WAIT)
    client.close()


def test_who_leaves_does_not_wait_for_a_host_that_goes_on_writing(host, wait_until):
    client, told = FarMemoryClient(host.ask, 1), []
    room = fetch(client, told)
    wait_until(lambda: host.writing, WAIT)
    client.close()
    assert told[0].error == errno.ECONNRESET
    assert not is_gone(room)  # the host may write there


def test_a_host_without_a_descriptor_says_so_and_may_have_one_the_next_time(
    host, monkeypatch, wait_until
):
    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    client, told = FarMemoryClient(host.ask, 1), []
    monkeypatch.setattr(descriptors, "duplicate", refuse)
    room = fetch(client, told)
    wait_until(lambda: told, WAIT)
    assert told[0].error == errno.EMFILE
    wait_until(lambda: is_gone(room) and client._line.connection.ended, WAIT)
    monkeypatch.undo()
    fetch(client, told)
    wait_until(lambda: host.writing, WAIT)
    host.writing.pop().done(Brought())
    wait_until(lambda: len(told) == 2, WAIT)
    assert told[1].error == 0
    client.close()
