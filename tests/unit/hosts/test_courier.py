"""Who gets descriptors of the socket on which a session on Ray waits for its processes."""

import os
import secrets
import select
import socket
import threading
from array import array
from types import SimpleNamespace

import pytest
from no_descriptors import none_at_all

from conveyor import local_sockets
from conveyor.engines.ray.bootstrap import Farewell, Here, Welcome, read, version, write
from conveyor.engines.ray.processes import ProcessListener
from conveyor.local_sockets import UnprovenPeerError, prove
from conveyor.runtime.events import EventLoop


class Driver:
    """A courier, and what it has told of those who came."""

    def __init__(self):
        self.events = EventLoop("courier-test")
        self.ended = threading.Event()
        self.farewells = []
        self.arrived = []
        self.refusals = []
        self.process_listener = ProcessListener(self.events, self._on_farewell)
        self.process_listener.start()
        self.reader, self.writer = os.pipe()

    def _on_farewell(self, pid, code):
        self.farewells.append((pid, code))
        self.ended.set()

    def expect(self, number):
        def arrive(pid, stderr):
            self.arrived.append((pid, stderr))
            return [self.writer]

        return self.process_listener.expect(number, arrive, self.refusals.append)

    def settle(self):
        """Wait until the thread has seen what was sent so far."""
        for _ in range(2):
            done = threading.Event()
            self.events.call(done.set)
            assert done.wait(60)

    def connect(self):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # With a limit of time it would not wait for a place among those who are to be let in.
        connection.connect("\0" + self.process_listener.address)
        connection.settimeout(60)
        return connection

    def come(self, number, key, stderr=""):
        """A process of that number, as it connects and says what it is."""
        connection = self.connect()
        prove(connection, key, number)
        connection.send(write(Here(version(), stderr)))
        return connection

    def close(self):
        self.events.call(self.process_listener.close)
        self.events.close()
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def driver(leaves_nothing):
    with leaves_nothing():
        made = Driver()
        yield made
        made.close()


def hears_nothing(connection):
    """It is hung up, without a byte."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def answer(connection):
    data, ancillary, _, _ = connection.recvmsg(4096, socket.CMSG_SPACE(64))
    fds = array("i")
    for _, _, rights in ancillary:
        fds.frombytes(rights)
    return read(data, Welcome), fds.tolist()


def test_who_was_expected_is_given_descriptors(driver):
    key = driver.expect(1)
    with driver.come(1, key, "/dev/null") as connection:
        welcome, (fd,) = answer(connection)
        assert welcome == Welcome()
        assert os.stat(fd).st_ino == os.stat(driver.writer).st_ino
        os.close(fd)
        assert driver.arrived == [(os.getpid(), "/dev/null")]
        connection.send(write(Farewell(3)))
        assert driver.ended.wait(60)
        assert driver.farewells == [(os.getpid(), 3)]
    assert driver.process_listener._listener.strangers == 0


@pytest.mark.parametrize(
    "said",
    [
        b"\0",
        b"\xc1" * 100,
        b"x" * 4096,
        secrets.token_bytes(500),
        write(Here(version(), "")),
        write(Farewell(0)),
        local_sockets._SIGNED.pack(b"conveyor", 1, b"\0" * 16) + b"\0" * 32,
        local_sockets._SIGNED.pack(b"conveyor", 2, b"\0" * 16) + b"\0" * 32,
    ],
    ids=["zero", "no hello", "long", "random", "says what it is", "another", "wrong key", "nobody"],
)
def test_strangers_are_dropped_and_counted(driver, said):
    key = driver.expect(1)
    with driver.connect() as connection:
        connection.send(said)
        assert hears_nothing(connection)
    assert driver.process_listener._listener.strangers == 1
    assert driver.arrived == []
    with driver.come(1, key) as connection:  # and nobody else is disturbed
        welcome, (fd,) = answer(connection)
        os.close(fd)
        assert welcome == Welcome()


def test_a_secret_is_good_once(driver):
    key = driver.expect(1)
    with driver.come(1, key) as first, driver.connect() as second:
        _, fds = answer(first)
        os.close(fds[0])
        with pytest.raises(UnprovenPeerError, match="hung up"):
            prove(second, key, 1)
    assert len(driver.arrived) == 1


def test_one_that_is_not_wanted_any_more_is_a_stranger(driver):
    key = driver.expect(1)
    driver.events.call(lambda: driver.process_listener.forget(1))
    with driver.connect() as connection, pytest.raises(UnprovenPeerError, match="hung up"):
        prove(connection, key, 1)


def test_a_flood_of_silent_ones_takes_no_more_than_is_kept(driver, monkeypatch):
    monkeypatch.setattr(local_sockets, "_MAX_UNPROVEN", 8)
    key = driver.expect(1)
    silent = [driver.connect() for _ in range(30)]
    try:
        with driver.come(1, key) as connection:
            welcome, (fd,) = answer(connection)
            os.close(fd)
            assert welcome == Welcome()
            assert hears_nothing(silent[0])
            assert len(driver.process_listener._listener._unproven) <= 8
    finally:
        for one in silent:
            one.close()


def test_without_a_descriptor_who_comes_waits_and_the_loop_goes_on_with_the_rest(
    driver, wait_until, caplog
):
    key, process_listener = driver.expect(1), driver.process_listener
    process_listener._listener._pauses = SimpleNamespace(
        next=lambda: 600.0, begin_anew=lambda: None
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(60)
        with none_at_all():
            connection.connect("\0" + process_listener.address)
            wait_until(lambda: driver.events._resting, 60)
            driver.settle()
        assert "they wait until it can" in caplog.text
        # It may be that there is one again: who has come is heard then.
        driver.events.call(lambda: driver.events.rest(process_listener._listener.fileno(), 0.0))
        prove(connection, key, 1)
        connection.send(write(Here(version(), "")))
        welcome, (fd,) = answer(connection)
        os.close(fd)
        assert welcome == Welcome()


def test_its_end_is_heard_though_a_forked_child_has_copies(driver):
    """A guest leaves when the session ends, whoever has a copy of the driver's end of its connection."""
    key = driver.expect(1)
    with driver.come(1, key) as connection:
        _, (fd,) = answer(connection)
        os.close(fd)
        driver.settle()
        end, waits = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(waits)
            os.read(end, 1)
            os._exit(0)
        try:
            driver.events.call(driver.process_listener.close)
            connection.settimeout(60)
            assert hears_nothing(connection)
        finally:
            os.close(waits)
            os.close(end)
            os.waitpid(child, 0)


def test_other_versions_are_told(driver):
    key = driver.expect(1)
    with driver.connect() as connection:
        prove(connection, key, 1)
        connection.send(write(Here("Conveyor 0.0", "")))
        welcome, fds = answer(connection)
    assert fds == []
    assert "it is Conveyor 0.0, and the driver Conveyor" in welcome.refused
    driver.settle()
    assert driver.refusals == [welcome.refused]
    assert driver.arrived == []


def test_a_farewell_is_heard_of_one_that_has_not_read_all(driver):
    """The kernel tells first that what was said to it is lost, and what it has said only then."""
    key = driver.expect(1)
    goes_on = threading.Event()
    with driver.come(1, key) as connection:
        _, (fd,) = answer(connection)
        os.close(fd)
        driver.events.call(lambda: driver.process_listener.tell_to_leave(os.getpid()))
        driver.events.call(lambda: goes_on.wait(60))
        assert select.select([connection], [], [], 60)[0]
        connection.send(write(Farewell(7)))
    goes_on.set()
    assert driver.ended.wait(60)
    assert driver.farewells == [(os.getpid(), 7)]
