"""Compiled graphs that other processes submit to."""

import asyncio
import gc
import os
import pickle
import signal
import sys
import threading
import time

import cloudpickle
import inside
import numpy as np
import pytest
from integration_helpers import WAIT, compiled, get, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import (
    ActorDiedError,
    CapacityError,
    DeadlineExceededError,
    GraphTornDownError,
    RuntimeStateError,
    SerializationError,
    WaitTimeoutError,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Stage:
    def __init__(self):
        self.seen = []

    def echo(self, x):
        return x

    def note(self, x):
        self.seen.append(x)
        return x

    def noted(self):
        seen, self.seen = self.seen, []
        return seen

    def hold(self, x, go):
        hold(go)
        return x

    def pack(self, *args, **kwargs):
        return args, kwargs

    def fail(self, x):
        raise KeyError(x)

    def pid(self):
        return os.getpid()


class Submitter:
    """Submits to graphs that it is given."""

    def __init__(self):
        self.refs = []
        self.graph = None

    def run(self, graph, *args, **kwargs):
        return conveyor.get(graph.execute(*args, **kwargs), timeout=WAIT)

    def describe(self, graph):
        return repr(graph), type(graph).__name__, graph.name

    def run_many(self, graph, tag, count):
        refs = [graph.execute((tag, i)) for i in range(count)]
        return conveyor.get(refs, timeout=WAIT)

    def run_async(self, graph, count):
        async def one(i):
            return await (await graph.execute_async(i))

        async def main():
            return await asyncio.gather(*(one(i) for i in range(count)))

        return asyncio.run(main())

    def log_after(self, seconds):
        from conveyor.runtime import waiting as time_limit

        before, time_limit.LOG_AFTER = time_limit.LOG_AFTER, seconds
        return before

    def start(self, graph, *args, **kwargs):
        self.refs.append(graph.execute(*args, **kwargs))

    def attempt(self, graph, *args, **kwargs):
        self.refs.append(graph.try_execute(*args, **kwargs))

    def started(self):
        return len(self.refs)

    def finish(self):
        refs, self.refs = self.refs, []
        return conveyor.get(refs, timeout=WAIT)

    def teardown(self, graph):
        graph.teardown()

    def with_ref(self, graph, other, bad=False):
        ref = (other.fail if bad else other.echo).remote("from a ref")
        return conveyor.get(graph.execute(ref), timeout=WAIT)

    def unsendable(self, graph):
        graph.execute(threading.Lock())

    def keep(self, graph):
        self.graph = graph

    def run_kept(self, x):
        return conveyor.get(self.graph.execute(x), timeout=WAIT)

    def drop(self):
        self.graph = None
        self.refs = []
        gc.collect()

    def threads(self):
        return sorted(t.name for t in threading.enumerate())

    def pass_on(self, graph, other):
        return other.run.remote(graph, "passed on").get(timeout=WAIT)

    def pid(self):
        return os.getpid()


@pytest.fixture(scope="module")
def a(session):
    return conveyor.remote(Stage).remote()


@pytest.fixture(scope="module")
def b(session):
    return conveyor.remote(Stage).remote()


@pytest.fixture(scope="module")
def submitter(session):
    return conveyor.remote(Submitter).remote()


@pytest.fixture(scope="module")
def pooled(session):
    return conveyor.remote(Submitter).options(max_concurrency=4).remote()


@pytest.fixture
def graph(a, b):
    with compiled(lambda inp: b.note.bind(a.note.bind(inp)), depth=4, name="shared") as graph:
        yield graph
        get([a.noted.remote(), b.noted.remote()])


@pytest.fixture(autouse=True)
def nothing_is_kept(session, wait_until, submitter, pooled):
    yield
    get([submitter.drop.remote(), pooled.drop.remote()])
    wait_until(lambda: inside.kept() == 0, WAIT, "the end of all exported results")


def test_an_actor_executes_a_graph_of_the_driver(graph, submitter):
    assert get(submitter.run.remote(graph, 1)) == 1
    assert get(submitter.run.remote(graph, None)) is None
    assert get(submitter.run.remote(graph, {"k": [1, 2]})) == {"k": [1, 2]}
    assert get(graph.execute("here")) == "here"
    shown, kind, name = get(submitter.describe.remote(graph))
    assert shown == "<CompiledGraph shared: compiled by another process>"
    assert (kind, name) == ("CompiledGraph", "shared")
    assert pickle.loads(pickle.dumps(graph)) is graph


def test_large_values_and_classes_of_main(graph, submitter):
    array = np.arange(300_000)
    assert (get(submitter.run.remote(graph, array)) == array).all()

    class Local:
        def __init__(self, x):
            self.x = x

    for i in range(3):
        assert get(submitter.run.remote(graph, Local(i))).x == i
    assert get(graph.execute(Local("here"))).x == "here"


def test_arguments_and_results_of_any_shape(a, submitter):
    with compiled(lambda inp: a.pack.bind(inp[0]["part"], k=inp.timeout)) as graph:
        assert get(submitter.run.remote(graph, {"part": 1}, timeout=2)) == ((1,), {"k": 2})
    with InputNode() as inp:
        dag = MultiOutputNode(
            {"out": [a.echo.bind(inp)], "in": inp, "const": "c"}, effects=[a.echo.bind(inp)]
        )
    with dag.compile() as graph:
        assert get(submitter.run.remote(graph, "x")) == {"out": ["x"], "in": "x", "const": "c"}


def test_executions_of_all_have_one_order(graph, a, b, submitter, pooled):
    calls = [submitter.run_many.remote(graph, "s", 60), pooled.run_many.remote(graph, "p", 60)]
    mine = [get(graph.execute(("d", i))) for i in range(60)]
    assert mine == [("d", i) for i in range(60)]
    assert get(calls) == [[(tag, i) for i in range(60)] for tag in "sp"]
    seen = get(a.noted.remote())
    assert seen == get(b.noted.remote())
    for tag in "spd":
        assert [i for t, i in seen if t == tag] == list(range(60))


def test_many_in_flight_from_an_event_loop(graph, submitter):
    assert get(submitter.run_async.remote(graph, 100)) == list(range(100))


def test_errors_arrive(a, graph, submitter):
    with (
        compiled(lambda inp: a.fail.bind(inp)) as failing,
        pytest.raises(KeyError, match="deep"),
    ):
        get(submitter.run.remote(failing, "deep"))
    with pytest.raises(SerializationError, match="lock"):
        get(submitter.unsendable.remote(graph))
    with pytest.raises(TypeError, match="exactly one argument"):
        get(submitter.run.remote(graph, 1, 2))
    with pytest.raises(RuntimeStateError, match="torn down by the process that compiled it"):
        get(submitter.teardown.remote(graph))
    assert get(submitter.run.remote(graph, "usable")) == "usable"


def test_refs_as_arguments_there(graph, a, submitter):
    assert get(submitter.with_ref.remote(graph, a)) == "from a ref"
    with pytest.raises(KeyError, match="from a ref"):
        get(submitter.with_ref.remote(graph, a, bad=True))


def test_a_timeout_is_not_cut_short_by_the_line_in_the_log(a, submitter, latches):
    go = latches()
    before = get(submitter.log_after.remote(0.05))
    try:
        with compiled(lambda inp: a.hold.bind(inp, go.path), depth=1) as graph:
            first = graph.execute(1)
            waiting = submitter.run.remote(graph, 2, timeout=WAIT)
            early, _ = conveyor.wait([waiting], timeout=0.5)
            go.open()
            assert early == []
            assert get([first, waiting]) == [1, 2]
    finally:
        get(submitter.log_after.remote(before))


def test_depth_holds_for_all(a, submitter, pooled, latches, wait_until):
    go = latches()
    with compiled(lambda inp: a.hold.bind(inp, go.path), depth=2) as graph:
        first = graph.execute(1)
        get(pooled.start.remote(graph, 2))
        with pytest.raises(CapacityError):
            graph.try_execute(3)
        with pytest.raises(CapacityError):
            get(submitter.attempt.remote(graph, 3))
        with pytest.raises(WaitTimeoutError, match="room for another execution"):
            get(submitter.start.remote(graph, 3, timeout=0.05))
        with pytest.raises(DeadlineExceededError, match="before it could begin"):
            get(submitter.start.remote(graph, 3, deadline=0.05))
        waiting = pooled.start.remote(graph, 4)
        time.sleep(0.02)
        with pytest.raises(CapacityError):
            get(pooled.attempt.remote(graph, 5))
        assert not waiting.done()
        go.open()
        get(waiting)
        assert get(first) == 1
        assert get(pooled.finish.remote()) == [2, 4]


def test_deadlines_there(a, submitter, latches):
    go = latches()
    with compiled(lambda inp: a.hold.bind(inp, go.path)) as graph:
        with pytest.raises(DeadlineExceededError, match="had run: none"):
            get(submitter.run.remote(graph, 1, deadline=0.05))
        go.open()
        assert get(submitter.run.remote(graph, 2, deadline=WAIT)) == 2


def test_a_torn_down_graph(a, submitter, latches, wait_until):
    go = latches()
    graph = compiled(lambda inp: a.hold.bind(inp, go.path), name="ended")
    get(submitter.keep.remote(graph))
    get(submitter.start.remote(graph, 1))
    tearing_down = threading.Thread(target=graph.teardown)
    tearing_down.start()
    # Else its result would have come before.
    wait_until(lambda: graph.status().state == "torn down")
    go.open()
    tearing_down.join(WAIT)
    with pytest.raises(GraphTornDownError, match="ended"):
        get(submitter.finish.remote())
    with pytest.raises(GraphTornDownError, match="ended"):
        get(submitter.run_kept.remote(2))
    with pytest.raises(GraphTornDownError):
        pickle.dumps(graph)


def test_an_actor_of_the_graph_dies(submitter, latches):
    dying = conveyor.remote(Stage).remote()
    graph = compiled(lambda inp: dying.hold.bind(inp, latches().path), name="bereft")
    get(submitter.keep.remote(graph))
    get(submitter.start.remote(graph, 1))
    conveyor.kill(dying)
    with pytest.raises(ActorDiedError, match="killed"):
        get(submitter.finish.remote())
    with pytest.raises(ActorDiedError, match="killed"):
        get(submitter.run_kept.remote(1))


def test_kill_nine_of_a_submitter_in_the_middle(a, latches, wait_until):
    go = latches()
    remote = conveyor.remote(Submitter).options(max_concurrency=4).remote()
    with compiled(lambda inp: a.hold.bind(inp, go.path), depth=2) as graph:
        for i in range(2):
            get(remote.start.remote(graph, i))
        blocked = remote.start.remote(graph, "waits for room")
        os.kill(get(remote.pid.remote()), signal.SIGKILL)
        with pytest.raises(ActorDiedError):
            get(blocked)
        wait_until(lambda: inside.kept() == 0, WAIT, "the release of its results")
        go.open()
        assert [get(graph.execute(i)) for i in range(5)] == list(range(5))
        inside.window_of(graph).drain()
        wait_until(lambda: inside.window_of(graph).stashed == 0)


def test_a_handle_is_passed_on_and_given_back(graph, submitter, pooled, wait_until):
    assert get(submitter.pass_on.remote(graph, pooled)) == "passed on"
    get(submitter.keep.remote(graph))
    assert get(submitter.run_kept.remote(1)) == 1
    assert "conveyor-graph-in" in get(submitter.threads.remote())
    get(submitter.drop.remote())
    wait_until(lambda: "conveyor-graph-in" not in get(submitter.threads.remote()))


def test_a_handle_keeps_a_graph_that_its_owner_has_dropped(a, submitter):
    graph = compiled(lambda inp: a.echo.bind(inp))
    get(submitter.keep.remote(graph))
    del graph
    gc.collect()
    assert get(submitter.run_kept.remote("still")) == "still"


def test_a_thousand_rounds_leave_nothing(graph, a, b, submitter, wait_until, opened_since):
    get(submitter.run_many.remote(graph, "x", 100))
    wait_until(lambda: inside.kept() == 0)
    opened = opened_since()
    for _ in range(10):
        assert len(get(submitter.run_many.remote(graph, "x", 100))) == 100
    wait_until(lambda: inside.kept() == 0)
    inside.window_of(graph).drain()
    assert inside.window_of(graph).stashed == 0
    wait_until(lambda: len(opened()) <= 2, what="what is closed a moment later")
    get([a.noted.remote(), b.noted.remote()])


def test_ctrl_c_in_the_driver_while_others_submit(scripts):
    program = """
        import os, signal, threading, time
        import conveyor
        from conveyor.dag import InputNode

        @conveyor.remote
        class A:
            def hold(self, x):
                while x == 20 and not os.path.exists("go"):
                    time.sleep(0.002)
                return x
            def many(self, graph, n):
                return conveyor.get([graph.execute(i) for i in range(n)], timeout=60)

        a, s = A.remote(), A.remote()
        with InputNode() as inp:
            graph = a.hold.bind(inp).compile(depth=2)
        ref = s.many.remote(graph, 300)
        def interrupt():
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
        try:
            threading.Thread(target=interrupt).start()
            conveyor.get(ref)
            print("not interrupted")
        except KeyboardInterrupt:
            print("interrupted")
        open("go", "w").close()
        print(conveyor.get(ref, timeout=60) == list(range(300)))
    """
    assert scripts.run(program) == "interrupted\nTrue\n"


def test_remote_it_cannot_be_loaded(graph, scripts):
    program = f"""
        import pickle
        import conveyor
        conveyor.init()
        try:
            pickle.loads({pickle.dumps(graph)!r})
        except conveyor.exceptions.RuntimeStateError as error:
            print(error)
    """
    assert "belongs to another session" in scripts.run(program)


def test_inline_a_handle_is_the_graph(scripts):
    program = """
        import pickle
        import conveyor
        from conveyor.dag import InputNode
        conveyor.init(engine="inline")
        class A:
            def echo(self, x): return x
            def run(self, graph, x): return graph.execute(x).get()
        a, b = conveyor.remote(A).remote(), conveyor.remote(A).remote()
        with InputNode() as inp:
            graph = a.echo.bind(inp).compile()
        assert pickle.loads(pickle.dumps(graph)) is graph
        print(b.run.remote(graph, "inside").get())
        graph.teardown()
        try:
            pickle.dumps(graph)
        except conveyor.exceptions.GraphTornDownError:
            print("torn down")
    """
    assert scripts.run(program) == "inside\ntorn down\n"
