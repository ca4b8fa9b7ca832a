"""Actors whose main thread ends while their process goes on: by os.exec*, or alone."""

import ctypes
import os
import platform
import signal
import threading
import time

import pytest
from integration_helpers import WAIT, compiled, get

import conveyor
from conveyor.engines import headless
from conveyor.engines.headless import goes_on
from conveyor.exceptions import ActorDiedError, ActorRestartedError

#: The system call that ends the calling thread and nothing else.
EXIT_OF_A_THREAD = {"x86_64": 60, "aarch64": 93}[platform.machine()]

NAMED = "ended its main thread but not its process, as os.exec"


@conveyor.remote
class Actor:
    def pid(self):
        return os.getpid()

    def same(self, x):
        return x

    def leave(self, how):
        getattr(self, f"_{how}")()
        time.sleep(600)

    def _exec(self):
        os.execv("/bin/sleep", ["sleep", "600"])

    def _exec_in_a_thread(self):
        threading.Thread(target=self._exec).start()

    def _end_the_thread(self):
        threading.Thread(target=time.sleep, args=(600,)).start()
        ctypes.CDLL(None).syscall(EXIT_OF_A_THREAD, 0)

    def _end_the_thread_beside_a_busy_one(self):
        threading.Thread(target=_work).start()
        ctypes.CDLL(None).syscall(EXIT_OF_A_THREAD, 0)

    def _be_killed(self):
        for _ in range(20):
            threading.Thread(target=time.sleep, args=(600,)).start()
        os.kill(os.getpid(), signal.SIGKILL)


def _work():
    while True:
        pass


WAYS = ["exec", "exec_in_a_thread", "end_the_thread", "end_the_thread_beside_a_busy_one"]


def ended(pid):
    """Wait until there is no process ``pid`` that is more than a zombie."""
    end = time.monotonic() + WAIT
    while True:
        try:
            with open(f"/proc/{pid}/stat", "rb") as stat:
                if stat.read().rpartition(b")")[2].split()[0] == b"Z":
                    return
        except OSError:
            return
        assert time.monotonic() < end, f"{pid} has not ended"
        time.sleep(0.01)


@pytest.mark.parametrize("how", WAYS)
def test_the_process_is_ended_and_the_actor_comes_back(local, how):
    actor = Actor.options(max_restarts=1).remote()
    before = get(actor.pid.remote())
    with pytest.raises(ActorDiedError):
        get(actor.leave.remote(how))
    # Not after the 600 s of what it has become.
    assert get(actor.pid.remote()) != before
    ended(before)


@pytest.mark.parametrize("how", WAYS)
def test_the_error_says_what_has_happened(local, how):
    actor = Actor.remote()
    pid = get(actor.pid.remote())
    with pytest.raises(ActorDiedError):
        get(actor.leave.remote(how))
    ended(pid)
    end = time.monotonic() + WAIT
    while True:  # until the exit is reported
        with pytest.raises(ActorDiedError) as caught:
            get(actor.pid.remote())
        if caught.value.signal or time.monotonic() > end:
            break
    assert NAMED in str(caught.value)
    assert "while running leave (call 2)" in str(caught.value)
    assert "out-of-memory" not in str(caught.value)
    assert caught.value.signal == signal.SIGKILL


def test_a_graph_is_restarted_after_an_exec(local):
    actor = Actor.remote()
    pid = get(actor.pid.remote())
    graph = compiled(lambda inp: actor.leave.bind(inp))
    with pytest.raises(ActorDiedError):
        get(graph.execute("exec"))
    graph.restart()
    assert get(actor.pid.remote()) != pid
    graph.teardown()


def test_an_exec_in_the_constructor_is_told(local):
    class Replaced:
        def __init__(self):
            os.execv("/bin/sleep", ["sleep", "600"])

        def ping(self):
            return 1

    with pytest.raises(ActorDiedError):
        get(conveyor.remote(Replaced).remote().ping.remote())


def test_the_session_ends_at_once_after_an_exec(local):
    actor = Actor.remote()
    pid = get(actor.pid.remote())
    with pytest.raises(ActorDiedError):
        get(actor.leave.remote("exec"))
    conveyor.shutdown()
    assert not os.path.exists(f"/proc/{pid}")


def test_a_process_that_dies_by_itself_is_not_said_to_have_gone_on(local):
    for _ in range(10):
        actor = Actor.options(max_restarts=1).remote()
        with pytest.raises(ActorRestartedError) as caught:
            get(actor.leave.remote("be_killed"))
        get(actor.pid.remote())  # its end has been reported by now
        assert NAMED not in str(caught.value)


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def forked(child):
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(1)
    return pid


def reap(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_zombie_does_not_go_on():
    pid = forked(lambda: os._exit(0))
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        assert goes_on(pid) is False
    finally:
        os.waitpid(pid, 0)


def test_a_thread_that_vanishes_may_have_become_the_main_one(monkeypatch):
    """An exec ends the main thread, whose number the thread gets that has called it: in this order."""
    main, over = os.getpid(), threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()

    vanished = []

    def look(pid, thread):
        if thread == main:
            return (b"R", False, False) if vanished else (b"Z", True, False)
        vanished.append(thread)
        raise FileNotFoundError(thread)

    monkeypatch.setattr(headless, "_look", look)
    try:
        assert goes_on(main) is True
    finally:
        over.set()
        other.join()


def test_another_program_goes_on(pipe):
    def become():
        os.dup2(pipe[1], 1)
        os.execv("/bin/sh", ["sh", "-c", "echo; while :; do :; done"])

    pid = forked(become)
    try:
        os.read(pipe[0], 1)
        assert goes_on(pid) is True
    finally:
        reap(pid)
