"""What answers `conveyor status` for other nodes, in the driver."""

import os
import resource
import socket

import msgspec
import pytest

from conveyor.engine.events import EventLoop
from conveyor.engine.net.display import PLAIN, Display, NodeSeen

WAIT = 60


@pytest.fixture
def display(leaves_nothing):
    with leaves_nothing():
        events = EventLoop("display-test")
        made = Display(events, lambda stacks: [NodeSeen("there")])
        yield made
        made.close()
        events.close()


def asked(display):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(WAIT)
    sock.connect(display._listener.getsockname())
    sock.sendall(PLAIN)
    return sock


def answer(sock):
    with sock:
        data = b""
        while some := sock.recv(1 << 16):
            data += some
    return data


def test_it_answers(display):
    assert msgspec.msgpack.decode(answer(asked(display)), type=list[NodeSeen]) == [
        NodeSeen("there")
    ]


def test_who_asks_where_no_descriptor_is_left_is_turned_away(display, capfd):
    """Else it would wait, and the thread of the events would do nothing but try to accept it."""
    answer(asked(display))  # all is imported, and the thread is there
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(WAIT)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        sock.connect(display._listener.getsockname())
        with sock:
            assert sock.recv(1) == b""
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert capfd.readouterr().err == ""
    answer(asked(display))
