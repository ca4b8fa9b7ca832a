"""Settings of a graph, and those of the environment."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

import conveyor
from conveyor import Config
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import GraphError, WaitTimeoutError


@pytest.mark.parametrize(
    "wrong",
    [
        {"depth": 0},
        {"depth": 2.0},
        {"stream_items": 0},
        {"function_workers": 0},
        {"slot_bytes": 100},
        {"memory_bytes": 0},
        {"memory_bytes": 1e9},
        {"spin_us": -1},
        {"spin_us": True},
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

    def spin_ns(self):
        return conveyor.runtime.context.current().inbox.spin_ns


@pytest.fixture
def stop(wait_until):
    """``stop(pid)``: from then on it takes nothing."""

    def stop(pid):
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)

    return stop


@pytest.fixture
def session():
    conveyor.init()
    yield
    conveyor.shutdown()


def test_default_timeouts(session, stop):
    actor = conveyor.remote(Echo).remote()
    pid = conveyor.get(actor.pid.remote())
    dag = actor.echo.bind(InputNode())
    with dag.compile(get_timeout=0.05, submit_timeout=0.05, depth=1) as graph:
        assert conveyor.get(graph.execute(1), timeout=60) == 1
        stop(pid)
        try:
            ref = graph.execute(2)
            with pytest.raises(WaitTimeoutError, match=r"after 0\.05 s waiting for graph"):
                ref.get()
            with pytest.raises(WaitTimeoutError, match="waiting for room"):
                graph.execute(3)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert ref.get(timeout=-1) == 2


def test_a_long_wait_for_room_is_logged_and_goes_on(session, monkeypatch, caplog, stop):
    monkeypatch.setattr("conveyor.runtime.waiting.LOG_AFTER", 0.05)
    actor = conveyor.remote(Echo).remote()
    pid = conveyor.get(actor.pid.remote())
    with actor.echo.bind(InputNode()).compile(depth=1) as graph:
        stop(pid)
        try:
            ref = graph.execute(1)
            with pytest.raises(WaitTimeoutError, match=r"after 1 s waiting for room"):
                graph.execute(2, timeout=1)
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


def test_the_least_of_all_limits_is_the_largest_spin(session, wait_until):
    actor = conveyor.remote(Echo).remote()
    other = conveyor.remote(Echo).remote()

    def limits():
        inbox = conveyor.runtime.context.current().inbox
        return [inbox.spin_ns, *conveyor.get([actor.spin_ns.remote(), other.spin_ns.remote()])]

    most, *_ = limits()
    assert limits() == [most, most, most] != [0, 0, 0]
    with actor.echo.bind(InputNode()).compile(spin_us=20) as graph:
        assert limits() == [20_000, 20_000, most]
        quiet = MultiOutputNode([actor.echo.bind(InputNode())]).compile(spin_us=0)
        assert limits() == [0, 0, most]
        assert conveyor.get(graph.execute(1)) == 1
        assert conveyor.get(quiet.execute(1)) == [1]
        loud = actor.echo.bind(InputNode()).compile(spin_us=500_000)
        quiet.teardown()
        assert limits() == [20_000, 20_000, most]
    assert limits() == [most, most, most]
    loud.teardown()
    dropped = other.echo.bind(InputNode()).compile(spin_us=0)
    assert limits() == [0, most, 0]
    del dropped
    conveyor.get(actor.pid.remote())
    wait_until(lambda: limits() == [most, most, most])


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
