"""One test or more for every known defect of an older system for compiled actor graphs.

Each test says what goes wrong there, and shows through the public API that it does not here.
Three have theirs with what they concern: D13 (MAX and MIN on CPUs) in ``test_graph_collectives.py``, D16 (a
reader on another host that is slow) in ``native/tests/test_net_rings.cpp``, and the second half of D21
(communicators at teardown) in ``test_communicators.py``.
"""

import os

import pytest
from defect_actors import Recorder


@pytest.fixture(scope="module")
def a(session):
    return Recorder.remote("a")


@pytest.fixture(scope="module")
def b(session):
    return Recorder.remote("b")


@pytest.fixture
def waits_for(monkeypatch, caplog, wait_until):
    """Waits until the library logs that somebody waits for something.

    So a test knows that a call really waits, without guessing when it has begun to.
    """
    monkeypatch.setattr("conveyor.runtime.waiting.LOG_AFTER", 0.05)
    caplog.set_level("WARNING", logger="conveyor")

    def wait(text):
        wait_until(
            lambda: any(text in record.getMessage() for record in list(caplog.records)),
            what=f"a wait for {text!r}",
        )
        caplog.clear()

    return wait


@pytest.fixture
def busy(latches, wait_until):
    """Puts an actor into a method, and returns the latch that lets it go and the call's ref."""

    def start(actor):
        inside, go = latches(), latches()
        ref = actor.enter.remote(inside.path, go.path)
        wait_until(lambda: os.path.exists(inside.path), what="the method to begin")
        return go, ref

    return start
