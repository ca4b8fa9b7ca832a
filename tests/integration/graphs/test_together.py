"""An execution fails as one: whoever waits for anything of it hears at once of a task that has raised."""

import asyncio
import gc
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import inside
import pytest
from integration_helpers import WAIT, get, hold
from nodes_apart import WITH_DRIVER

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    ActorDiedError,
    DeadlineExceededError,
    ExecutionCancelledError,
    TaskError,
    WaitTimeoutError,
)
from conveyor.graph.failures import FailureTeller

cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: s; at once, on a machine that is busy.
SOON = 10


@conveyor.remote
class Rank:
    def __init__(self):
        self.seen = []

    def echo(self, x):
        self.seen.append(x)
        return x

    def hold(self, x, go, started=None):
        if started is not None:
            Path(started).touch()
        hold(go)
        return x

    def bad(self, x, text="rank 1 is out of memory"):
        raise RuntimeError(text)

    def bad_after(self, x, go, text, begun=None):
        if begun is not None:
            os.mkdir(begun)
        hold(go)
        raise KeyError(text)

    def fail_if(self, x, when):
        if x == when:
            raise ValueError(f"{x} is bad")
        return x

    def unsendable(self, x):
        return threading.Lock()

    def join(self, *args):
        self.seen.append(("join", *args))
        return args

    def items(self, n, go):
        yield from range(n)
        hold(go)
        yield "last"

    def noted(self):
        seen, self.seen = self.seen, []
        return seen

    def pid(self):
        return os.getpid()

    def stop_after_telling(self):
        """Never mark an execution as failed, as if this process were stopped before it does."""

        class Unmarked:
            def __init__(self, limits):
                self._limits = limits

            def __getattr__(self, name):
                return getattr(self._limits, name)

            def fail(self, execution):
                pass

        begin = FailureTeller.__init__

        def init(self, *args):
            begin(self, *args)
            self._limits = Unmarked(self._limits)

        FailureTeller.__init__ = init

    def tell_after_marking(self, path):
        """Its failures are told when the latch is open, and marked at once, as where what is told comes from
        another node behind the mark."""
        tell = FailureTeller.tell

        def late(teller, error, meta, of, cancelled):
            teller._limits.fail(of[1])
            hold(path)
            tell(teller, error, meta, of, cancelled)

        FailureTeller.tell = late


@conveyor.remote
class Coroutines:
    def __init__(self):
        self.seen = []

    async def wait(self, x, started=None):
        if started is not None:
            Path(started).touch()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.seen.append(("cancelled", x))
            raise
        return x

    async def cleans_up_badly(self, x, started):
        Path(started).touch()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise OSError("cannot clean up") from None

    async def noted(self):
        return self.seen


pytestmark = pytest.mark.usefixtures("session")


class Blocked:
    """Two ranks: one is held, the other raises at once."""

    def __init__(self, latches, **options):
        self.go, self.started = latches(), latches()
        self.held, self.bad = Rank.remote(), Rank.remote()
        with InputNode() as inp:
            held = self.held.hold.bind(inp, self.go.path, self.started.path)
            dag = MultiOutputNode([held, self.bad.bad.bind(inp)])
        self.graph = dag.compile(name="blocked", **options)


def _raises_soon(what, match="out of memory"):
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=match) as caught:
        what()
    assert time.monotonic() - began < SOON
    assert isinstance(caught.value, TaskError)
    return caught.value


WAYS = {
    "get of all": lambda refs: conveyor.get(refs),
    "get of the one that is held": lambda refs: refs[0].get(),
    "get of the one that failed": lambda refs: refs[1].get(),
    "get with a timeout": lambda refs: conveyor.get(refs[0], timeout=WAIT),
    "get backwards": lambda refs: conveyor.get(refs[::-1]),
    "await": lambda refs: asyncio.run(_awaited(refs[0])),
    "gather": lambda refs: asyncio.run(_gathered(refs)),
    "wait": lambda refs: (conveyor.wait([refs[0]]), refs[0].get(timeout=0)),
    "as an argument": lambda refs: get(Rank.remote().echo.remote(refs[0])),
}


async def _awaited(ref):
    return await ref


async def _gathered(refs):
    return await asyncio.gather(*refs)


@pytest.mark.parametrize("way", WAYS)
def test_whoever_waits_hears_of_it_at_once(latches, way):
    blocked = Blocked(latches)
    for x in range(3):  # the later ones wait behind the first, whose task still runs
        refs = blocked.graph.execute(x)
        _raises_soon(lambda refs=refs: WAYS[way](refs))
        assert all(ref.done() for ref in refs)
        assert not refs[0].cancel()
        assert not refs[0].cancelled()
        for ref in refs * 2:
            error = _raises_soon(ref.get)
            assert error.node.endswith(".bad")
    blocked.go.open()


def test_a_thread_that_waits_already_is_woken(latches, wait_until):
    go, bad = latches(), latches()
    held, other = Rank.remote(), Rank.remote()
    with InputNode() as inp:
        dag = MultiOutputNode(
            [held.hold.bind(inp, go.path), other.bad_after.bind(inp, bad.path, "late")]
        )
    with dag.compile() as graph:
        refs = graph.execute(1)
        heard = []

        def wait():
            with pytest.raises(KeyError):
                refs[0].get()
            heard.append(time.monotonic())

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        # What has not begun when the other fails never begins.
        wait_until(lambda: graph.status().actors[0].state == "running")
        bad.open()
        for thread in threads:
            thread.join(WAIT)
        assert len(heard) == 3
        assert graph.status().actors[0].state == "running"
        go.open()


def test_what_was_skipped_for_a_failure_is_no_result_before_that_is_told(latches, wait_until):
    go, fails, held, started = (latches() for _ in range(4))
    # These see the mark at once, as the driver does.
    late, other = (Rank.options(**WITH_DRIVER).remote() for _ in range(2))
    get(late.tell_after_marking.remote(go.path))
    with InputNode() as inp:
        passed = other.echo.bind(other.hold.bind(inp, held.path, started.path))
        dag = MultiOutputNode([late.bad_after.bind(inp, fails.path, "late"), passed])
    with dag.compile() as graph:
        refs = graph.execute(1)
        wait_until(lambda: started.is_open)
        fails.open()
        wait_until(lambda: inside.supervision_of(graph).epoch.limits.failed(0))
        held.open()
        assert get(other.noted.remote()) == []  # it was skipped, and that was sent
        assert conveyor.wait(refs, timeout=0.1)[0] == []
        go.open()
        for ref in refs:
            with pytest.raises(KeyError, match="late"):
                get(ref)


def test_a_failure_deep_in_the_graph_is_heard_before_its_consumers_have_their_inputs(latches):
    go = latches()
    a, b, c, d = (Rank.remote() for _ in range(4))
    with InputNode() as inp:
        slow = a.hold.bind(inp, go.path)
        joined = c.join.bind(d.echo.bind(slow), b.bad.bind(inp))
        dag = c.join.bind(joined)
    with dag.compile(name="deep") as graph:
        for x in range(20):  # more than the depth
            ref = graph.execute(x, timeout=WAIT)
            _raises_soon(ref.get)
            if x == 15:
                go.open()
        assert get(c.noted.remote()) == []


def test_depth_comes_back_and_nothing_is_kept():
    a, b, c = (Rank.remote() for _ in range(3))
    with InputNode() as inp:
        x = a.fail_if.bind(inp, 3)
        dag = MultiOutputNode([b.echo.bind(x), c.fail_if.bind(inp, 5), c.echo.bind(inp)])
    graph = dag.compile(depth=3)
    refs = []
    for i in range(300):
        n = i % 7
        refs = graph.execute(n, timeout=WAIT)
        if n in (3, 5):
            if i % 2:
                with pytest.raises(ValueError, match=f"{n} is bad"):
                    get(refs[0] if n == 3 else refs[1])
        else:
            assert get(refs) == [n, n, n]
    assert get(graph.execute(1)) == [1, 1, 1]
    del refs
    gc.collect()
    inside.window_of(graph).drain()
    assert inside.window_of(graph).stashed == 0
    assert inside.window_of(graph).failures() == []
    assert graph.status().executions == ()


@pytest.mark.parametrize("fail_fast", [True, False])
def test_a_result_that_is_there_waits_for_what_its_siblings_come_to(latches, fail_fast):
    go, bad = latches(), latches()
    a, b, c = (Rank.remote() for _ in range(3))
    with InputNode() as inp:
        dag = MultiOutputNode(
            [
                a.echo.bind(inp),
                b.hold.bind(inp, go.path),
                c.bad_after.bind(inp, bad.path, "c"),
            ]
        )
    with dag.compile(fail_fast=fail_fast) as graph:
        first, second, third = graph.execute("x")
        if fail_fast:
            assert conveyor.wait([first], timeout=0.1)[0] == []
            bad.open()
            for ref in first, second, third, first:
                with pytest.raises(KeyError, match="c"):
                    get(ref)
        else:
            assert get(first) == "x"
            bad.open()
            with pytest.raises(KeyError):
                get(third)
        go.open()
        if not fail_fast:
            assert get(second) == "x"


GOT_ALONE = {
    "get": lambda graph: get(graph.execute(-1)[0]),
    "wait": lambda graph: _waited(graph.execute(-1)[0]),
    "future": lambda graph: graph.execute(-1)[0].future().result(WAIT),
    "await": lambda graph: asyncio.run(_first_of(graph)),
    "argument": lambda graph: get(Rank.remote().echo.remote(graph.execute(-1)[0])),
}


def _waited(ref):
    conveyor.wait([ref], timeout=WAIT)
    assert ref.has_failed()
    ref.get(timeout=0)


async def _first_of(graph):
    return await (await graph.execute_async(-1))[0]


@pytest.mark.parametrize("engine_of_it", ["local", "inline"])
def test_one_result_raises_what_the_others_raise_that_were_dropped(engine_of_it):
    conveyor.shutdown()
    conveyor.init(engine=engine_of_it)
    ranks = [Rank.remote() for _ in range(3)]
    with InputNode() as inp:
        made = [ranks[0].echo.bind(inp), ranks[1].fail_if.bind(inp, -1), ranks[2].echo.bind(inp)]
    with MultiOutputNode(made).compile() as graph:
        for call in GOT_ALONE.values():
            with pytest.raises(ValueError, match="-1 is bad"):
                call(graph)
            assert get(graph.execute(1)[0]) == 1
    with MultiOutputNode(made).compile(fail_fast=False) as graph:
        assert get(graph.execute(-1)[0]) == -1
    conveyor.shutdown()


def test_the_siblings_errors_are_in_the_text_and_in_the_notes(latches, wait_until, tmp_path):
    go, both, begun = latches(), latches(), tmp_path / "begun"
    a, b, c = (Rank.remote() for _ in range(3))
    with InputNode() as inp:
        dag = MultiOutputNode(
            [
                a.hold.bind(inp, go.path),
                b.bad_after.bind(inp, both.path, "of b"),
                c.bad_after.bind(inp, go.path, "of c", str(begun)),
            ]
        )
    with dag.compile() as graph:
        refs = graph.execute(1)
        wait_until(begun.exists)  # else it is skipped
        both.open()
        with pytest.raises(KeyError) as caught:
            get(refs[0])
        first = caught.value
        assert "of b" in str(first)
        assert "of c" not in str(first)
        assert not getattr(first, "__notes__", [])
        go.open()
        # What is raised then tells of what has failed since.
        wait_until(lambda: "of c" in str(_error_of(refs[0])))
        assert "of c" not in str(first)
        for ref in refs:
            error = _error_of(ref)
            (note,) = error.__notes__
            assert error.args == ("of b",)
            assert "also failed in this execution: KeyError" in str(error)
            assert "of c" in note
            assert "bad_after" in note
            assert "Traceback" in note
            assert str(error).count("of c") == 1


def test_the_first_is_the_same_for_all_results():
    ranks = [Rank.remote() for _ in range(4)]
    with InputNode() as inp:
        dag = MultiOutputNode([rank.bad.bind(inp, f"rank {i}") for i, rank in enumerate(ranks)])
    with dag.compile() as graph:
        for _ in range(30):
            refs = graph.execute(1)
            errors = [_error_of(ref) for ref in refs]
            assert len({error.args for error in errors}) == 1
            conveyor.wait(refs, num_returns=4, timeout=WAIT)
    # All are told of, whoever was first.
    told = str(_error_of(refs[0]))
    assert len([i for i in range(4) if f"rank {i}" in told]) >= 1


def _error_of(ref):
    try:
        get(ref)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_tasks_that_have_not_begun_are_skipped_and_effects_count(latches, wait_until):
    go = latches()
    a, b = (Rank.remote() for _ in range(2))
    c = Rank.options(**WITH_DRIVER).remote()  # another node hears of the failure a little later
    with InputNode() as inp:
        held = a.hold.bind(inp, go.path)
        dag = MultiOutputNode([inp], effects=[c.join.bind(held), b.bad.bind(inp)])
    with dag.compile() as graph:
        (ref,) = graph.execute(1)
        _raises_soon(ref.get)
        go.open()
        wait_until(lambda: graph.status().executions == ())
        _raises_soon(ref.get)
        assert get(c.noted.remote()) == []


def test_tasks_are_skipped_once_the_failure_is_known_though_its_actor_stops_there(
    latches, wait_until
):
    go = latches()
    a, b = (Rank.remote() for _ in range(2))
    c = Rank.options(**WITH_DRIVER).remote()
    get(b.stop_after_telling.remote())
    with InputNode() as inp:
        held = a.hold.bind(inp, go.path)
        dag = MultiOutputNode([c.join.bind(held), b.bad.bind(inp)])
    with dag.compile() as graph:
        refs = graph.execute(1)
        _raises_soon(refs[0].get)
        go.open()
        wait_until(lambda: graph.status().executions == ())
        assert get(c.noted.remote()) == []


def test_a_value_that_cannot_be_sent_is_a_failure(latches):
    go = latches()
    a, b, c = (Rank.remote() for _ in range(3))
    with InputNode() as inp:
        dag = c.join.bind(a.hold.bind(inp, go.path), b.unsendable.bind(inp))
    with dag.compile() as graph:
        with pytest.raises(TypeError, match="lock"):
            get(graph.execute(1))
        go.open()


def test_a_coroutine_of_the_execution_is_cancelled_and_is_no_sibling(latches, wait_until):
    started, bad = latches(), latches()
    a, b = Coroutines.remote(), Rank.remote()
    with InputNode() as inp:
        dag = MultiOutputNode(
            [a.wait.bind(inp, started.path), b.bad_after.bind(inp, started.path, "b")]
        )
    with dag.compile() as graph:
        refs = graph.execute("x")
        with pytest.raises(KeyError):
            get(refs[0])
        wait_until(lambda: get(a.noted.remote()) == [("cancelled", "x")])
        wait_until(lambda: graph.status().executions == ())
        error = _error_of(refs[0])
        assert not getattr(error, "__notes__", [])
        bad.open()


def test_a_coroutine_that_cleans_up_badly_is_a_sibling(latches, wait_until):
    started = latches()
    a, b = Coroutines.remote(), Rank.remote()
    with InputNode() as inp:
        dag = MultiOutputNode(
            [a.cleans_up_badly.bind(inp, started.path), b.bad_after.bind(inp, started.path, "b")]
        )
    with dag.compile() as graph:
        refs = graph.execute("x")
        wait_until(lambda: "cannot clean up" in str(_error_of(refs[0])))
        assert isinstance(_error_of(refs[0]), KeyError)


def test_each_on_its_own(latches):
    blocked = Blocked(latches, fail_fast=False)
    held, bad = blocked.graph.execute(1)
    _raises_soon(bad.get)
    with pytest.raises(WaitTimeoutError, match="out of memory") as caught:
        held.get(timeout=0.05)
    assert "execution 0 has failed: RuntimeError: rank 1" in str(caught.value)
    assert not held.done()
    blocked.go.open()
    assert get(held) == 1


def test_the_log_and_the_status_mention_what_has_failed(latches, caplog, monkeypatch, wait_until):
    blocked = Blocked(latches, fail_fast=False)
    held, bad = blocked.graph.execute(1)
    _raises_soon(bad.get)
    (execution,) = blocked.graph.status().executions
    (error,) = execution.errors
    assert "RuntimeError: rank 1 is out of memory (raised in actor" in error
    assert "failed: RuntimeError" in str(blocked.graph.status())
    monkeypatch.setattr("conveyor.runtime.waiting.LOG_AFTER", 0.02)
    for wait in (lambda: held.get(timeout=0.3), lambda: conveyor.get([held, bad], timeout=0.3)):
        caplog.clear()
        with pytest.raises((WaitTimeoutError, RuntimeError)):
            wait()
    thread = threading.Thread(target=lambda: conveyor.wait([held]))
    thread.start()
    wait_until(lambda: any("has failed: Runtime" in r.getMessage() for r in caplog.records))
    blocked.go.open()
    thread.join(WAIT)


def test_the_status_of_one_that_fails_as_one(latches, wait_until):
    go, started = latches(), latches()
    a, b = Rank.remote(), Rank.remote()
    with InputNode() as inp:
        held = a.hold.bind(inp, go.path, started.path)
        dag = MultiOutputNode([held, b.bad_after.bind(inp, started.path, "b")])
    with dag.compile() as graph:
        refs = graph.execute(1)
        with pytest.raises(KeyError):
            get(refs[0])
        (execution,) = graph.status().executions
        assert "KeyError" in execution.errors[0]
        go.open()
        wait_until(lambda: graph.status().executions == ())


def test_a_deadline_and_a_failure(latches):
    blocked = Blocked(latches)
    refs = blocked.graph.execute(1, deadline=WAIT)
    _raises_soon(refs[0].get)
    blocked.go.open()
    go = latches()
    with InputNode() as inp:
        graph = blocked.held.hold.bind(inp, go.path).compile(deadline=0.05)
    with pytest.raises(DeadlineExceededError):
        get(graph.execute(1))
    go.open()


def test_a_cancel_and_a_failure_leave_one_outcome(latches):
    a, b = Rank.remote(), Rank.remote()
    with InputNode() as inp:
        dag = MultiOutputNode([a.echo.bind(inp), b.bad.bind(a.echo.bind(inp))])
    with dag.compile(depth=4) as graph:
        seen = set()
        for i in range(400):
            refs = graph.execute(i, timeout=WAIT)
            for _ in range(i % 40):
                refs[1]._source.is_ready(refs[1])
            cancelled = refs[1].cancel()
            error = _error_of(refs[1])
            assert isinstance(error, ExecutionCancelledError if cancelled else RuntimeError)
            seen.add(cancelled)
        assert get(a.echo.remote(1)) == 1
        inside.window_of(graph).drain()
        assert inside.window_of(graph).failures() == []


def test_items_that_are_there_come_before_the_failure(latches, wait_until):
    go, bad = latches(), latches()
    a, b = Rank.remote(), Rank.remote()
    with InputNode() as inp:
        dag = MultiOutputNode(
            [
                a.items.bind(3, go.path),
                b.bad_after.bind(inp, bad.path, "b"),
            ]
        )
    with dag.compile() as graph:
        stream, other = graph.execute(1)
        assert [stream.next(WAIT), stream.next(WAIT)] == [0, 1]
        wait_until(stream.done)
        bad.open()
        conveyor.wait([other], timeout=WAIT)
        assert stream.next(WAIT) == 2
        for _ in range(2):
            with pytest.raises(KeyError):
                stream.next(WAIT)
        go.open()
    assert get(a.echo.remote(1)) == 1


def test_an_actor_that_dies_is_its_own_cause(latches, wait_until):
    blocked = Blocked(latches)
    refs = blocked.graph.execute(1)
    _raises_soon(refs[0].get)
    os.kill(get(blocked.bad.pid.remote()), signal.SIGKILL)
    wait_until(lambda: blocked.graph.status().state == "failed")
    with pytest.raises(ActorDiedError):
        blocked.graph.execute(2)
    _raises_soon(refs[0].get)
    blocked.go.open()


@pytest.mark.parametrize("size", [10, 300_000])
def test_what_an_actor_told_before_it_died_is_heard(latches, wait_until, size):
    go, bad = latches(), Rank.remote()
    with InputNode() as inp:
        held = Rank.remote().hold.bind(inp, go.path)
        dag = MultiOutputNode([held, Rank.remote().echo.bind(bad.bad.bind(inp, "x" * size))])
    graph = dag.compile()
    pid = get(bad.pid.remote())
    refs = graph.execute(1)
    wait_until(
        lambda: inside.supervision_of(graph).epoch.limits.failed(0)
    )  # nothing has been read of it
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        get(bad.pid.remote())
    assert len(_raises_soon(refs[0].get, "xxx").args[0]) == size
    _raises_soon(refs[1].get, "xxx")
    go.open()


def test_nothing_is_left_to_be_heard_of_what_was_told(latches, wait_until):
    blocked = Blocked(latches)
    blocked.go.open()
    graph = blocked.graph
    for _ in range(50):
        _raises_soon(graph.execute(1)[1].get)
    wait_until(lambda: inside.window_of(graph).completed == 50)
    assert not inside.window_of(graph).hear()
    assert inside.window_of(graph).failures() == []
    assert inside.window_of(graph).stashed == 0


def test_a_restarted_graph_fails_as_one_as_well(latches, wait_until):
    blocked = Blocked(latches)
    refs = blocked.graph.execute(1)
    _raises_soon(refs[0].get)
    blocked.go.open()
    os.kill(get(blocked.bad.pid.remote()), signal.SIGKILL)
    wait_until(lambda: blocked.graph.status().state == "failed")
    blocked.graph.restart()
    os.unlink(blocked.go.path)
    executions = ()
    while not executions:  # where the task that waits had begun before the other one raised
        again = blocked.graph.execute(2)
        _raises_soon(again[0].get)
        executions = blocked.graph.status().executions
    _raises_soon(refs[0].get)
    assert "out of memory" in executions[0].errors[0]
    blocked.go.open()


@conveyor.remote
class Executor:
    def run(self, held, bad, go):
        with InputNode() as inp:
            dag = MultiOutputNode([held.hold.bind(inp, go), bad.bad.bind(inp)])
        with dag.compile() as graph:
            began = time.monotonic()
            try:
                conveyor.get(graph.execute(1)[0])
            except RuntimeError as error:
                Path(go).touch()
                return str(error), time.monotonic() - began


def test_a_graph_that_an_actor_executes(latches):
    go = latches()
    text, took = get(Executor.remote().run.remote(Rank.remote(), Rank.remote(), go.path))
    assert "out of memory" in text
    assert took < SOON


@conveyor.remote
class Caller:
    def call(self, graph):
        ref = graph.execute(1)[0]
        try:
            conveyor.get(ref)
        except RuntimeError as error:
            return str(error)


def test_a_handle_of_a_graph(latches):
    blocked = Blocked(latches)
    assert "out of memory" in get(Caller.remote().call.remote(blocked.graph))
    blocked.go.open()


def test_large_errors_and_many(latches, wait_until):
    a, b = Rank.remote(), Rank.remote()
    with InputNode() as inp:
        dag = MultiOutputNode([a.bad.bind(inp, "x" * 300_000), b.bad.bind(inp, "y" * 300_000)])
    with dag.compile(depth=4) as graph:
        for _ in range(40):
            refs = graph.execute(1)
            assert len(_error_of(refs[1]).args[0]) == 300_000
        del refs
    # What errors of tests before this one refer to is garbage, which may be collected at any time.
    wait_until(lambda: gc.collect() >= 0 and conveyor._core.live_leases() == 0)


# Several executions and calls, got at once


LISTS = {
    "list": lambda refs: conveyor.get(refs),
    "list with a timeout": lambda refs: conveyor.get(refs, timeout=WAIT),
    "tuple": lambda refs: conveyor.get(tuple(refs)),
    "dict": lambda refs: conveyor.get({"a": refs[0], "b": [refs[1]]}),
}


@pytest.mark.parametrize("shape", LISTS)
def test_the_first_error_of_several_calls_ends_the_wait(latches, shape):
    go, late = latches(), latches()
    a, b, c = (Rank.remote() for _ in range(3))
    held = a.hold.remote(1, go.path)
    later = c.bad_after.remote(1, late.path, "later")
    threading.Timer(0.05, late.open).start()  # it is waited for already
    with pytest.raises(KeyError, match="later"):
        LISTS[shape]([held, later])
    assert not held.done()
    _raises_soon(lambda: LISTS[shape]([held, b.bad.remote(1)]))
    assert not held.done()
    go.open()
    assert get([held, b.echo.remote(2)]) == [1, 2]


def test_the_first_error_of_several_executions_ends_the_wait(latches):
    go = latches()
    a, b = Rank.remote(), Rank.remote()
    with InputNode() as inp:
        held, bad = a.hold.bind(inp, go.path).compile(), b.bad.bind(inp).compile()
    with held, bad:
        ref = held.execute(1)
        _raises_soon(lambda: conveyor.get([ref, bad.execute(1)]))
        _raises_soon(lambda: conveyor.get([ref, b.bad.remote(1)]))
        _raises_soon(lambda: conveyor.get([a.echo.remote(1), bad.execute(1, deadline=WAIT)]))
        with pytest.raises(DeadlineExceededError):
            conveyor.get([ref, held.execute(2, deadline=0.05)])
        assert not ref.done()
        go.open()
        assert get([ref, ref]) == [1, 1]


def test_an_actor_that_dies_ends_the_wait_for_several(latches, wait_until):
    go = latches()
    a, b = Rank.remote(), Rank.remote()
    started = latches()
    refs = [a.hold.remote(1, go.path), b.hold.remote(2, go.path, started.path)]
    pid_of_b = b.pid.remote()
    wait_until(lambda: started.is_open)
    threading.Timer(0.05, lambda: conveyor.kill(b)).start()
    with pytest.raises(ActorDiedError):
        conveyor.get(refs)
    assert not refs[0].done()
    del pid_of_b
    go.open()


@conveyor.remote
class Gatherer:
    def gather(self, ranks, go):
        try:
            conveyor.get([ranks[0].hold.remote(1, go), ranks[1].bad.remote(1)])
        except RuntimeError as error:
            return str(error)


def test_an_actor_that_gets_several(latches):
    go = latches()
    ranks = [Rank.remote(), Rank.remote()]
    assert "out of memory" in get(Gatherer.remote().gather.remote(ranks, go.path))
    go.open()


def test_a_wait_for_several_mentions_what_has_failed(latches, caplog, monkeypatch, wait_until):
    go = latches()
    a, b = Rank.remote(), Rank.remote()
    refs = [a.hold.remote(1, go.path), b.bad.remote(1)]
    conveyor.wait(refs[1:], timeout=WAIT)
    monkeypatch.setattr("conveyor.runtime.waiting.LOG_AFTER", 0.02)
    thread = threading.Thread(target=lambda: conveyor.wait(refs, num_returns=2))
    thread.start()
    wait_until(lambda: any("failed: Rank" in r.getMessage() for r in caplog.records))
    (record,) = [r.getMessage() for r in caplog.records]
    assert "rank 1 is out of memory" in record
    go.open()
    thread.join(WAIT)


# Random graphs against plain Python


@pytest.mark.parametrize("seed", range(6))
def test_random_graphs_against_plain_python(seed, wait_until):
    rng = random.Random(seed)
    ranks = [Rank.remote() for _ in range(rng.randint(2, 5))]
    count = rng.randint(3, 12)
    shape = []  # of each task: the rank, what it takes (-1: the input), the input it fails for
    for i in range(count):
        shape.append((rng.randrange(len(ranks)), rng.randint(-1, i - 1), rng.randint(0, 9)))
    with InputNode() as inp:
        nodes = []
        for rank, source, when in shape:
            value = inp if source < 0 else nodes[source]
            nodes.append(ranks[rank].fail_if.bind(value, when))
        outputs = rng.sample(range(count), rng.randint(1, count))
        dag = MultiOutputNode([nodes[i] for i in outputs])
    with dag.compile(depth=4, ignore_unused=True) as graph:
        for x in [rng.randint(0, 12) for _ in range(120)]:
            upstream = {i: shape[i][1] for i in outputs}
            needed = set(outputs)
            while any(s >= 0 and s not in needed for s in upstream.values()):
                needed |= {s for s in upstream.values() if s >= 0}
                upstream = {i: shape[i][1] for i in needed}
            fails = any(shape[i][2] == x for i in needed)
            refs = graph.execute(x, timeout=WAIT)
            results = [_outcome(ref) for ref in refs if rng.random() < 0.8]
            if fails:
                assert set(results) <= {x, f"{x} is bad"}
                # A result that depends on a task that fails is never there.
                assert _outcome(refs[0]) in (x, f"{x} is bad")
                for place, output in enumerate(outputs):
                    if _fails(shape, output, x):
                        assert _outcome(refs[place]) == f"{x} is bad"
            else:
                assert set(results) <= {x}
        del refs
        gc.collect()  # an error's traceback holds who got it
        # The last results that nobody has asked for may be on their way.
        wait_until(
            lambda: inside.window_of(graph).drain() or inside.window_of(graph).failures() == []
        )
        assert inside.window_of(graph).stashed == 0


def _fails(shape, task, x):
    return task >= 0 and (shape[task][2] == x or _fails(shape, shape[task][1], x))


def _outcome(ref):
    try:
        return get(ref)
    except ValueError as error:
        return error.args[0]
