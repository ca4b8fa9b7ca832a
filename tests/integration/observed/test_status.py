"""graph.status(), and what long waits say: who does what, since when, and what is still to come."""

import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import time

import cloudpickle
import pytest
from integration_helpers import WAIT, chain, get, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, WaitTimeoutError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Actor:
    def echo(self, x):
        return x

    def pair(self, x, y):
        return x, y

    def pid(self):
        return os.getpid()

    def hold(self, inside, go="/nonexistent"):
        open(inside, "w").close()
        hold(go)
        return "held"

    def ask(self, other, inside, go):
        return conveyor.get(other.hold.remote(inside, go))

    def leave(self, code):
        sys.exit(code)


@conveyor.remote
class Async:
    def __init__(self):
        self.go = None

    async def hold(self, inside):
        import asyncio

        self.go = asyncio.Event()
        open(inside, "w").close()
        await self.go.wait()
        return "held"

    async def release(self):
        self.go.set()


@pytest.fixture
def actors(session):
    return Actor.remote(), Actor.remote(), Actor.remote()


def states(graph):
    return [actor.state for actor in graph.status().actors]


def test_an_idle_graph(actors, wait_until):
    a, b, _ = actors
    with chain(a.echo, b.echo).compile(name="calm", depth=4) as graph:
        for n in range(3):
            # A result is there a moment before its actor rests.
            wait_until(lambda: states(graph) == ["idle", "idle"], what="idle actors")
            status = graph.status()
            assert (status.name, status.state, status.depth) == ("calm", "ready", 4)
            assert (status.submitted, status.completed, status.executions) == (n, n, ())
            assert "nothing in flight" in str(status)
            assert get(graph.execute(n)) == n
    assert graph.status().state == "torn down"
    assert "torn down" in str(graph.status())


def test_which_execution_is_where(actors, latches, wait_until):
    a, b, c = actors
    inside, go = latches(), latches()
    with InputNode() as inp:
        first = a.echo.bind(inp)
        held = b.hold.bind(first, go.path)
        dag = MultiOutputNode([first, c.pair.bind(held, first)])
    with dag.compile(name="busy", fail_fast=False) as graph:
        refs = [graph.execute(inside.path) for _ in range(3)]
        hold(inside.path)
        conveyor.wait([outs[0] for outs in refs], num_returns=3, timeout=WAIT)
        wait_until(lambda: states(graph) == ["idle", "running", "waiting"], what="their places")
        status = graph.status()
        assert (status.submitted, status.completed) == (3, 0)
        assert [e.number for e in status.executions] == [0, 1, 2]
        names = [actor.name for actor in status.actors]
        for execution in status.executions:
            assert execution.outstanding == (f"{names[2]}.pair",)
        assert status.executions[0].actors == (names[1], names[2])
        assert status.executions[1].actors == ()
        idle, running, waiting = status.actors
        assert (running.method, running.execution) == (f"{names[1]}.hold", 0)
        assert idle.pid == get(a.pid.remote())
        assert 0 <= time.time() - running.since < WAIT
        assert waiting.waits_for.writer == names[1]
        assert waiting.waits_for.execution == 0
        assert "hold" in waiting.waits_for.source
        text = str(status)
        for part in ("busy: ready, executions 0 to 2 in flight", "since", "hold", names[2]):
            assert part in text
        go.open()
        assert get(refs[0]) == [inside.path, ("held", inside.path)]
        get(refs)
        assert graph.status().executions == ()


def test_an_actor_that_waits_for_another(actors, latches, wait_until):
    a, b, _ = actors
    inside, go = latches(), latches()
    with chain(a.echo).compile() as graph:
        ref = a.ask.remote(b, inside.path, go.path)
        hold(inside.path)
        # b has begun; that a waits for it is a moment later.
        wait_until(lambda: graph.status().actors[0].blocked_on, what="a's wait")
        (status,) = graph.status().actors
        assert (status.state, status.method, status.execution) == ("running", "ask", None)
        assert status.call is not None
        assert f"which waits for {status.blocked_on}" in str(status)
        go.open()
        assert get(ref) == "held"


def test_a_coroutine_in_the_middle(session, latches):
    inside = latches()
    actor = Async.remote()
    with chain(actor.hold).compile() as graph:
        ref = graph.execute(inside.path)
        hold(inside.path)
        (status,) = graph.status().actors
        assert status.execution == 0
        assert status.state in ("running", "idle")
        get(actor.release.remote())
        assert get(ref) == "held"


def test_a_call_of_a_coroutine_is_what_the_actor_runs(session, latches, wait_until):
    actor = Async.remote()
    inside = latches()
    ref = actor.hold.remote(inside.path)
    hold(inside.path)
    with pytest.raises(WaitTimeoutError, match=r"running hold \(call 1\)"):
        conveyor.get(ref, timeout=0.05)
    get(actor.release.remote())
    assert get(ref) == "held"
    with chain(actor.hold).compile() as graph:
        wait_until(lambda: states(graph) == ["idle"], what="an idle actor")


def test_a_dead_actor(actors):
    a, _, _ = actors
    victim = Actor.remote()
    with chain(a.echo, victim.leave).compile(name="doomed") as graph:
        with pytest.raises(ActorDiedError):
            get(graph.execute(3))
        status = graph.status()
        assert status.state == "failed"
        assert "code 3" in status.error
        assert status.actors[1].state == "dead"
        assert "code 3" in status.actors[1].error
        assert "dead" in str(status)
        assert [e.number for e in status.executions] == [0]
        graph.restart()
        assert graph.status().state == "ready"
        assert graph.status().executions == ()


def test_stacks(actors, latches):
    a, _, _ = actors
    inside, go = latches(), latches()
    with InputNode() as inp:
        dag = a.hold.bind(inp, go.path)
    with dag.compile() as graph:
        ref = graph.execute(inside.path)
        hold(inside.path)
        assert graph.status().actors[0].stack is None
        status = graph.status(stacks=True)
        stack = status.actors[0].stack
        if not stack.startswith("[no stack"):
            assert "hold" in stack
            assert "hold" in str(status)
        go.open()
        get(ref)


def test_stacks_without_py_spy(actors, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *_args, **_kwargs: None)
    with chain(actors[0].echo).compile() as graph:
        stack = graph.status(stacks=True).actors[0].stack
    assert "py-spy is not installed" in stack


class Lines:
    """What long waits log."""

    def __init__(self, monkeypatch, caplog):
        self._monkeypatch = monkeypatch
        self._caplog = caplog
        caplog.set_level(logging.WARNING, "conveyor")

    def start(self):
        """From now on a wait is long after 50 ms."""
        self._monkeypatch.setattr("conveyor.runtime.waiting.LOG_AFTER", 0.05)
        self._caplog.clear()

    def __call__(self):
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def lines(monkeypatch, caplog):
    return Lines(monkeypatch, caplog)


def until_logged(lines, wait_until, latch):
    """Open the latch when a wait has been logged."""
    lines.start()

    def watch():
        wait_until(lines, what="a line in the log")
        latch.open()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize("what", ["compile", "teardown"])
def test_waiting_for_a_busy_actor_names_what_it_runs(actors, latches, lines, wait_until, what):
    a, _, _ = actors
    inside, go = latches(), latches()
    with InputNode() as inp:
        dag = a.hold.bind(inp, go.path)
    running = dag.compile(name="the one that runs")
    other = chain(a.echo).compile(name="the other") if what == "teardown" else None
    ref = running.execute(inside.path)
    hold(inside.path)
    watcher = until_logged(lines, wait_until, go)
    if other is None:
        other = chain(a.echo).compile(name="the other")
        other.teardown()
        expected = "its part of the other, which is being compiled"
    else:
        other.teardown()
        expected = "the teardown of the other"
    watcher.join(WAIT)
    line = lines()[0]
    assert expected in line
    assert ".hold (execution 0)" in line  # by its label, though it is another graph's
    assert get(ref) == "held"
    running.teardown()


def test_a_long_wait_in_wait_names_the_actors(actors, latches, lines, wait_until):
    a, b, _ = actors
    inside, go = latches(), latches()
    with InputNode() as inp:
        dag = a.hold.bind(inp, go.path)
    with dag.compile(name="slow") as graph:
        refs = [graph.execute(inside.path), b.hold.remote(inside.path + "-b", go.path)]
        done = b.pid.remote()
        for path in (inside.path, inside.path + "-b"):
            hold(path)  # they run by then, however soon a wait is logged
        watcher = until_logged(lines, wait_until, go)
        conveyor.wait([*refs, done], num_returns=3)
        watcher.join(WAIT)
        line = lines()[0]
    for part in ("3 of 3 results", "slow, execution 0", "hold", "running"):
        assert part in line


def test_a_long_wait_for_a_graph_says_what_its_status_says(actors, latches, lines, wait_until):
    a, b, _ = actors
    inside, go = latches(), latches()
    with InputNode() as inp:
        dag = b.echo.bind(a.hold.bind(inp, go.path))
    with dag.compile(name="slow") as graph:
        ref = graph.execute(inside.path)
        wait_until(lambda: states(graph) == ["running", "waiting"], what="their places")
        watcher = until_logged(lines, wait_until, go)
        get(ref)
        watcher.join(WAIT)
        line = lines()[0]
    for part in ("slow, execution 0", "running", "idle, waiting for", "execution 0 in flight"):
        assert part in line


def test_waiting_for_a_restart_is_logged(session, lines, wait_until, latches):
    class Slow:
        def __init__(self, first, go):
            if os.path.exists(first):
                hold(go)
            open(first, "w").close()

        def pid(self):
            return os.getpid()

    first, go = latches(), latches()
    actor = conveyor.remote(Slow).options(max_restarts=1).remote(first.path, go.path)
    os.kill(get(actor.pid.remote()), signal.SIGKILL)
    watcher = until_logged(lines, wait_until, go)
    while True:
        try:
            conveyor.get(actor.pid.remote())
            break
        except ActorDiedError:
            pass
    watcher.join(WAIT)
    assert "Slow" in lines()[0]


class Rebuilt:
    """A value whose rebuilding says that it has begun, and waits."""

    def __init__(self, inside, go):
        self.paths = inside, go

    def __setstate__(self, state):
        self.__dict__ = state
        inside, go = self.paths
        open(inside, "w").close()
        hold(go)


@conveyor.remote
class Gets:
    def echo(self, x):
        return x

    def kind(self, x):
        return type(x).__name__

    def get(self, refs):
        return type(conveyor.get(refs[0])).__name__


_MODULE = """
import os, time
if os.getpid() != {driver}:
    open({inside!r}, "w").close()
    while not os.path.exists({go!r}):
        time.sleep(0.002)

class Slow:
    def __init__(self, inside, go):
        self.paths = inside, go

    def __setstate__(self, state):
        open(state["paths"][0], "w").close()
        while not os.path.exists(state["paths"][1]):
            time.sleep(0.002)
"""


def told(ref):
    """Return the text of the error of a wait that is not over."""
    with pytest.raises(WaitTimeoutError) as raised:
        conveyor.get(ref, timeout=0.01)
    return str(raised.value)


def test_an_actor_decodes_the_arguments_of_a_call(session, latches):
    actor = Gets.options(name="decodes").remote()
    inside, go = latches(), latches()
    refs = [actor.kind.remote(1), actor.kind.remote(Rebuilt(inside.path, go.path))]
    hold(inside.path)
    assert "decodes is decoding its arguments since" in told(refs[1])
    go.open()
    assert get(refs) == ["int", "Rebuilt"]


def test_an_actor_imports_a_module_for_its_arguments(session, latches, tmp_path, monkeypatch):
    inside, go, later, end = (latches() for _ in range(4))
    source = _MODULE.format(driver=os.getpid(), inside=inside.path, go=go.path)
    (tmp_path / "slow_to_import.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("slow_to_import")
    actor = Gets.options(name="imports").remote()
    ref = actor.kind.remote(module.Slow(later.path, end.path))
    hold(inside.path)
    assert "imports is decoding its arguments (importing slow_to_import) since" in told(ref)
    go.open()
    hold(later.path)
    assert "imports is decoding its arguments since" in told(ref)
    end.open()
    assert get(ref) == "Slow"


def test_an_actor_decodes_the_input_of_a_graph(session, latches):
    actor = Gets.options(name="steps").remote()
    begun, done = latches(), latches()
    with chain(actor.kind).compile() as graph:
        assert get(graph.execute(1)) == "int"  # what it has run last is not what it does
        ref = graph.execute(Rebuilt(begun.path, done.path))
        hold(begun.path)
        (status,) = graph.status().actors
        assert status.state == "decoding"
        assert "steps is decoding its arguments since" in told(ref)
        done.open()
        assert get(ref) == "Rebuilt"


def test_a_method_decodes_what_it_has_got(session, latches):
    actor = Gets.options(name="gets").remote()
    begun, done = latches(), latches()
    ref = actor.get.remote([conveyor.put(Rebuilt(begun.path, done.path))])
    hold(begun.path)
    text = told(ref)
    assert "gets is running get (call" in text
    assert "decoding a value since" in text
    done.open()
    assert get(ref) == "Rebuilt"
