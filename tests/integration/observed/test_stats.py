"""``graph.stats()``: what was counted is what has happened, whatever the actors are doing now."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import numpy as np
import psutil
import pytest

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Actor:
    def echo(self, x):
        return x

    def odd(self, x):
        if x % 2 == 0:
            raise ValueError(x)
        return x

    async def later(self, x):
        await asyncio.sleep(0)
        return x

    def add(self, a, b):
        return a + b

    def two(self, x):
        return x, x

    def note(self, x):
        return object  # never travels

    def unsendable(self, x):
        return threading.Lock()

    def nap(self, x):
        time.sleep(x)
        return x

    def meet(self, path):
        open(path + ".here", "w").close()
        while not os.path.exists(path):
            time.sleep(0.002)

    def pid(self):
        return os.getpid()

    def big(self, n):
        return np.zeros(n, np.uint8)


@pytest.fixture
def actors(engine):
    return [Actor.options(name=name).remote() for name in "abc"]


def by_task(stats):
    return {t.task: (t.running.count, t.errors, t.skipped) for t in stats.tasks}


def by_source(stats):
    return {e.source: (e.frames, e.errors) for e in stats.edges}


def test_a_chain(actors):
    a, b, c = actors
    with InputNode() as inp:
        dag = c.echo.bind(b.echo.bind(a.echo.bind(inp)))
    with dag.compile() as graph:
        assert by_task(graph.stats()) == {
            "a.echo": (0, 0, 0),
            "b.echo": (0, 0, 0),
            "c.echo": (0, 0, 0),
        }
        for i in range(40):
            assert conveyor.get(graph.execute(i)) == i
        stats = graph.stats()
    assert by_task(stats) == {"a.echo": (40, 0, 0), "b.echo": (40, 0, 0), "c.echo": (40, 0, 0)}
    assert set(by_source(stats).values()) == {(40, 0)}
    assert (stats.submitted, stats.completed, stats.in_flight) == (40, 40, 0)
    assert stats.latency.count == 40
    for task in stats.tasks:
        times = task.running
        assert 0 < times.p50_s <= times.p99_s <= times.max_s <= times.total_s
        assert times.max_s <= stats.latency.max_s
    for edge in stats.edges:
        assert edge.bytes == 40 * 8
        assert [w.waiting.count for w in edge.waits] == [40]
    assert [(e.writer, e.waits[0].reader) for e in stats.edges] == [
        ("driver", "a"),
        ("a", "b"),
        ("b", "c"),
        ("c", "driver"),
    ]


def test_errors_are_counted_where_they_happen_and_where_they_pass(actors):
    a, b, c = actors
    with InputNode() as inp:
        odd = a.odd.bind(inp)
        dag = MultiOutputNode([c.add.bind(odd, b.echo.bind(inp))])
    # Otherwise the error is known, and the other tasks are skipped, before everything has been counted.
    with dag.compile(fail_fast=False) as graph:
        for i in range(10):
            [ref] = graph.execute(i)
            if i % 2:
                assert conveyor.get(ref) == 2 * i
            else:
                with pytest.raises(ValueError, match=str(i)):
                    conveyor.get(ref)
        stats = graph.stats()
    assert by_task(stats) == {"a.odd": (10, 5, 0), "b.echo": (10, 0, 0), "c.add": (5, 0, 5)}
    assert by_source(stats)["a.odd"] == (10, 5)
    assert by_source(stats)["b.echo"] == (10, 0)
    assert by_source(stats)["c.add"] == (10, 5)


def test_a_result_that_cannot_be_sent_is_an_error_of_its_edge(actors):
    a, _, _ = actors
    with InputNode() as inp:
        dag = a.unsendable.bind(inp)
    with dag.compile(fail_fast=False) as graph:
        for i in range(3):
            with pytest.raises(conveyor.exceptions.SerializationError):
                conveyor.get(graph.execute(i))
        stats = graph.stats()
    assert by_task(stats) == {"a.unsendable": (3, 0, 0)}
    assert by_source(stats)["a.unsendable"] == (3, 3)


def test_several_results_effects_and_values_that_stay_on_their_actor(actors):
    a, b, c = actors
    with InputNode() as inp:
        first, second = a.two.options(num_returns=2).bind(inp[0])
        same = a.echo.bind(second)
        dag = MultiOutputNode([b.add.bind(first, inp[1]), same], effects=[c.note.bind(first)])
    with dag.compile() as graph:
        for i in range(7):
            assert conveyor.get(graph.execute(i, 1)) == [i + 1, i]
        stats = graph.stats()
    assert set(by_task(stats).values()) == {(7, 0, 0)}
    assert set(by_task(stats)) == {"a.two", "a.echo", "b.add", "c.note"}
    assert set(by_source(stats).values()) == {(7, 0)}
    assert len(stats.edges) == len(graph.plan.edges)
    assert stats.latency.count == 7


def test_several_returns_of_the_wrong_number(actors):
    a, b, _ = actors
    with InputNode() as inp:
        first, _ = a.echo.options(num_returns=2).bind(inp)
        dag = b.echo.bind(first)
    with dag.compile(ignore_unused=True, fail_fast=False) as graph:
        with pytest.raises(ValueError, match="num_returns=2"):
            conveyor.get(graph.execute(1))
        stats = graph.stats()
    assert by_task(stats) == {"a.echo": (1, 1, 0), "b.echo": (0, 0, 1)}


def test_async_methods_and_many_executions_on_their_way(actors):
    a, b, _ = actors
    with InputNode() as inp:
        dag = b.echo.bind(a.later.bind(inp))
    with dag.compile(depth=5) as graph:
        refs = [graph.execute(i) for i in range(103)]
        assert conveyor.get(refs) == list(range(103))
        stats = graph.stats()
    assert by_task(stats) == {"a.later": (103, 0, 0), "b.echo": (103, 0, 0)}
    assert stats.latency.count == stats.completed == 103
    assert stats.stashed_results == 0


def test_threads(actors):
    a, b, _ = actors
    with InputNode() as inp:
        dag = b.echo.bind(a.echo.bind(inp))
    with dag.compile() as graph:

        def run(start):
            return [conveyor.get(graph.execute(start + i)) for i in range(25)]

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(run, range(0, 400, 100)))
        stats = graph.stats()
    assert results == [list(range(s, s + 25)) for s in range(0, 400, 100)]
    assert by_task(stats) == {"a.echo": (100, 0, 0), "b.echo": (100, 0, 0)}
    assert stats.latency.count == 100
    assert [w.waiting.count for w in stats.edges[-1].waits] == [100]


def test_the_running_time_is_that_of_the_method(actors):
    a, b, _ = actors
    with InputNode() as inp:
        dag = b.echo.bind(a.nap.bind(inp))
    with dag.compile() as graph:
        for _ in range(9):
            conveyor.get(graph.execute(0.004))
        conveyor.get(graph.execute(0.1))
        stats = graph.stats()
    nap = stats.tasks[0].running
    assert nap.p50_s >= 0.004 * 15 / 16
    assert nap.p50_s < 0.1
    assert nap.p99_s >= 0.1 * 15 / 16
    assert nap.max_s >= 0.1
    assert nap.total_s >= 0.136
    assert stats.latency.p50_s >= 0.004 * 15 / 16
    assert stats.latency.max_s >= 0.1


def test_numbers_stay_after_teardown_and_can_be_exported(actors):
    a, _, _ = actors
    with InputNode() as inp:
        dag = a.echo.bind(inp)
    with dag.compile(name='<"serve">') as graph:
        conveyor.get([graph.execute(i) for i in range(3)])
    stats = graph.stats()
    assert by_task(stats) == {"a.echo": (3, 0, 0)}
    told = json.loads(json.dumps(stats.as_dict()))
    assert told["graph"] == '<"serve">'
    assert told["tasks"][0]["running"]["count"] == 3
    assert told["edges"][1]["waits"][0]["reader"] == "driver"
    text = str(stats)
    assert text.startswith('<"serve">: 3 executions, 3 completed, 0 in flight\nlatency: p50 ')
    rows = [line.split() for line in text.splitlines()]
    assert ["a.echo", "a", "3", "0", "0"] in [row[:5] for row in rows]
    html = graph._repr_html_()
    assert "<svg" in html
    assert "&lt;&quot;serve&quot;&gt;" in html
    assert '<"serve">' not in html.replace("</svg>", "").split("</p>", 1)[0]
    assert "<td" in stats._repr_html_()


def test_what_cannot_be_sent_is_not_counted(actors):
    a, _, _ = actors
    with InputNode() as inp:
        dag = a.add.bind(inp[0], inp[1])
    with dag.compile() as graph:
        with pytest.raises(conveyor.exceptions.SerializationError):
            graph.execute(1, threading.Lock())
        stats = graph.stats()
        assert (stats.submitted, stats.in_flight) == (0, 0)
        assert set(by_source(stats).values()) == {(0, 0)}
        assert conveyor.get(graph.execute(1, 2)) == 3
        assert graph.stats().completed == 1


# On processes only


@pytest.mark.usefixtures("fresh_session")
class TestProcesses:
    def test_results_that_wait_in_the_driver_and_memory(self):
        a, b = Actor.options(name="a").remote(), Actor.remote()
        with InputNode() as inp:
            dag = MultiOutputNode([a.big.bind(inp), b.echo.bind(inp)])
        with dag.compile() as graph:
            refs = [graph.execute(1 << 20) for _ in range(3)]
            conveyor.get(refs[-1])
            stats = graph.stats()
            assert stats.stashed_results == 4
            assert stats.stashed_bytes > 2 << 20
            assert stats.arena_bytes["a"] >= 3 << 20
            assert by_source(stats)["a.big"] == (3, 0)
            assert stats.edges[1].bytes > 3 << 20
            conveyor.get(refs)
            assert graph.stats().stashed_results == 0

    def test_waiting_is_measured_at_the_reader(self):
        a, b = Actor.remote(), Actor.remote()
        with InputNode() as inp:
            dag = b.echo.bind(a.nap.bind(inp))
        with dag.compile() as graph:
            for _ in range(3):
                conveyor.get(graph.execute(0.1))
            stats = graph.stats()
        _, between, out = stats.edges
        assert between.waits[0].waiting.p50_s >= 0.02 * 15 / 16
        # Each get waited in more than one piece.
        assert out.waits[0].waiting.p50_s >= 0.01
        assert out.waits[0].waiting.count == 3

    def test_waiting_for_room(self, tmp_path):
        a = Actor.remote()
        with InputNode() as inp:
            dag = a.nap.bind(inp)
        with dag.compile(depth=1) as graph, graph.trace(tmp_path / "run.json"):
            assert graph.stats().room.count == 0
            conveyor.get([graph.execute(0.3), graph.execute(0)])

            async def one_after_the_other():
                refs = [await graph.execute_async(0.3) for _ in range(2)]
                return [await ref for ref in refs]

            asyncio.run(one_after_the_other())
            room = graph.stats().room
        assert room.count >= 2
        assert room.total_s >= 0.02
        events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
        assert "wait for room" in {e["name"] for e in events}

    def test_an_actor_that_is_stopped_busy_or_dead(self, tmp_path, wait_until):
        a, b = Actor.remote(), Actor.remote()
        pid = conveyor.get(b.pid.remote())
        with InputNode() as inp:
            dag = b.meet.bind(a.echo.bind(inp))
        graph = dag.compile()
        meeting = str(tmp_path / "first")
        open(meeting, "w").close()
        conveyor.get(graph.execute(meeting))

        busy = str(tmp_path / "second")
        ref = graph.execute(busy)
        wait_until(lambda: os.path.exists(busy + ".here"))
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
            stats = graph.stats()
            assert [t.running.count for t in stats.tasks] == [2, 1]
            assert [t.current_s is not None for t in stats.tasks] == [False, True]
            assert (stats.submitted, stats.completed, stats.in_flight) == (2, 1, 1)
        finally:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError):
            conveyor.get(ref)
        stats = graph.stats()
        assert [t.running.count for t in stats.tasks] == [2, 1]
        assert stats.tasks[1].current_s > 0
        assert [e.frames for e in stats.edges] == [2, 2, 1]
        assert stats.in_flight == 1
        assert "failed" in graph._repr_html_()
        graph.teardown()
        assert graph.stats().as_dict()["submitted"] == 2

    def test_two_graphs_on_the_same_actors_count_apart(self):
        a, b = Actor.remote(), Actor.remote()
        with InputNode() as inp:
            dag = b.echo.bind(a.echo.bind(inp))
        with dag.compile() as one, dag.compile() as other:
            for i in range(5):
                conveyor.get([one.execute(i), other.execute(i)])
            conveyor.get(one.execute(5))
            assert [t.running.count for t in one.stats().tasks] == [6, 6]
            assert [t.running.count for t in other.stats().tasks] == [5, 5]

    def test_a_forked_child_may_read_and_changes_nothing(self):
        a = Actor.remote()
        with InputNode() as inp:
            dag = a.echo.bind(inp)
        with dag.compile() as graph:
            conveyor.get([graph.execute(i) for i in range(3)])
            child = os.fork()
            if child == 0:
                os._exit(0 if graph.stats().submitted == 3 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert graph.stats().latency.count == 3
