"""Calls of an actor whose next process takes long to be placed: they wait where any call of it waits."""

import gc
import os
import signal
import threading

import pytest

import conveyor
from conveyor.exceptions import ActorDiedError, ActorStartError, WaitTimeoutError
from conveyor.runtime import context

WAIT = 60


@conveyor.remote(max_restarts=-1)
class Stage:
    def pid(self):
        return os.getpid()

    def same(self, value):
        return value


class Placing:
    """Where processes are placed. ``begun``: somebody has asked for a place; ``over``: there is one."""

    def __init__(self, monkeypatch):
        hosts = context.running()._hosts
        self.begun, self.over, self._place = threading.Event(), threading.Event(), hosts.spawn
        self.refused = False
        monkeypatch.setattr(hosts, "spawn", self._spawn)

    def _spawn(self, *args):
        self.begun.set()
        assert self.over.wait(WAIT)
        if self.refused:
            raise ActorStartError("there is no place for it")
        return self._place(*args)


@pytest.fixture
def struck(fresh_session, monkeypatch):
    """An actor that has died, and is on its way back."""
    stage = Stage.remote()
    pid = conveyor.get(stage.pid.remote(), timeout=WAIT)
    placing = Placing(monkeypatch)
    os.kill(pid, signal.SIGKILL)
    assert placing.begun.wait(WAIT)
    yield stage, placing
    placing.over.set()


def test_they_are_queued(struck):
    stage, placing = struck
    refs = [stage.same.remote(i) for i in range(200)]  # more than a ring takes
    with pytest.raises(WaitTimeoutError, match=r"Stage\.same \(call 1\); Stage is starting"):
        conveyor.get(refs[0], timeout=0.01)
    assert not refs[0].done()
    placing.over.set()
    assert conveyor.get(refs, timeout=WAIT) == list(range(200))


def test_they_fail_if_it_does_not_come_back(struck):
    stage, placing = struck
    ref = stage.same.remote(1)
    placing.refused = True
    placing.over.set()
    with pytest.raises(
        ActorDiedError, match="could not be started again: there is no place for it"
    ):
        conveyor.get(ref, timeout=WAIT)
    with pytest.raises(
        ActorDiedError, match="could not be started again: there is no place for it"
    ):
        conveyor.get(stage.same.remote(1), timeout=WAIT)


def test_they_are_done_though_its_last_handle_is_gone(fresh_session, monkeypatch, wait_until):
    stage = Stage.remote()
    pid = conveyor.get(stage.pid.remote(), timeout=WAIT)
    placing = Placing(monkeypatch)
    os.kill(pid, signal.SIGKILL)
    assert placing.begun.wait(WAIT)
    refs, pid = [stage.same.remote(i) for i in range(200)], stage.pid.remote()
    del stage
    gc.collect()
    context.running().chores.do()
    placing.over.set()
    assert conveyor.get(refs, timeout=WAIT) == list(range(200))
    # Then it ends.
    last = conveyor.get(pid, timeout=WAIT)
    wait_until(lambda: not os.path.exists(f"/proc/{last}"), WAIT)


def test_the_session_may_end_meanwhile(struck, wait_until):
    (stage, placing), table = struck, context.running().table
    ref = stage.same.remote(1)
    ender = threading.Thread(target=conveyor.shutdown)
    ender.start()
    wait_until(lambda: table.closed, WAIT)  # else it might come back before
    placing.over.set()
    ender.join(WAIT)
    assert not ender.is_alive()
    with pytest.raises(conveyor.exceptions.ConveyorError):
        conveyor.get(ref, timeout=WAIT)
