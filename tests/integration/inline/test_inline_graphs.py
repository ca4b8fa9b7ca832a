"""Graphs of the inline engine, where something comes in between."""

from __future__ import annotations

import asyncio
import functools
import gc
import signal
import threading
import time
import weakref

import pytest

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.engines.inline.graph import InlinePart
from conveyor.exceptions import (
    ActorDiedError,
    DeadlockError,
    GraphTornDownError,
    TaskError,
)

WAIT = 60

log: list[object] = []


@pytest.fixture(autouse=True)
def inline(leaves_nothing):
    log.clear()
    with leaves_nothing():
        conveyor.init(engine="inline")
        yield
        conveyor.shutdown()


class Rebuilt:
    """Notes where it arrives."""

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return _rebuild, (self.name,)


def _rebuild(name):
    log.append(("rebuilt", name))
    return Rebuilt(name)


class Interrupting:
    """Interrupts the program where it is sent, or where it arrives."""

    def __init__(self, there):
        self.there = there

    def __reduce__(self):
        if not self.there:
            raise KeyboardInterrupt
        return _interrupt, ()


def _interrupt():
    raise KeyboardInterrupt


class Doer:
    """Does what the test says under a name."""

    def do(self, name, *_):
        log.append(name)
        work = works.get(name)
        return name if work is None else work()

    def nap(self, seconds):
        time.sleep(seconds)
        return seconds

    def me(self, _):
        works["self"] = weakref.ref(self)

    def make(self, name, *_):
        log.append(name)
        return Rebuilt(name)

    def interrupting(self, there, *_):
        return Interrupting(there)

    def fail(self, x, *_):
        raise ValueError(x)

    def count(self, n, *_):
        for i in range(n):
            log.append(i)
            yield i


class Coroutines:
    def __init__(self):
        self.ended = asyncio.Event()

    async def hold(self, x):
        if x:
            self.ended.clear()
            works["begun"]()
            try:
                await asyncio.sleep(WAIT)
            finally:
                self.ended.set()

    async def stay(self, x):
        self.left = asyncio.Event()
        try:
            works["begun"]()
            await asyncio.sleep(WAIT)
        except asyncio.CancelledError:
            await self.ended.wait()
        self.left.set()
        return x

    async def follow(self, x):
        self.ended.set()
        await self.left.wait()
        return x

    async def either(self, x):
        return await (self.stay(x) if x == "first" else self.follow(x))

    async def cancelled(self):
        await asyncio.wait_for(self.ended.wait(), WAIT)
        return True

    async def do(self, name):
        await asyncio.sleep(0)
        return works[name]()


works: dict[str, object] = {}


@pytest.fixture
def actors():
    works.clear()
    yield [conveyor.remote(Doer).remote() for _ in range(2)]
    works.clear()


def test_a_task_is_prepared_when_its_turn_has_come(actors):
    a, b = actors
    with InputNode() as inp:
        first = a.make.bind("one", inp)
        second = b.do.bind("b", first)
        third = a.make.bind("two", second)
        last = a.do.bind("a", b.make.bind("three", inp))
        dag = MultiOutputNode([b.do.bind("b again", third), last])
    with dag.compile() as graph:
        conveyor.get(graph.execute(0))
    order = ["one", "b", "two", "three", "a", "b again"]
    assert [x for x in log if isinstance(x, str)] == order
    assert log.index(("rebuilt", "three")) > log.index("three")
    assert log.index(("rebuilt", "three")) == log.index("a") - 1


def test_the_time_of_a_task_is_its_own(actors):
    a, b = actors
    with InputNode() as inp:
        dag = MultiOutputNode([a.do.bind("x", inp), b.nap.bind(inp), a.do.bind("y", inp)])
    with dag.compile() as graph:
        conveyor.get(graph.execute(0.5))
        x, nap, y = graph.stats().tasks
        assert nap.running.max_s >= 0.5
        assert max(x.running.max_s, y.running.max_s) < 0.5


@pytest.mark.parametrize("there", [True, False])
def test_an_interrupt_while_a_value_travels_reaches_the_program(actors, there):
    a, b = actors
    with InputNode() as inp:
        dag = b.do.bind("behind", a.interrupting.bind(inp))
    with dag.compile() as graph:
        with pytest.raises(KeyboardInterrupt):
            graph.execute(there)
        assert log == []
        assert graph.status().executions == ()


def test_what_an_interrupt_leaves_behind_is_not_run(actors):
    a, b = actors

    def interrupt():
        raise KeyboardInterrupt

    works["now"] = interrupt
    with InputNode() as inp:
        dag = MultiOutputNode([b.do.bind("behind", a.do.bind(inp)), b.do.bind("out_of_band", inp)])
    with dag.compile(depth=1) as graph:
        for _ in range(3):  # each has its place
            with pytest.raises(KeyboardInterrupt):
                graph.execute("now")
        assert log == ["now"] * 3
        assert conveyor.get(graph.execute("later")) == ["behind", "out_of_band"]
        assert log[3:] == ["later", "behind", "out_of_band"]
        status = graph.status()
        assert (status.submitted, status.completed) == (4, 4)
        assert graph.stats().tasks[0].running.count == 4  # it was not deployed anew for that


def test_a_refused_execution_is_not_run_later(actors):
    a, b = actors
    with InputNode() as inp:
        dag = MultiOutputNode([b.do.bind(inp), a.do.bind("inner", inp)])
    with dag.compile() as graph:
        works["outer"] = lambda: graph.execute("refused")
        with pytest.raises(DeadlockError):
            conveyor.get(a.do.remote("outer"))
        works["outer"] = lambda: "fine"
        assert log == ["outer", "refused"]
        assert conveyor.get(graph.execute("fine")) == ["fine", "inner"]
        assert log == ["outer", "refused", "fine", "inner"]


def test_a_teardown_while_a_task_runs(actors):
    a, b = actors
    inside, go = threading.Event(), threading.Event()
    outcomes = []

    def work():
        inside.set()
        assert go.wait(WAIT)
        return "done"

    works["work"] = work
    with InputNode() as inp:
        graph = b.do.bind("behind", a.do.bind(inp)).compile()

    def execute():
        try:
            outcomes.append(graph.execute("work"))
        except GraphTornDownError as error:
            outcomes.append(error)

    thread = threading.Thread(target=execute)
    thread.start()
    assert inside.wait(WAIT)
    graph.teardown()
    go.set()
    thread.join(WAIT)
    assert not thread.is_alive()
    (outcome,) = outcomes
    if not isinstance(outcome, BaseException):
        with pytest.raises(GraphTornDownError):
            outcome.get()
    assert conveyor.get(a.do.remote("next")) == "next"


def test_a_teardown_by_one_of_its_tasks(actors):
    a, b = actors
    with InputNode() as inp:
        graph = b.do.bind("behind", a.do.bind(inp)).compile()
    works["down"] = lambda: graph.teardown()
    ref = graph.execute("down")
    with pytest.raises(GraphTornDownError):
        ref.get()
    with pytest.raises(GraphTornDownError):
        graph.execute("again")


def test_an_actor_killed_by_another_thread_while_its_task_runs(actors):
    a, b = actors
    works["die"] = lambda: conveyor.kill(a)
    with InputNode() as inp:
        dag = b.do.bind("behind", a.do.bind(inp))
    with dag.compile() as graph:
        ref = graph.execute("die")
        with pytest.raises(ActorDiedError, match=r"conveyor\.kill"):
            ref.get()
        assert log == ["die"]
        with pytest.raises(ActorDiedError):
            graph.execute("more")
        assert graph.status().state == "failed"


def test_a_restart_waits_for_the_execution_that_runs(actors):
    a, _ = actors
    inside, go = threading.Event(), threading.Event()

    def work():
        inside.set()
        assert go.wait(WAIT)
        return "late"

    works["work"] = work
    c = conveyor.remote(Doer).options(max_restarts=1).remote()
    with InputNode() as inp:
        dag = MultiOutputNode([a.do.bind(inp), c.do.bind("c", inp)])
    with dag.compile(fail_fast=False) as graph:
        refs = []
        executing = threading.Thread(target=lambda: refs.extend(graph.execute("work")))
        executing.start()
        assert inside.wait(WAIT)
        conveyor.kill(c, no_restart=False)
        restarting = threading.Thread(target=graph.restart)
        restarting.start()
        go.set()
        executing.join(WAIT)
        restarting.join(WAIT)
        assert not executing.is_alive()
        assert not restarting.is_alive()
        assert refs[0].get() == "late"
        with pytest.raises(ActorDiedError):
            refs[1].get()
        assert conveyor.get(graph.execute("again")) == ["again", "c"]


def test_coroutines_and_threads_execute_the_same_graph(actors):
    a, _ = actors
    callers = [conveyor.remote(Coroutines).remote() for _ in range(2)]
    with InputNode() as inp:
        dag = a.nap.bind(inp)
    with dag.compile() as graph:
        works["execute"] = lambda: [graph.execute(0.001).get() for _ in range(20)]
        refs = []
        threads = [
            threading.Thread(target=lambda c=c: refs.append(c.do.remote("execute")))
            for c in callers
        ]
        threads.append(threading.Thread(target=lambda: refs.append(works["execute"]())))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        made = [ref if isinstance(ref, list) else conveyor.get(ref, timeout=WAIT) for ref in refs]
        assert made == [[0.001] * 20] * 3


def test_a_generator_ends_with_its_execution(actors):
    a, b = actors
    with InputNode() as inp:
        dag = MultiOutputNode([a.count.bind(100, inp), b.fail.bind(inp)])
    with dag.compile(stream_items=2) as graph:
        stream, failed = graph.execute("x")
        for ref in (stream, failed):
            with pytest.raises(ValueError, match="x") as caught:
                ref.get()
            assert isinstance(caught.value, TaskError)
            assert type(caught.value.__cause__) is ValueError
        assert len(log) == 2


def interrupt_main():
    """As Ctrl-C does: a signal that another thread takes would not wake the one that waits."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_an_interrupt_while_a_coroutine_runs(actors):
    waiting = conveyor.remote(Coroutines).remote()
    _, b = actors
    with InputNode() as inp:
        dag = b.do.bind("behind", waiting.hold.bind(inp))
    begun = threading.Event()
    works["begun"] = begun.set
    with dag.compile(depth=1) as graph:
        for _ in range(3):
            begun.clear()

            def interrupt():
                begun.wait(WAIT)
                interrupt_main()

            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                graph.execute(True)
            thread.join(WAIT)
            assert conveyor.get(waiting.cancelled.remote())
        assert log == []
        assert conveyor.get(graph.execute(False)) == "behind"


def test_a_coroutine_that_ends_after_its_execution_is_not_the_next_ones(actors):
    staying = conveyor.remote(Coroutines).remote()
    _, b = actors
    with InputNode() as inp:
        dag = b.do.bind(staying.either.bind(inp))

    def interrupt():
        threading.Timer(0.01, interrupt_main).start()

    works["begun"] = interrupt
    with dag.compile(depth=1) as graph:
        with pytest.raises(KeyboardInterrupt):
            graph.execute("first")
        # While this one's task waits, that of the other one ends.
        assert conveyor.get(graph.execute("second")) == "second"
        assert log == ["second"]


def test_a_program_that_was_left_between_two_steps_is_deployed_anew(actors, monkeypatch):
    a, b = actors

    def interrupt():
        raise KeyboardInterrupt

    works["now"] = interrupt
    with InputNode() as inp:
        dag = b.do.bind("behind", a.do.bind(inp))
    with dag.compile(depth=1) as graph:
        before = graph.execute("before")
        with monkeypatch.context() as patch:
            patch.setattr(InlinePart, "break_off", interrupt_again)
            with pytest.raises(KeyboardInterrupt):
                graph.execute("now")
        assert conveyor.get(graph.execute("later")) == "behind"
        assert before.get() == "behind"
        assert log == ["before", "behind", "now", "later", "behind"]


def interrupt_again(_part):
    raise KeyboardInterrupt


def test_a_graph_is_taken_down_when_it_is_garbage():
    kept = conveyor.remote(Doer).remote()
    with InputNode() as inp:
        graph = kept.me.bind(inp).compile()
    ref = graph.execute(0)
    instance = works["self"]
    del kept, graph, inp
    gc.collect()
    assert instance() is not None
    assert ref.get() is None
    del ref
    gc.collect()
    assert instance() is None


def wrapped(method):
    @functools.wraps(method)
    def call(*args):
        return method(*args)

    return call


@conveyor.remote
class Decorated:
    async def wait(self):
        self.come = asyncio.Event()
        await self.come.wait()
        return "come"

    @wrapped
    async def release(self, x):
        while not hasattr(self, "come"):
            await asyncio.sleep(0)
        self.come.set()
        return x


def test_a_decorated_coroutine_method_runs_on_the_actors_loop_in_a_graph():
    actor = Decorated.remote()
    waits = actor.wait.remote()
    with InputNode() as inp:
        dag = actor.release.bind(inp)
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(1), timeout=60) == 1
    assert conveyor.get(waits, timeout=60) == "come"
