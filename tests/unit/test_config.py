"""Settings of a graph, and those of the environment."""

from __future__ import annotations

import os
import signal

import pytest

import conveyor
from conveyor import Config
from conveyor.dag import InputNode
from conveyor.exceptions import GraphError, WaitTimeoutError


@pytest.mark.parametrize(
    "wrong",
    [
        {"depth": 0},
        {"depth": 2.0},
        {"stream_items": 0},
        {"function_workers": 0},
        {"slot_bytes": 100},
        {"deadline": 0},
        {"submit_timeout": "1"},
        {"get_timeout": -1},
    ],
)
def test_settings_are_checked(wrong):
    with pytest.raises(GraphError, match=next(iter(wrong))):
        Config(**wrong)


class Echo:
    def echo(self, x):
        return x

    def pid(self):
        return os.getpid()


@pytest.fixture
def session():
    conveyor.init()
    yield
    conveyor.shutdown()


def test_default_timeouts(session):
    actor = conveyor.remote(Echo).remote()
    pid = conveyor.get(actor.pid.remote())
    dag = actor.echo.bind(InputNode())
    with dag.compile(get_timeout=0.05, submit_timeout=0.05, depth=1) as graph:
        assert conveyor.get(graph.execute(1)) == 1
        os.kill(pid, signal.SIGSTOP)
        try:
            ref = graph.execute(2)
            with pytest.raises(WaitTimeoutError, match=r"after 0\.05 s waiting for graph"):
                ref.get()
            with pytest.raises(WaitTimeoutError, match="waiting for room"):
                graph.execute(3)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert ref.get(timeout=-1) == 2


def test_a_long_wait_for_room_is_logged_and_goes_on(session, monkeypatch, caplog):
    monkeypatch.setattr("conveyor.runtime.waiting.patience.LOG_AFTER", 0.05)
    actor = conveyor.remote(Echo).remote()
    pid = conveyor.get(actor.pid.remote())
    with actor.echo.bind(InputNode()).compile(depth=1) as graph:
        os.kill(pid, signal.SIGSTOP)
        try:
            ref = graph.execute(1)
            with pytest.raises(WaitTimeoutError, match=r"after 0\.3 s waiting for room"):
                graph.execute(2, timeout=0.3)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert ref.get() == 1
    assert "waiting for room" in caplog.text


@pytest.mark.parametrize("spin", ["0", "5", "1000"])
def test_the_largest_spin_is_the_environments(monkeypatch, spin):
    monkeypatch.setenv("CONVEYOR_SPIN_US", spin)
    conveyor.init()
    try:
        assert conveyor.runtime.context.current().inbox.spin_ns == int(spin) * 1000
        actor = conveyor.remote(Echo).remote()
        with actor.echo.bind(InputNode()).compile() as graph:
            assert [conveyor.get(graph.execute(i)) for i in range(50)] == list(range(50))
    finally:
        conveyor.shutdown()


def test_the_engine_is_the_environments(monkeypatch):
    monkeypatch.setenv("CONVEYOR_ENGINE", "inline")
    actor = conveyor.remote(Echo).remote()
    try:
        assert conveyor.get(actor.pid.remote()) == os.getpid()
    finally:
        conveyor.shutdown()
    monkeypatch.setenv("CONVEYOR_ENGINE", "elsewhere")
    with pytest.raises(ValueError, match="CONVEYOR_ENGINE='elsewhere'"):
        conveyor.init()
