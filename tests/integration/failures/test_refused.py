"""What the system refuses once: whoever needed it is told or gets it later, and nobody waits in vain.

The same for every call and allocation in turn is ``tests/faults``; these are the cases that it has found.
"""

import errno
import os
import select
import signal
import socket
import sys
import threading

import cloudpickle
import pytest
from integration_helpers import WAIT, get, hold

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import (
    ActorDiedError,
    SystemLimitError,
    TaskError,
)
from conveyor.runtime import context, threads

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("local")


@conveyor.remote
class Actor:
    def add(self, x, y=1):
        return x + y

    def pid(self):
        return os.getpid()

    def ask(self, other, x):
        return conveyor.get(other.add.remote(x), timeout=WAIT)

    def open(self, refs):
        return conveyor.get(refs, timeout=WAIT)

    def late(self, latch, x):
        hold(latch)
        return x


@pytest.fixture
def refuse_thread(monkeypatch):
    """``refuse_thread(name)``: the next thread of the library's that is called so cannot be started."""
    refused = set()
    start = threading.Thread.start

    def start_or_refuse(thread):
        if thread.name in refused:
            refused.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threads.Background, "start", start_or_refuse)
    yield lambda name: refused.add(f"conveyor-{name}")
    assert not refused, "the thread was not wanted"


def test_a_restart_that_gets_no_thread_says_so_and_can_be_tried_again(refuse_thread):
    actor = Actor.remote()
    with InputNode() as inp:
        graph = actor.add.bind(inp).compile()
    os.kill(get(actor.pid.remote()), signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        get(graph.execute(1))
    refuse_thread("restart")
    with pytest.raises(ActorDiedError, match="could not be started again: cannot start the thread"):
        graph.restart()
    graph.restart()
    assert get(graph.execute(1)) == 2


def test_an_actor_is_dead_if_there_is_no_thread_to_restart_it(refuse_thread, wait_until):
    actor = Actor.options(max_restarts=-1).remote()
    pid = get(actor.pid.remote())
    refuse_thread("restart")
    os.kill(pid, signal.SIGKILL)
    driver = context.current()
    wait_until(lambda: not driver.table.record(actor._id).alive, what="its death to be known")
    with pytest.raises(ActorDiedError, match="ulimit -u"):
        get(actor.add.remote(1))


def test_what_an_actor_asks_the_driver_for_is_answered_without_a_thread(refuse_thread):
    a, b = Actor.remote(), Actor.remote()
    assert get([a.add.remote(1), b.add.remote(1)]) == [2, 2]
    refuse_thread("request")
    with pytest.raises(TaskError, match="cannot start the thread 'conveyor-request'"):
        get(a.ask.remote(b, 1))
    assert get(a.ask.remote(b, 1)) == 2


@pytest.mark.parametrize("thread", ["refs-out", "refs-in"])
def test_a_connection_that_gets_no_thread_is_opened_the_next_time(refuse_thread, thread):
    a, b = Actor.remote(), Actor.remote()
    refuse_thread(thread)
    with pytest.raises(TaskError, match="cannot start the thread"):
        get(a.open.remote([b.add.remote(1)]))
    assert get(a.open.remote([b.add.remote(1)])) == [2]


def test_an_outcome_without_a_thread_of_its_own_is_sent(refuse_thread, latches, wait_until):
    a, b = Actor.remote(), Actor.remote()
    latch = latches()
    value = "x" * 50_000  # what fits into a message needs no thread
    ref = b.late.remote(latch.path, value)
    opened = a.open.remote([ref])
    wait_until(lambda: context.current().exports._entries, what="the ref to be asked for")
    refuse_thread("export")
    latch.open()
    assert get(opened) == [value]


def test_who_waits_for_a_ref_is_told_that_nobody_can_watch_it(refuse_thread, latches):
    a, b = Actor.remote(), Actor.remote()
    latch = latches()
    ref = b.late.remote(latch.path, 1)
    refuse_thread("watcher")
    with pytest.raises(TaskError, match="cannot start the thread 'conveyor-watcher'"):
        get(a.open.remote([ref]))
    latch.open()
    # Who was told keeps to it as long as it has the ref.
    assert get(Actor.remote().open.remote([ref])) == [1]


def test_a_ref_without_a_descriptor_gets_one_the_next_time(refuse_thread, latches):
    actor = Actor.remote()
    latch = latches()
    ref = actor.late.remote(latch.path, 1)
    refuse_thread("watcher")
    with pytest.raises(SystemLimitError):
        ref.fileno()
    fd = ref.fileno()
    latch.open()
    assert select.select([fd], [], [], WAIT)[0] == [fd]


def test_a_call_that_nobody_would_send_is_not_made(refuse_thread, latches):
    a, b = Actor.remote(), Actor.remote()
    latch = latches()
    ref = b.late.remote(latch.path, 1)
    refuse_thread("pump")
    with pytest.raises(SystemLimitError):
        a.add.remote(ref)
    latch.open()
    assert get(ref) == 1
    assert not context.current().link(a._id).has_pending
    assert get(a.add.remote(1)) == 2


@pytest.mark.parametrize("what", ["send_fds", "recv_fds"])
def test_a_message_that_the_kernel_refuses_for_the_moment_comes_all_the_same(monkeypatch, what):
    a, b = Actor.remote(), Actor.remote()
    assert get(a.open.remote([b.add.remote(1)])) == [2]
    real, refused = getattr(socket, what), []

    def refuse_once(sock, *args):
        if sock.type == socket.SOCK_SEQPACKET and not refused:
            refused.append(sock)
            raise OSError(errno.ENOBUFS, "no room")
        return real(sock, *args)

    monkeypatch.setattr(socket, what, refuse_once)
    for _ in range(2):  # a thread may be inside of the real one
        assert get(a.open.remote([b.add.remote(1)])) == [2]
    assert refused
