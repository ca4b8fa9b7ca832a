"""The thread on which futures of refs are told that these are done."""

import threading

import pytest

from conveyor.refs.watcher import Completions
from conveyor.runtime import threads


def test_a_signal_handler_may_put_something_in_the_middle_of_that():
    completions, told = Completions(), threading.Event()

    def interrupted():
        with completions._lock:
            completions.put(told.set)

    threading.Thread(target=interrupted, daemon=True).start()
    assert told.wait(60)


def test_what_raises_keeps_nothing_back(caplog):
    def raises():
        raise SystemExit(3)

    completions, told = Completions(), threading.Event()
    completions.put(raises)
    completions.put(told.set)
    assert told.wait(60)
    assert "what comes after a reference is done has failed" in caplog.text


def test_who_is_interrupted_before_there_is_a_thread_keeps_nobody_back(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    completions, told = Completions(), []
    with monkeypatch.context() as patched:
        patched.setattr(threads, "start_or_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            completions.put(lambda: told.append(1))
    over = threading.Event()
    completions.put(lambda: told.append(2))
    completions.put(over.set)
    assert over.wait(60)
    assert told == [1, 2]


def test_who_does_it_himself_and_is_interrupted_keeps_nobody_back(monkeypatch):
    """Where there are no threads left."""
    completions, told = Completions(), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threads, "start_or_run", lambda run, *_: run())
        patched.setattr(completions, "_do_one", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            completions.put(list)
    completions.put(told.set)
    assert told.wait(60)


def _interrupted():
    raise KeyboardInterrupt


def test_one_at_a_time_whoever_puts_it():
    completions, over = Completions(), threading.Semaphore(0)
    busy, most = [], []

    def work():
        busy.append(1)
        most.append(len(busy))
        busy.pop()
        over.release()

    putters = [
        threading.Thread(target=lambda: [completions.put(work) for _ in range(500)])
        for _ in range(4)
    ]
    for putter in putters:
        putter.start()
    for _ in range(2000):
        assert over.acquire(timeout=60)
    assert max(most) == 1
