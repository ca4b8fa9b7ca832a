"""Compiled graphs of the local engine: order, pipelining, results, several graphs, explain."""

import gc
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import psutil
import pytest
from integration_helpers import WAIT, chain, hold

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import CapacityError, GraphTornDownError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("session")


@conveyor.remote
class Stage:
    def __init__(self):
        self.seen = []
        self.kept = None

    def echo(self, x):
        return x

    def add(self, x, n=1):
        return x + n

    def both(self, a, b):
        return a, b

    def note(self, x):
        self.seen.append(x)
        return x

    def mark(self, x, mark):
        self.seen.append((mark, x))
        return x

    def noted(self):
        seen, self.seen = self.seen, []
        return seen

    def hold(self, x, path=None):
        hold(path or x)
        return x

    def hold_first(self, x, path):
        if x == 0:
            hold(path)
        return x

    def make(self, x):
        self.kept = [x]
        return self.kept

    def same(self, x):
        return x is self.kept, id(x) == id(self.kept)

    def keywords(self, *, first, second):
        return f"{first}-{second}"

    @conveyor.method(num_returns=2)
    def split(self, x):
        return x, -x

    def pid(self):
        gc.collect()
        return os.getpid()


@pytest.fixture(scope="module")
def a(session):
    return Stage.remote()


@pytest.fixture(scope="module")
def b(session):
    return Stage.remote()


@pytest.fixture(scope="module")
def c(session):
    return Stage.remote()


# Shapes


def test_graphs_in_opposite_orders_over_the_same_actors_from_several_threads():
    @conveyor.remote
    class Step:
        def __init__(self, number):
            self.number = number

        def add(self, path):
            return [*path, self.number]

    steps = [Step.remote(i) for i in range(3)]
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2, 1), (0, 2, 0, 1, 2)]
    graphs = []
    for order in orders:
        node = InputNode()
        for i in order:
            node = steps[i].add.bind(node)
        graphs.append(node.compile(depth=4))
    failures = []

    def work(graph, order):
        refs = [graph.execute([n]) for n in range(200)]
        for n, ref in enumerate(refs):
            if conveyor.get(ref, timeout=60) != [n, *order]:
                failures.append((order, n))

    threads = [
        threading.Thread(target=work, args=pair) for pair in [*zip(graphs, orders, strict=True)] * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    for graph in graphs:
        graph.teardown()


def test_chain(a, b, c):
    with chain(a.add, b.add, c.add).compile() as graph:
        assert [conveyor.get(graph.execute(i), timeout=WAIT) for i in range(100)] == list(
            range(3, 103)
        )


def test_fan_out_and_in(a, b, c):
    with InputNode() as inp:
        left, right = a.add.bind(inp, 1), b.add.bind(inp, n=2)
        dag = c.both.bind(left, right)
    with dag.compile() as graph:
        refs = [graph.execute(i) for i in range(50)]
        assert conveyor.get(refs, timeout=WAIT) == [(i + 1, i + 2) for i in range(50)]


def test_several_outputs_one_of_them_twice(a, b):
    with InputNode() as inp:
        x = a.add.bind(inp)
        y = b.add.bind(x)
        dag = MultiOutputNode([y, x, y])
    with dag.compile() as graph:
        refs = graph.execute(0)
        assert len(refs) == 3
        assert conveyor.get(refs, timeout=WAIT) == [2, 1, 2]
        assert conveyor.get(refs[2], timeout=WAIT) == 2


def test_a_node_read_by_the_driver_and_by_actors(a, b, c):
    with InputNode() as inp:
        x = a.make.bind(inp)
        dag = MultiOutputNode([x, b.echo.bind(x), c.echo.bind(x), a.same.bind(x)])
    with dag.compile() as graph:
        for i in range(20):
            values = conveyor.get(graph.execute(i), timeout=WAIT)
            assert values == [[i], [i], [i], (True, True)]


def test_edges_within_an_actor_share_the_object(a):
    with InputNode() as inp:
        dag = a.same.bind(a.make.bind(inp))
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(object.__name__), timeout=WAIT) == (True, True)


def test_parts_of_the_input(a, b):
    with InputNode() as inp:
        dag = MultiOutputNode(
            [a.both.bind(inp[0], inp[1]), b.keywords.bind(first=inp.name, second=inp[0])]
        )
    with dag.compile() as graph:
        refs = [graph.execute(i, -i, name=f"n{i}") for i in range(20)]
        for i, pair in enumerate(refs):
            assert conveyor.get(pair, timeout=WAIT) == [(i, -i), f"n{i}-{i}"]


def test_nodes_inside_containers(a, b):
    with InputNode() as inp:
        x = a.add.bind(inp)
        dag = b.echo.bind({"list": [x, inp, "constant"], "tuple": (x,)})
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(1), timeout=WAIT) == {
            "list": [2, 1, "constant"],
            "tuple": (2,),
        }


def test_num_returns(a, b, c):
    with InputNode() as inp:
        plus, minus = a.split.bind(inp)
        dag = MultiOutputNode([b.echo.bind(minus), c.echo.bind(plus), minus])
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(5), timeout=WAIT) == [-5, 5, -5]


def test_tasks_of_an_actor_run_in_bind_order_execution_by_execution(a, b):
    conveyor.get(a.noted.remote(), timeout=WAIT)
    with InputNode() as inp:
        first = a.mark.bind(inp, "first")
        middle = b.echo.bind(first)
        dag = a.mark.bind(middle, "last")
    with dag.compile() as graph:
        conveyor.get([graph.execute(i) for i in range(20)], timeout=WAIT)
    expected = [(mark, i) for i in range(20) for mark in ("first", "last")]
    assert conveyor.get(a.noted.remote(), timeout=WAIT) == expected


def test_async_methods_in_a_graph():
    class Async:
        async def add(self, x):
            import asyncio

            await asyncio.sleep(0)
            return x + 1

    x, y = (conveyor.remote(Async).remote() for _ in range(2))
    with chain(x.add, y.add).compile() as graph:
        refs = [graph.execute(i) for i in range(50)]
        assert conveyor.get(refs, timeout=WAIT) == list(range(2, 52))


def test_eager_execution_gives_the_same(a, b, c):
    with InputNode() as inp:
        x = a.add.bind(inp)
        dag = MultiOutputNode([b.add.bind(x), c.both.bind(x, inp)])
    assert conveyor.get(dag.execute(1), timeout=WAIT) == [3, (2, 1)]
    with dag.compile() as graph:
        assert conveyor.get(graph.execute(1), timeout=WAIT) == [3, (2, 1)]


# Pipelining and results


def test_stages_work_on_different_executions(a, b, latches):
    # b is held in execution 0: a goes on meanwhile.
    conveyor.get(a.noted.remote(), timeout=WAIT)
    go = latches()
    with InputNode() as inp:
        dag = b.hold_first.bind(a.note.bind(inp), go.path)
    with dag.compile(depth=4) as graph:
        refs = [graph.execute(i) for i in range(4)]
        end = time.monotonic() + WAIT
        seen = []
        while len(seen) < 4:
            seen += conveyor.get(a.noted.remote(), timeout=WAIT)
            assert time.monotonic() < end, seen
        assert seen == [0, 1, 2, 3]
        assert not any(ref.done() for ref in refs)
        go.open()
        assert conveyor.get(refs, timeout=WAIT) == [0, 1, 2, 3]


def test_execute_waits_beyond_the_depth(a, latches):
    go = latches()
    with InputNode() as inp:
        dag = a.hold_first.bind(inp, go.path)
    with dag.compile(depth=2) as graph:
        refs = [graph.execute(0), graph.execute(1)]
        with pytest.raises(CapacityError, match="2 executions"):
            graph.try_execute(2)
        third = []
        thread = threading.Thread(target=lambda: third.append(graph.execute(2)))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        go.open()
        thread.join(WAIT)
        assert conveyor.get([*refs, *third], timeout=WAIT) == [0, 1, 2]


def test_results_that_nobody_fetches_do_not_stop_execute(a, b):
    with chain(a.echo, b.echo).compile(depth=2) as graph:
        refs = [graph.execute(i) for i in range(2000)]
        assert conveyor.get(refs, timeout=WAIT) == list(range(2000))


def test_many_in_flight_with_large_values(a, b):
    with chain(a.echo, b.echo).compile(depth=3) as graph:
        refs = [graph.execute(bytes([i]) * 300_000) for i in range(40)]
        for i, ref in enumerate(refs):
            assert conveyor.get(ref, timeout=WAIT) == bytes([i]) * 300_000


def test_out_of_order_and_repeated_get(a, b):
    with chain(a.echo, b.echo).compile() as graph:
        refs = [graph.execute([i]) for i in range(30)]
        for i in [*range(29, -1, -2), *range(0, 30, 2), 7, 7]:
            assert conveyor.get(refs[i], timeout=WAIT) == [i]
        assert conveyor.get(refs, timeout=WAIT) == [[i] for i in range(30)]


def test_dropped_references(a, b):
    with chain(a.echo, b.echo).compile(depth=4) as graph:
        kept = []
        for i in range(500):
            ref = graph.execute((i, bytes(5000)))
            if i % 50 == 0:
                kept.append(ref)
        del ref
        assert [value[0] for value in conveyor.get(kept, timeout=WAIT)] == list(range(0, 500, 50))
        assert conveyor.get(graph.execute("after"), timeout=WAIT) == "after"


def test_one_output_dropped_the_other_got(a, b):
    with InputNode() as inp:
        dag = MultiOutputNode([a.echo.bind(inp), b.echo.bind(inp)])
    with dag.compile(depth=2) as graph:
        for i in range(100):
            _, ref = graph.execute(i)
            assert conveyor.get(ref, timeout=WAIT) == i


def test_graph_results_as_arguments_and_in_wait(a, b, c, latches):
    go = latches()
    with chain(a.echo).compile() as graph, chain(b.hold).compile() as held:
        fast, slow = graph.execute(4), held.execute(go.path)
        assert conveyor.wait([slow, fast], timeout=WAIT) == ([fast], [slow])
        result = c.add.remote(fast, n=graph.execute(1))
        assert conveyor.get(result, timeout=WAIT) == 5
        go.open()
        assert conveyor.wait([slow], timeout=WAIT) == ([slow], [])


def test_results_are_there_after_teardown(a):
    graph = chain(a.echo).compile()
    refs = [graph.execute(i) for i in range(5)]
    conveyor.wait(refs, num_returns=5, timeout=WAIT)
    graph.teardown()
    assert conveyor.get(refs, timeout=WAIT) == list(range(5))


# Several graphs, threads, eager calls


def test_several_graphs_on_the_same_actors(a, b):
    there, back = chain(a.add, b.add).compile(), chain(b.echo, a.echo, b.echo).compile()
    with there, back:
        refs = [(there.execute(i), back.execute(i)) for i in range(100)]
        for i, (x, y) in enumerate(refs):
            assert conveyor.get([y, x], timeout=WAIT) == [i, i + 2]


def test_the_same_node_compiled_twice(a):
    dag = chain(a.add)
    with dag.compile() as one, dag.compile() as two:
        assert conveyor.get([one.execute(1), two.execute(2)], timeout=WAIT) == [2, 3]
    with dag.compile() as three:
        assert conveyor.get(three.execute(3), timeout=WAIT) == 4


def test_eager_calls_meanwhile(a, b):
    with chain(a.add, b.add).compile() as graph:
        refs = []
        for i in range(200):
            refs.append((graph.execute(i), a.echo.remote(i), b.add.remote(i)))
        for i, (x, y, z) in enumerate(refs):
            assert conveyor.get([x, y, z], timeout=WAIT) == [i + 2, i, i + 1]
    assert conveyor.get(a.echo.remote("after"), timeout=WAIT) == "after"


def test_compiling_while_an_actor_is_busy_and_another_graph_runs(a, b):
    stop = threading.Event()
    with chain(a.echo, b.echo).compile() as running:
        count = []

        def run():
            while not stop.is_set():
                i = len(count)
                assert conveyor.get(running.execute(i), timeout=WAIT) == i
                count.append(i)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            for i in range(20):
                with chain(b.add, a.add).compile() as graph:
                    assert conveyor.get(graph.execute(i), timeout=WAIT) == i + 2
        finally:
            stop.set()
            thread.join(WAIT)
        assert count


@pytest.mark.parametrize("depth", [1, 4])
def test_threads_get_the_results_of_their_own_references(a, b, depth):
    failures = []

    def work(k, graph):
        try:
            for i in range(150):
                ref = graph.execute((k, i))
                other = graph.execute((k, -i)) if i % 7 == 0 else None
                assert conveyor.get(ref, timeout=WAIT) == (k, i)
                if other is not None:
                    assert conveyor.get(other, timeout=WAIT) == (k, -i)
        except BaseException as error:
            failures.append(error)

    with chain(a.echo, b.echo).compile(depth=depth) as graph:
        threads = [threading.Thread(target=work, args=(k, graph)) for k in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    assert not failures


def test_threads_wait_for_the_same_reference(a, latches):
    go = latches()
    results = []
    with chain(a.hold).compile() as graph:
        ref = graph.execute(go.path)
        threads = [
            threading.Thread(target=lambda: results.append(conveyor.get(ref, timeout=WAIT)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        go.open()
        for thread in threads:
            thread.join(WAIT)
    assert results == [go.path] * 4


def test_one_thread_executes_another_gets(a, b):
    import queue

    passed = queue.Queue()

    def produce(graph):
        for i in range(500):
            passed.put(graph.execute(i))

    with chain(a.echo, b.echo).compile(depth=4) as graph:
        thread = threading.Thread(target=produce, args=(graph,))
        thread.start()
        for i in range(500):
            assert conveyor.get(passed.get(timeout=WAIT), timeout=WAIT) == i
        thread.join(WAIT)


# Teardown, leaks, explain


def test_teardown_twice_and_use_of_the_actors_afterwards(a):
    graph = chain(a.echo).compile()
    conveyor.get(graph.execute(1), timeout=WAIT)
    graph.teardown()
    graph.teardown()
    assert graph.is_teardown
    with pytest.raises(GraphTornDownError):
        graph.execute(2)
    assert conveyor.get(a.echo.remote(3), timeout=WAIT) == 3


def test_teardown_wakes_who_waits(a, latches):
    go, outcome = latches(), []
    graph = chain(a.hold).compile()
    ref = graph.execute(go.path)

    def wait():
        try:
            outcome.append(conveyor.get(ref, timeout=WAIT))
        except BaseException as error:
            outcome.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    # The method is in the middle of its work; teardown waits for the actor, not the waiter for it.
    ender = threading.Thread(target=graph.teardown)
    ender.start()
    waiter.join(WAIT)
    assert not waiter.is_alive()
    assert isinstance(outcome[0], GraphTornDownError)
    go.open()
    ender.join(WAIT)
    assert not ender.is_alive()


def test_several_threads_tear_a_graph_down_at_once(a, latches, wait_until):
    go, begun = latches(), []
    graph = chain(a.hold).compile()
    ref = graph.execute(go.path)
    wait_until(lambda: "running" in str(graph.status()))

    def end():
        begun.append(threading.get_ident())
        graph.teardown()

    def within_teardown(thread):
        frame = sys._current_frames().get(thread)
        while frame is not None:
            if frame.f_code.co_name == "teardown":
                return True
            frame = frame.f_back
        return False

    with ThreadPoolExecutor(3) as threads:
        ended = [threads.submit(end) for _ in range(3)]
        try:
            wait_until(lambda: len(begun) == 3 and all(map(within_teardown, begun)))
            assert not any(end.done() for end in ended)
        finally:
            go.open()
        for end in ended:
            end.result(WAIT)
    assert ref.done()


def test_teardown_with_executions_on_their_way(a, b):
    for _ in range(20):
        graph = chain(a.echo, b.echo).compile(depth=8)
        refs = [graph.execute(bytes(10_000)) for _ in range(8)]
        graph.teardown()
        del refs
    assert conveyor.get([a.echo.remote(1), b.echo.remote(2)], timeout=WAIT) == [1, 2]


def test_a_dropped_graph_frees_its_actors(a, b):
    for i in range(50):
        graph = chain(a.echo, b.echo).compile()
        assert conveyor.get(graph.execute(i), timeout=WAIT) == i
        del graph
    gc.collect()
    with chain(a.echo, b.echo).compile() as graph:
        assert conveyor.get(graph.execute(1), timeout=WAIT) == 1


# Ray's own descriptors and threads come and go in its processes. A round that left one leaves a thousand.
OTHERS = 50 if os.environ.get("CONVEYOR_ENGINE") == "ray" else 0


def _footprint(pids):
    found = {}
    for pid in pids:
        process = psutil.Process(pid)
        maps = [m.path for m in process.memory_maps(grouped=False)]
        found[pid] = (
            process.num_fds(),
            sum("memfd" in path for path in maps),
            process.num_threads(),
            process.memory_info().rss,
        )
    return found


def _settled_footprint(pids, *actors):
    gc.collect()
    conveyor.get([actor.pid.remote() for actor in actors], timeout=WAIT)  # collects there
    return _footprint(pids)


def test_a_thousand_rounds_leave_nothing(a, b):
    pids = [os.getpid(), *conveyor.get([a.pid.remote(), b.pid.remote()], timeout=WAIT)]

    def rounds(n):
        for i in range(n):
            with InputNode() as inp:
                x = a.add.bind(inp)
                dag = MultiOutputNode([x, b.add.bind(x)])
            with dag.compile() as graph:
                assert conveyor.get(graph.execute(i), timeout=WAIT) == [i + 1, i + 2]

    rounds(200)
    before = _settled_footprint(pids, a, b)
    rounds(1000)

    def left():
        after, found = _settled_footprint(pids, a, b), {}
        for pid in pids:
            fds, maps, threads, rss = (y - x for x, y in zip(before[pid], after[pid], strict=True))
            if max(fds, threads) > OTHERS or maps > 2 or rss >= 8 << 20:
                found[pid] = (
                    f"more: {fds} descriptors, {maps} mappings, {threads} threads, {rss >> 10} KiB"
                )
        return found

    # What ends by itself may take a moment.
    end = time.monotonic() + 20
    while left() and time.monotonic() < end:
        time.sleep(0.05)
    assert not left()


def test_executions_leave_nothing(a, b, wait_until):
    with chain(a.echo, b.echo).compile() as graph:
        pids = [os.getpid(), *conveyor.get([a.pid.remote(), b.pid.remote()], timeout=WAIT)]

        def run(n):
            for i in range(n):
                conveyor.get(graph.execute([i, "x" * 3000]), timeout=WAIT)
                graph.execute("dropped")
                a.echo.remote("dropped")

        run(1000)
        before = _footprint(pids)
        run(5000)

        def left():
            after, found = _footprint(pids), {}
            for pid in pids:
                fds, _, _, rss = (y - x for x, y in zip(before[pid], after[pid], strict=True))
                if fds > OTHERS or rss >= 8 << 20:
                    found[pid] = f"more: {fds} descriptors, {rss >> 10} KiB"
            return found

        # A thread may have one open just now.
        wait_until(lambda: not left(), what="an end of what is left")


def test_explain(a, b):
    with InputNode() as inp:
        dag = b.add.bind(a.echo.bind(inp))
    with dag.compile(name="the graph") as graph:
        text = graph.explain()
    for word in ("Stage", "echo", "add", "driver", "recv", "send", "call", "depth"):
        assert word in text
    assert "the graph" in repr(graph)
