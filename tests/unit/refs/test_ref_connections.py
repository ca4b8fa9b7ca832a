"""Connections over which processes tell each other of refs: what becomes of files that are not sent."""

import os
import socket
import threading

import pytest

from conveyor import _core
from conveyor.codec import SentDefinitions, set_up_codec
from conveyor.runtime.messages import Connection, receive_message

set_up_codec()

WAIT = 60


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def send_a_file(connection):
    """The descriptor of a value that nobody else keeps."""
    snapshot = _core.Snapshot(bytes(1000), SentDefinitions(), 1)
    fd = snapshot.fd
    assert is_open(fd)
    connection.send("with a file", snapshot)
    return fd


@pytest.fixture
def connection():
    """One end, and the socket that is the other one."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = Connection(here, "test", lambda message, fds: None, lambda: None)
    yield made, there
    made.close()
    there.close()


def test_a_file_that_is_sent_when_the_other_side_is_gone_is_closed(connection):
    """It may have been made on another thread meanwhile, for which the end is no news."""
    one, there = connection
    there.close()
    one._writer.join(WAIT)
    assert not one._writer.is_alive()
    fd = send_a_file(one)
    assert not is_open(fd)


def test_a_file_that_is_sent_while_the_connection_ends_is_closed(connection):
    """The end comes between, and nothing more is taken from the queue."""
    one, _ = connection
    ended, sent = threading.Event(), threading.Event()

    def hold_up():
        ended.set()
        sent.wait(WAIT)

    one.soon(hold_up)
    assert ended.wait(WAIT)
    one._outgoing.put(None)  # as the end does
    fd = send_a_file(one)
    sent.set()
    one._writer.join(WAIT)
    assert not is_open(fd)


def test_values_that_wait_to_be_sent_take_no_descriptors(connection, opened_since):
    """Any number of them may wait for a process that is slow to take them."""
    one, there = connection
    begin = threading.Event()
    one.soon(begin.wait)
    snapshot = _core.Snapshot(bytes(1000), SentDefinitions(), 1)
    opened = opened_since()
    for number in range(100):
        one.send(number, snapshot)
    assert not opened()
    begin.set()
    there.settimeout(WAIT)
    for number in range(100):
        (message,), (fd,) = receive_message(there)
        assert message == number
        assert os.fstat(fd).st_ino == os.fstat(snapshot.fd).st_ino
        os.close(fd)


def test_work_for_a_connection_that_has_ended_is_kept_nowhere(connection):
    one, there = connection
    there.close()
    one._writer.join(WAIT)
    assert not one._writer.is_alive()
    one.soon(lambda: None)
    assert one._outgoing.empty()


def test_what_was_said_before_a_message_that_cannot_be_pickled_arrives(connection):
    one, there = connection
    begin = threading.Event()
    one.soon(begin.wait)
    for message in (1, 2, threading.Lock(), 3):
        one.send(message)
    begin.set()
    there.settimeout(WAIT)
    assert [receive_message(there)[0] for _ in range(2)] == [[1], [2]]
    with pytest.raises(ConnectionError):
        receive_message(there)
