"""Pumps between two hosts, where a machine was suspended, or the system refuses something."""

import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.hosts import Node
from conveyor import _core

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
    pump = _core.HostPump(_core.ProcessTable.create(4), 0, 60.0)
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
