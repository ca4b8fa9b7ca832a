"""The event loop, with real descriptors."""

import os
import signal
import threading

import pytest

from conveyor.runtime.events import EventLoop

WAIT = 60.0


@pytest.fixture
def events():
    events = EventLoop()
    yield events
    events.close()


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def settle(events):
    """Until everything that was to be done by now is done."""
    done = threading.Event()
    events.call(done.set)
    assert done.wait(WAIT)


def test_nothing_exists_before_the_first_use(opened_since):
    opened, threads = opened_since(), set(threading.enumerate())
    events = EventLoop()
    assert not opened()
    assert threads.issuperset(threading.enumerate())
    events.close()
    events.add(0, print)
    events.call(print)
    assert not opened()
    assert threads.issuperset(threading.enumerate())


def test_readable_descriptors_call_back(events, pipe):
    reader, writer = pipe
    got = []
    seen = threading.Event()

    def read():
        got.append(os.read(reader, 10))
        seen.set()

    events.add(reader, read)
    for data in (b"a", b"b"):
        seen.clear()
        os.write(writer, data)
        assert seen.wait(WAIT)
    assert got == [b"a", b"b"]
    events.remove(reader)
    events.remove(reader)
    os.write(writer, b"c")
    settle(events)
    assert got == [b"a", b"b"]


def test_calls_run_in_order_on_one_thread(events):
    got = []
    for index in range(100):
        events.call(lambda index=index: got.append((index, events.on_thread())))
    settle(events)
    assert got == [(index, True) for index in range(100)]
    assert not events.on_thread()


def test_a_failing_callback_is_printed_and_harms_nothing(events, pipe, capsys):
    reader, writer = pipe

    def fail():
        os.read(reader, 10)
        raise SystemExit("this one")

    events.add(reader, fail)
    os.write(writer, b"x")
    events.call(lambda: 1 / 0)
    settle(events)
    settle(events)
    printed = capsys.readouterr().err
    assert "this one" in printed
    assert "ZeroDivisionError" in printed


def test_a_failing_callback_without_stderr(events, monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    events.call(lambda: 1 / 0)
    settle(events)


def test_an_event_of_a_removed_descriptor_does_not_reach_its_successor(events):
    first, second = os.pipe(), os.pipe()
    wrong = []
    state = threading.Event()

    def replace(mine, other):
        # Both are readable in the same round; whichever comes first replaces the other.
        if state.is_set():
            return
        events.remove(mine[0])
        events.remove(other[0])
        spare = os.pipe()
        os.dup2(spare[0], other[0])
        events.add(other[0], lambda: wrong.append(1))
        for fd in spare:
            os.close(fd)
        state.set()

    hold = threading.Event()
    events.call(lambda: hold.wait(WAIT))
    events.add(first[0], lambda: replace(first, second))
    events.add(second[0], lambda: replace(second, first))
    os.write(first[1], b"x")
    os.write(second[1], b"x")
    hold.set()
    assert state.wait(WAIT)
    # The new pipe has no writer and is "readable" for good; only the stale call is wrong.
    for fd in (first[0], second[0]):
        events.remove(fd)
    settle(events)
    for fd in (*first, *second):
        os.close(fd)


def test_close_from_a_callback(events):
    closed = threading.Event()

    def close():
        events.close()
        closed.set()

    events.call(close)
    assert closed.wait(WAIT)
    events.close()
    assert events.closed


def test_close_runs_what_was_called_before():
    events = EventLoop()
    got = []
    hold = threading.Event()
    events.call(lambda: hold.wait(WAIT))
    events.call(lambda: got.append(1))
    hold.set()
    events.close()
    assert got == [1]


def test_signals_go_to_the_main_thread(events):
    masks = []
    events.call(lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    settle(events)
    assert signal.SIGINT in masks[0]
    assert signal.SIGSEGV not in masks[0]


def test_silent_in_a_forked_child(events, pipe):
    reader, writer = pipe
    got = []
    seen = threading.Event()

    def read():
        got.append(os.read(reader, 10))
        seen.set()

    events.add(reader, read)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            events.remove(reader)
            events.call(lambda: os.write(writer, b"child"))
            events.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    os.write(writer, b"parent")
    assert seen.wait(WAIT)
    assert got == [b"parent"]
