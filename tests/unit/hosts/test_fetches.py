"""Memory of a process of another host, which is this very one: what comes, how often, and what is left."""

import contextlib
import errno
import gc
import itertools
import os
import socket
import struct
import threading
import time
import weakref

import numpy as np
import pytest

from conveyor import descriptors
from conveyor.cluster import fetches, serving
from conveyor.cluster import fetches as source
from conveyor.cluster.fetches import Fetches, Waiter
from conveyor.cluster.servers import Memories
from conveyor.exceptions import SystemLimitError
from conveyor.runtime.remote_memory import SMALL, ReceiveFile, Wanted

WAIT = 60
#: Several pieces, of which the last is no whole one.
LARGE = (3 << 20) + 100


class OneProcess:
    """A board on which slot 3 is this process."""

    used = 4

    def gone(self, slot, incarnation):
        return slot != 3

    def is_remote(self, slot):
        return False

    def pid(self, slot):
        return os.getpid()


class Kept:
    """A value, as its keeper has it."""

    def __init__(self, size, number=7, parts=1):
        self.data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        self._anchor = np.array([number], np.uint64)
        at = [size * i // parts for i in range(parts + 1)]
        ranges = b"".join(
            struct.pack("<QQ", self.data.ctypes.data + a, b - a) for a, b in itertools.pairwise(at)
        )
        anchor = self._anchor.ctypes.data
        self.wanted = Wanted((3, 1), number, anchor, ranges, joined=parts > 1)


class Wants:
    """One who wants it."""

    def __init__(self, hosts, kept):
        self.kept, self.brought, self._told = kept, None, threading.Event()
        size = kept.wanted.size
        self.fd = os.memfd_create("room")
        os.truncate(self.fd, size + 50)
        self.done = []
        room = None if size < SMALL else ReceiveFile(self.fd, 50)
        self.waiter = Waiter(room, self._tell, self.done.append)
        self.give_up = hosts.fetches.fetch_for(kept.wanted, self.waiter)

    def _tell(self, brought):
        assert self.brought is None
        self.brought = brought
        self._told.set()

    @property
    def told(self):
        return self._told.is_set()

    def got(self):
        """Whether what has come is what its keeper has."""
        assert self._told.wait(WAIT)
        assert not self.brought.error, self.brought
        data = self.brought.data
        if data is None:
            data = os.pread(self.fd, self.kept.wanted.size, 50)
        assert os.pread(self.fd, 50, 0) == bytes(50)
        return data[: len(self.kept.data)] == self.kept.data.tobytes()

    def failed(self):
        assert self._told.wait(WAIT)
        return self.brought.error


class Hosts:
    """Of two hosts the one that fetches and the one where it lies. ``between(host, there)`` says what is at
    the other end of a connection. What is asked is not answered while that is held back."""

    def __init__(self):
        self.memories = Memories(OneProcess())
        self.fetches = Fetches({3: 1, 9: 2}.get, self.dial, lambda *_: None)
        self.dialled = []
        self.between = lambda host, there: self.memories.serve(there)
        self.held = threading.Event()
        self.held.set()

    def dial(self, host):
        here, there = socket.socketpair()
        self.dialled.append(here)
        self.between(host, there)
        return here

    def close(self):
        self.held.set()
        self.fetches.close()
        self.memories.close()


@pytest.fixture
def hosts(monkeypatch):
    made = Hosts()
    answer = Memories.answer

    def answer_later(memories, sock):
        sock.recv(1, socket.MSG_PEEK)
        made.held.wait(WAIT)
        answer(memories, sock)

    monkeypatch.setattr(Memories, "answer", answer_later)
    yield made
    made.close()


def flight_of(hosts, kept):
    return hosts.fetches._fetches[kept.wanted]


@pytest.mark.parametrize("size", [0, 10, SMALL - 64, SMALL, LARGE])
@pytest.mark.parametrize("parts", [1, 5])
def test_what_comes_is_what_is_kept(hosts, size, parts):
    kept = Kept(size, parts=parts)
    one = Wants(hosts, kept)
    assert one.got()
    assert (one.brought.data is None) == (size >= SMALL)
    assert not size or one.done[-1] == kept.wanted.size


def test_who_comes_while_it_is_on_its_way_sees_what_has_been_written_since(hosts, monkeypatch):
    kept = Kept(LARGE)
    put, late = Waiter.put, []

    def put_and_write(waiter, piece, at):
        put(waiter, piece, at)
        if not late:  # the first piece has come
            kept.data[0] += 1
            late.append(Wants(hosts, kept))

    first_value = kept.data.tobytes()
    monkeypatch.setattr(Waiter, "put", put_and_write)
    first = Wants(hosts, kept)
    assert first._told.wait(WAIT)
    assert os.pread(first.fd, LARGE, 50) == first_value
    assert late[0].got()
    assert hosts.fetches.transfers == 2


def test_what_nobody_wants_any_more_is_given_up(hosts, wait_until):
    """Though the other host says nothing."""
    kept = Kept(LARGE)
    hosts.held.clear()
    one, late = Wants(hosts, kept), Wants(hosts, kept)
    wait_until(lambda: flight_of(hosts, kept).talks is not None, WAIT)
    late.give_up()
    assert late.failed() == errno.ECANCELED
    assert not one.told
    one.give_up()
    assert one.failed() == errno.ECANCELED
    wait_until(lambda: not hosts.fetches._fetches, WAIT)
    assert hosts.dialled[0].fileno() == -1
    hosts.held.set()
    assert Wants(hosts, kept).got()


def test_who_gives_up_takes_nothing_from_the_others(hosts, wait_until):
    kept = Kept(LARGE)
    hosts.held.clear()
    one, late = Wants(hosts, kept), Wants(hosts, kept)
    wait_until(lambda: flight_of(hosts, kept).talks is not None, WAIT)
    one.give_up()
    hosts.held.set()
    assert one.failed() == errno.ECANCELED
    assert late.got()
    one.give_up()  # twice, or late
    late.give_up()


def test_it_goes_on_over_another_connection_from_where_it_has_come_to(hosts):
    kept = Kept(LARGE)
    allowed = [1 << 20, 1 << 20, 0, LARGE * 2]

    def between(host, there):
        here, other = socket.socketpair()
        hosts.memories.serve(other)
        threading.Thread(target=relay, args=(there, here, allowed.pop(0))).start()

    def relay(to, of, most):
        with contextlib.suppress(OSError), to, of:
            of.sendall(to.recv(1 << 16))
            while most > 0 and (some := of.recv(min(most, 1 << 16))):
                to.sendall(some)
                most -= len(some)

    hosts.between = between
    one = Wants(hosts, kept)
    assert one.got()
    assert one.done == sorted(set(one.done))  # nothing twice
    assert not allowed


def test_where_no_thread_is_left_it_comes_on_its_callers(hosts, monkeypatch):
    kept = Kept(LARGE)
    assert Wants(hosts, kept).got()  # the other host has its thread
    here = hosts.fetches._sources[1]
    monkeypatch.setattr(source, "_IDLE", 0.0)
    with here._queue_lock:
        here._arrival.notify_all()

    def refuse(target, name, *args):
        raise SystemLimitError(errno.EAGAIN, "no thread is left")

    deadline = time.monotonic() + WAIT
    while here._workers and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    monkeypatch.setattr(source.threads, "start", refuse)
    one = Wants(hosts, kept)
    assert one.told
    assert one.got()
    assert not hosts.fetches._fetches


def test_a_room_that_cannot_be_written_to_is_its_own_affair(hosts, wait_until):
    kept = Kept(LARGE)
    fd = os.open("/dev/null", os.O_RDONLY)
    told = []
    hosts.fetches.fetch_for(kept.wanted, Waiter(ReceiveFile(fd, 0), told.append))
    os.close(fd)
    assert Wants(hosts, kept).failed() in (0, errno.EBADF)
    wait_until(lambda: told, WAIT)  # the other one may have had a flight, and a thread, of its own
    assert told[0].error == errno.EBADF
    assert Wants(hosts, kept).got()


def test_who_has_been_told_is_let_go_of_at_once(hosts, wait_until):
    """It has the room, which is not to wait for a garbage collection."""
    gc.disable()
    try:
        one = Wants(hosts, Kept(LARGE))
        assert one.got()
        alive = weakref.ref(one)
        del one
        wait_until(lambda: alive() is None, WAIT)
    finally:
        gc.enable()


def test_what_no_copy_can_be_kept_of_is_fetched_again(hosts, monkeypatch):
    create, refused = descriptors.memory_file, []

    def refuse(name):
        if name == "conveyor-value":
            refused.append(name)
            raise OSError(errno.EMFILE, "no descriptor is left")
        return create(name)

    monkeypatch.setattr(descriptors, "memory_file", refuse)
    kept = Kept(LARGE)
    hosts.held.clear()
    several = [Wants(hosts, kept) for _ in range(3)]
    hosts.held.set()
    assert all(one.got() for one in several)
    assert hosts.fetches.transfers == 2
    assert refused


def test_digests_of_any_size_are_not_taken(hosts, monkeypatch):
    monkeypatch.setattr(fetches, "LINGER", 60.0)
    kept = Kept(LARGE)
    assert Wants(hosts, kept).got()
    assert Wants(hosts, kept).got()

    def lie(memories, sock):
        if not sock.recv(1 << 16):
            raise ConnectionError("it has ended")
        sock.sendall(struct.pack("!iQ", 0, 1 << 40))

    monkeypatch.setattr(Memories, "answer", lie)
    for sock in hosts.dialled:  # those who answer over these tell no lies
        serving.break_off(sock)
    assert Wants(hosts, kept).failed() == errno.ECONNABORTED
