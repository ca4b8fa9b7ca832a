"""Connections over which processes tell each other of refs: what becomes of files that are not sent."""

import os
import socket
import threading

import pytest

from conveyor.runtime.refs.connection import Connection

WAIT = 60


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


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
    fd = os.memfd_create("value")
    one.send("with a file", [fd])
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
    fd = os.memfd_create("value")
    one.send("behind the end", [fd])
    sent.set()
    one._writer.join(WAIT)
    assert not is_open(fd)
