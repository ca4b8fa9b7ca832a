"""Who asks how an actor has ended keeps nobody from being told."""

import os
import signal
import sys
import threading

import cloudpickle
import pytest
from integration_helpers import WAIT, get, hold

import conveyor
from conveyor.dag import InputNode
from conveyor.driver import actors
from conveyor.driver.supervisor import Supervisor
from conveyor.exceptions import ActorDiedError, SessionEndedError
from conveyor.refs.watcher import Watcher
from conveyor.runtime import context

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Actor:
    def pid(self):
        return os.getpid()

    def echo(self, x):
        return x

    def hold(self, go):
        hold(go)


@conveyor.remote
class Caller:
    def call(self, victim, go):
        self.ref = victim.hold.remote(go)

    def error(self):
        try:
            self.ref.get()
        except ActorDiedError as error:
            return str(error), error.signal


def error_of(get_it):
    with pytest.raises(ActorDiedError) as caught:
        get_it()
    return str(caught.value), caught.value.signal


def test_an_error_that_was_requested_for_early_says_how_it_ended_once_that_is_known(
    monkeypatch, latches, wait_until
):
    late, held, on_exit = [], threading.Event(), Supervisor.on_exit

    def tell(*end):
        late.append(end) if held.is_set() else on_exit(*end)

    monkeypatch.setattr(Supervisor, "on_exit", tell)
    monkeypatch.setattr(actors, "_EXIT_CODE_WAIT", 0.05)
    conveyor.shutdown()
    conveyor.init()
    victim, caller, go = Actor.remote(), Caller.remote(), latches()
    pid = get(victim.pid.remote())
    (found,) = (one for one in context.current().table if one.pid == pid)
    with InputNode() as inp:
        graph = victim.hold.bind(inp).compile()
    called = victim.hold.remote(go.path)
    executed, more = graph.execute(go.path), graph.execute(go.path)
    get(caller.call.remote(victim, go.path))
    asks = {
        "call": lambda: error_of(lambda: get(called)),
        "execution": lambda: error_of(lambda: get(executed)),
        "graph": lambda: error_of(lambda: graph.execute(1)),
        "from an actor": lambda: get(caller.error.remote()),
    }
    held.set()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not found.alive)
    early = {way: ask() for way, ask in asks.items()}
    assert all("not known yet" in text and number is None for text, number in early.values())
    wait_until(lambda: late)
    held.clear()
    for end in late:
        on_exit(*end)
    assert found.cause_known.is_set()
    asks["execution that nobody has asked for"] = lambda: error_of(lambda: get(more))
    for way, ask in asks.items():
        text, number = ask()
        assert "SIGKILL" in text, way
        assert number == signal.SIGKILL, way
    assert "SIGKILL" in graph.status().error
    graph.restart()
    text, _ = error_of(lambda: get(executed))
    assert "SIGKILL" in text
    go.open()
    assert get(graph.execute(go.path)) is None
    conveyor.shutdown()


# A fault of the library's own, which no program has: its threads are made to fail.


def broken(self):
    raise ValueError("no use")


@conveyor.remote
class Breaks:
    def wait_for(self, other, go):
        from conveyor.refs.watcher import Watcher

        Watcher._run = broken
        other.hold.remote(go).future()
        threading.Event().wait()


def test_an_actor_whose_thread_fails_ends(fresh_session, latches):
    go = latches()
    other = Actor.remote()
    with pytest.raises(ActorDiedError, match="conveyor-watcher has ended with ValueError: no use"):
        get(Breaks.remote().wait_for.remote(other, go.path))
    go.open()


def test_a_session_whose_thread_fails_ends(fresh_session, latches, monkeypatch):
    go = latches()
    actor = Actor.remote()
    refs = [actor.hold.remote(go.path) for _ in range(2)]
    monkeypatch.setattr(Watcher, "_run", broken)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with InputNode() as inp:
        graph = Actor.remote().echo.bind(inp).compile()
    refs[0].future()
    cause = "its thread conveyor-watcher has ended with ValueError: no use"
    for attempt in (
        lambda: get(refs[0]),
        lambda: graph.execute(1),
        lambda: actor.echo.remote(1),
        Actor.remote,
    ):
        with pytest.raises(SessionEndedError, match=cause):
            attempt()
    go.open()
    conveyor.shutdown()
    monkeypatch.undo()
    again = Actor.remote().echo.remote(1)
    assert again.future().result(WAIT) == 1
