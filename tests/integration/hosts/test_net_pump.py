"""Values between two hosts, each a process with a board and a pump of its own.

They come whole, in their order and once, whatever happens to the connection.
"""

import multiprocessing
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.hosts import Node
from conveyor import _core
from conveyor.cluster.handshake import Identity, dial, new_token
from conveyor.cluster.listener import Listener
from conveyor.codec.errors import decode_error
from conveyor.exceptions import OutOfMemoryError, SerializationError

TOKEN = new_token()
FRAMES = 10_000
WINDOW = [10.0]


def entry(body, address, failed):
    try:
        body(address)
    except BaseException:
        traceback.print_exc()
        failed.set()
        raise


class Pair:
    """Host 0 here, which listens, and host 1 in a process that runs ``body`` and dials."""

    def __init__(self, body, window=10.0, between=None):
        WINDOW[0] = window
        self.node = Node(0, window=window)
        self.node.mirror()
        self.listener = Listener(
            ("127.0.0.1", 0), TOKEN, Identity(0, "test"), lambda sock, _: self.node.connect(sock)
        )
        self.between = between and between(self.listener.address)
        address = (self.between or self.listener).address
        context = multiprocessing.get_context("fork")
        self.failed = context.Event()
        self.process = context.Process(target=entry, args=(body, address, self.failed))
        self.process.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.close()
        self.node.stop()
        self.process.join(60)
        alive = self.process.is_alive()
        self.process.kill()
        self.process.join()
        self.process.close()
        if self.between:
            self.between.close()
        assert not alive
        assert not self.failed.is_set()


def elsewhere(address):
    """Host 1, in its own process; it dials again whenever its connection has broken."""
    node = Node(1, window=WINDOW[0])
    node.mirror()

    def keep_connected():
        while True:
            try:
                sock, _ = dial(address, TOKEN, Identity(1, "test"), 60)
            except OSError:
                return  # the session is over
            node.connect(sock)
            try:
                node.wait_event(_core.HOST_DISCONNECTED, 120)
            except OSError:
                return

    threading.Thread(target=keep_connected, daemon=True).start()
    return node


def echo(address):
    node = elsewhere(address)
    writer, reader = node.ends()
    number = 0
    while (value := node.receive(reader)) is not None:
        node.send(writer, value, number)
        number += 1
    node.send(writer, None, number)
    node.wait_lost()


@pytest.mark.parametrize("size", [8, 1000, 4096, 100_000, 1 << 20, 17 << 20, 64 << 20])
def test_arrays_of_any_size_come_whole(size):
    with Pair(echo) as pair:
        writer, reader = pair.node.ends()
        for n in range(3):
            value = np.arange(size // 8, dtype=np.int64) * (n + 1)
            pair.node.send(writer, value, n)
            back = pair.node.receive(reader)
            assert back.dtype == value.dtype
            assert np.array_equal(back, value)
        pair.node.send(writer, None, 3)
        assert pair.node.receive(reader) is None


def echo_later(address):
    node = elsewhere(address)
    writer, reader = node.ends()
    assert node.receive(reader) == "the other has it"
    node.mirror(2)
    later, from_later = node.ends(2)
    for number in range(3):
        node.send(later, node.receive(from_later), number)
    assert node.receive(reader) is None
    node.send(writer, None, 0)
    node.wait_lost()


def test_a_segment_that_one_host_makes_later_carries_both_ways():
    """Who has it first says so, to a host that has none of that number yet."""
    with Pair(echo_later) as pair:
        node = pair.node
        node.wait_event(_core.HOST_CONNECTED)
        writer, reader = node.ends()
        node.mirror(2)
        later, from_later = node.ends(2)
        node.send(later, 0, 0)
        node.send(writer, "the other has it", 0)
        for number in range(3):
            assert node.receive(from_later) == number
            if number < 2:
                node.send(later, number + 1, number + 1)
        node.send(writer, None, 1)
        assert node.receive(reader) is None


def test_values_of_any_kind_come_as_they_are():
    with Pair(echo) as pair:
        writer, reader = pair.node.ends()
        values = [{"a": [1, 2.5, "x"]}, b"\0" * 5000, ("t", 1), "text", 2**70, ValueError("no")]
        for n, value in enumerate(values):
            pair.node.send(writer, value, n)
            back = pair.node.receive(reader)
            assert repr(back) == repr(value)
        pair.node.send(writer, None, len(values))
        assert pair.node.receive(reader) is None


def test_nothing_is_lost_or_comes_twice_while_connections_are_cut():
    with Pair(echo) as pair:
        node = pair.node
        writer, reader = node.ends()
        randomly = random.Random(1)
        got = []
        done = threading.Event()

        def receive():
            with_payload = np.random.default_rng(0).bytes(1 << 20)
            for _ in range(FRAMES):
                number, payload = node.receive(reader)
                assert bytes(payload) == with_payload[: len(payload)]
                got.append(number)
            done.set()

        receiver = threading.Thread(target=receive)
        receiver.start()
        payload = np.frombuffer(np.random.default_rng(0).bytes(1 << 20), np.uint8)
        cuts = 0
        for n in range(FRAMES):
            size = (
                randomly.choice([0, 8, 100, 3000])
                if n % 100
                else randomly.choice([100_000, 1 << 20])
            )
            node.send(writer, (n, payload[:size]), n)
            if randomly.random() < 0.003:
                node.pump.disconnect(1, "cut by the test")
                cuts += 1
        receiver.join(200)
        assert done.is_set()
        assert got == list(range(FRAMES))
        assert cuts > 10
        assert node.pump.counts(1)[4] > 5
        node.send(writer, None, FRAMES)
        assert node.receive(reader) is None


@pytest.mark.parametrize(
    ("meta", "error", "what"),
    [
        (_core.NOT_BETWEEN_HOSTS, SerializationError, "get the refs first"),
        (_core.HOST_IS_FULL, OutOfMemoryError, "no memory left for it"),
    ],
)
def test_what_stands_for_a_frame_that_could_not_come_says_why(meta, error, what):
    raised = decode_error(meta)
    assert isinstance(raised, error)
    assert what in str(raised)


def test_a_host_that_is_killed_is_dead_soon_after_its_window():
    with Pair(dawdle, window=1.0) as pair:
        pair.node.wait_event(_core.HOST_CONNECTED)
        pair.process.kill()
        reason = pair.node.wait_event(_core.HOST_LOST, 20.0)
        assert "no connection" in reason
        assert pair.node.board.gone(1, 1)


FROZEN = """
import select, socket, sys
from benchmarks.hosts import Node

nodes = [Node(number, window=2.0) for number in (0, 1)]
for node, sock in zip(nodes, socket.socketpair()):
    node.connect(sock)
for node in nodes:
    node.wait_event(_core.HOST_CONNECTED)
print("connected", flush=True)
input()
before = [node.pump.counts(1 - node.number)[3] for node in nodes]
while any(node.pump.counts(1 - node.number)[3] < 2 + was for node, was in zip(nodes, before)):
    pass  # both have said something since
print([event for node in nodes for event in node.pump.events()], flush=True)
for node in nodes:
    node.stop()
"""


def test_time_in_which_nobody_has_run_is_nobodys_silence():
    """A machine that has been suspended goes on with the connections that it had."""
    program = subprocess.Popen(
        [sys.executable, "-c", "from conveyor import _core\n" + FROZEN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    with program:
        try:
            assert program.stdout.readline() == "connected\n"
            program.send_signal(signal.SIGSTOP)
            time.sleep(2.5)  # longer than the silence that ends a connection
            program.send_signal(signal.SIGCONT)
            out, _ = program.communicate("\n", timeout=60)
        finally:
            program.kill()
    assert out == "[]\n"


def dawdle(address):
    elsewhere(address).wait_lost()


def test_a_socket_that_is_none_is_refused():
    node = Node(0)
    with pytest.raises(OSError, match="descriptor"):
        node.pump.connect(10_000, 1)
    node.stop()
    one, other = socket.socketpair()
    with one, other, pytest.raises(OSError, match="stopped"):
        node.pump.connect(one.fileno(), 1)


def test_what_python_has_no_memory_for_is_told_the_next_time():
    memory = pytest.importorskip(
        "_testcapi", reason="allocations of Python's fail on demand with it"
    )
    pump = _core.HostPump(_core.Board.create(4), 0, 60.0)
    here, there = socket.socketpair()
    with here:
        pump.connect(here.fileno(), 1)
    there.close()
    assert select.select([pump.notice_fd], [], [], 60)[0]
    told, refused = None, 0
    for allowed in range(100):
        memory.set_nomemory(allowed, 0)  # of so many allocations
        try:
            told = pump.events()
        except MemoryError:
            refused += 1
        finally:
            memory.remove_mem_hooks()
        if told is not None:
            break
        assert select.select([pump.notice_fd], [], [], 0)[0]  # it is to be asked again
    pump.stop()
    assert [(kind, host) for kind, host, _ in told] == [(_core.HOST_DISCONNECTED, 1)]
    assert refused
