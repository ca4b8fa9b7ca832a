"""``graph.trace()``: a file that a trace viewer takes, with everything that happened in it."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import numpy as np
import pytest
from nodes_apart import APART

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, GraphTornDownError, RuntimeStateError

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
        await asyncio.sleep(0.001)
        return x

    def add(self, a, b):
        return a + b

    def arrive(self, path):
        open(path, "w").close()
        signal.pause()

    def pid(self):
        return os.getpid()


@pytest.fixture
def actors(engine):
    return [Actor.options(name=name).remote() for name in "abc"]


def diamond(actors):
    a, b, c = actors
    with InputNode() as inp:
        first = a.odd.bind(inp)
        return MultiOutputNode([c.add.bind(first, b.later.bind(inp)), first])


class BootstrapFile:
    """A trace file, all of it checked."""

    def __init__(self, path):
        opened = gzip.open if str(path).endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8") as file:
            self.data = json.load(file)
        events = self.data["traceEvents"]
        assert {e["ph"] for e in events} <= {"M", "X", "s", "f"}
        self.slices = [e for e in events if e["ph"] == "X"]
        self.processes = {
            e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"
        }
        self.threads = {
            (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
        }
        self.tracks = defaultdict(list)
        for e in self.slices:
            assert e["dur"] >= 0
            assert (e["pid"], e["tid"]) in self.threads
            self.tracks[e["pid"], e["tid"]].append(e)
        for track in self.tracks.values():
            self._check_nesting(track)
        self.flows = self._checked_flows(events)

    @staticmethod
    def nanoseconds(e):
        begin = round(e["ts"] * 1000)
        return begin, begin + round(e["dur"] * 1000)

    def _check_nesting(self, track):
        times = [self.nanoseconds(e) for e in track]
        assert [t[0] for t in times] == sorted(t[0] for t in times)
        ends = []
        for begin, end in times:
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1], "a slice ends after the one it begins in"
            ends.append(end)

    def _checked_flows(self, events):
        begun, ended = {}, {}
        for e in events:
            if e["ph"] in "sf":
                into = begun if e["ph"] == "s" else ended
                assert e["id"] not in into
                into[e["id"]] = e
        assert begun.keys() == ended.keys()
        flows = []
        for id, s in begun.items():
            f = ended[id]
            assert f["bp"] == "e"
            assert f["ts"] >= s["ts"]
            flows.append((self._slice_at(s, "send"), self._slice_at(f, "receive")))
            assert flows[-1][0]["args"]["execution"] == flows[-1][1]["args"]["execution"]
        return flows

    def _slice_at(self, e, kind):
        found = [
            s for s in self.tracks[e["pid"], e["tid"]] if s["cat"] == kind and s["ts"] == e["ts"]
        ]
        assert len(found) == 1
        return found[0]

    def count(self):
        return Counter(e["name"] for e in self.slices if e["cat"] != "wait")


def test_everything_is_told(actors, tmp_path):
    path = tmp_path / "run.json"
    with diamond(actors).compile(name="work") as graph:
        before = time.monotonic_ns() / 1000
        with graph.trace(path) as trace:
            for i in range(1, 20, 2):
                assert conveyor.get(graph.execute(i)) == [2 * i, i]
        after = time.monotonic_ns() / 1000
        conveyor.get(graph.execute(21))
    told = BootstrapFile(path)
    assert trace.events == len(told.slices)
    assert trace.dropped == 0
    assert told.data["otherData"]["graph"] == "work"
    assert not any(told.data["otherData"]["dropped_events"].values())
    assert told.count() == {
        "execute": 10,
        "send input": 10,
        "receive input": 20,
        "a.odd": 10,
        "send a.odd": 10,
        "receive a.odd": 20,
        "b.later": 10,
        "send b.later": 10,
        "receive b.later": 10,
        "c.add": 10,
        "send c.add": 10,
        "receive c.add": 10,
    }
    # The driver reads a.odd, too.
    assert len(told.flows) == 10 * (2 + 2 + 1 + 1)
    # Of an actor of another node it is said where that is, and how well its clock is known.
    names = {*told.threads.values(), *(name.split(" on ")[0] for name in told.processes.values())}
    assert {"a", "b", "c"} <= names
    error = 1000 if APART else 0.001  # us
    for e in told.slices:
        if e["cat"] != "wait":
            assert e["ts"] >= before - error
        assert e["ts"] + e["dur"] <= after + error
        assert e["args"]["execution"] in range(10)
        if e["cat"] in ("send", "receive"):
            assert e["args"]["bytes"] == 8
    laters = [e for e in told.slices if e["name"] == "b.later"]
    assert all(e["dur"] >= 1000 for e in laters)


def test_errors_and_sizes(actors, tmp_path):
    a, b, _ = actors
    path = tmp_path / "run.json.gz"
    with InputNode() as inp:
        dag = MultiOutputNode([b.echo.bind(a.odd.bind(inp[0])), a.echo.bind(inp[1])])
    with dag.compile(fail_fast=False) as graph, graph.trace(path):
        for i in range(4):
            first, second = graph.execute(i, np.zeros(100_000, np.uint8))
            if i % 2:
                assert conveyor.get(first) == i
            else:
                with pytest.raises(ValueError, match=str(i)):
                    conveyor.get(first)
            assert conveyor.get(second).nbytes == 100_000
    told = BootstrapFile(path)
    failed = {(e["name"], e["args"]["execution"]) for e in told.slices if "error" in e["args"]}
    for i in (0, 2):
        assert {("a.odd", i), ("send a.odd", i), ("receive a.odd", i), ("send b.echo", i)} <= failed
    assert {execution for _, execution in failed} == {0, 2}
    assert told.count()["b.echo"] == 2  # it did not run where it got an error
    large = [
        e for e in told.slices if e["name"] in ("send a.echo", "receive a.echo", "send input[1]")
    ]
    assert len(large) >= 8
    assert all(e["args"]["bytes"] >= 100_000 for e in large)


def test_threads_and_many_executions_on_their_way(actors, tmp_path):
    a, b, _ = actors
    with InputNode() as inp:
        dag = b.echo.bind(a.echo.bind(inp))
    with dag.compile(depth=4) as graph, graph.trace(tmp_path / "run.json"):

        def run(start):
            refs = [graph.execute(start + i) for i in range(20)]
            return conveyor.get(refs)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(run, range(0, 300, 100)))

        async def awaited():
            return [await (await graph.execute_async(i)) for i in range(5)]

        asyncio.run(awaited())
    told = BootstrapFile(tmp_path / "run.json")
    assert told.count()["b.echo"] == told.count()["execute"] == told.count()["receive b.echo"] == 65
    assert len(told.flows) == 3 * 65


def test_one_trace_after_the_other_and_of_two_graphs_at_once(actors, tmp_path):
    a, b, _ = actors
    with InputNode() as inp:
        dag = b.echo.bind(a.echo.bind(inp))
    with dag.compile(name="one") as one, dag.compile(name="other") as other:
        for round in range(2):
            with one.trace(tmp_path / f"one{round}.json"), other.trace(tmp_path / "other.json"):
                for i in range(3 + round):
                    conveyor.get([one.execute(i), other.execute(i)])
            conveyor.get(one.execute(0))
    for round in range(2):
        told = BootstrapFile(tmp_path / f"one{round}.json")
        assert told.count()["a.echo"] == 3 + round
        assert {e["args"]["execution"] for e in told.slices} == set(
            range(4 * round, 4 * round + 3 + round)
        )
    assert BootstrapFile(tmp_path / "other.json").count()["a.echo"] == 4
    assert sorted(os.listdir(tmp_path)) == ["one0.json", "one1.json", "other.json"]


def test_a_second_trace_of_a_graph_is_refused(actors, tmp_path):
    with InputNode() as inp:
        dag = actors[0].echo.bind(inp)
    with dag.compile(name="work") as graph:
        with graph.trace(tmp_path / "run.json"):
            conveyor.get(graph.execute(1))
            with pytest.raises(RuntimeStateError, match=r"work is being traced into .*run\.json"):
                graph.trace(tmp_path / "run.json").__enter__()
            conveyor.get(graph.execute(2))
        assert BootstrapFile(tmp_path / "run.json").count()["a.echo"] == 2
        with pytest.raises(ValueError, match="max_events"):
            graph.trace(tmp_path / "run.json", max_events=0)
        with pytest.raises(FileNotFoundError):
            graph.trace(tmp_path / "no" / "run.json").__enter__()
        with graph.trace(tmp_path / "again.json"):
            conveyor.get(graph.execute(3))
    with pytest.raises(GraphTornDownError):
        graph.trace(tmp_path / "run.json").__enter__()
    assert sorted(os.listdir(tmp_path)) == ["again.json", "run.json"]


def test_a_body_that_raises_or_tears_down(actors, tmp_path):
    with InputNode() as inp:
        dag = actors[0].echo.bind(inp)
    path = tmp_path / "run.json"
    path.write_text("of before")
    with dag.compile() as graph:

        def fails():
            with graph.trace(path):
                assert path.read_text() == "of before"
                conveyor.get(graph.execute(1))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fails()
        assert BootstrapFile(path).count()["a.echo"] == 1
        with graph.trace(path):
            conveyor.get([graph.execute(i) for i in range(2)])
            graph.teardown()
        assert BootstrapFile(path).count()["a.echo"] == 2


def test_what_finds_no_room_is_counted(actors, tmp_path, caplog):
    with InputNode() as inp:
        dag = actors[0].echo.bind(inp)
    path = tmp_path / "run.json"
    with dag.compile() as graph:
        with (
            caplog.at_level(logging.WARNING, "conveyor"),
            graph.trace(path, max_events=20) as trace,
        ):
            for i in range(30):
                conveyor.get(graph.execute(i))
        told = BootstrapFile(path)
        assert len(told.slices) == trace.events == 20
        assert trace.dropped == sum(told.data["otherData"]["dropped_events"].values()) > 0
        assert f"{trace.dropped} events found no room" in caplog.text
        with graph.trace(path) as trace:
            conveyor.get(graph.execute(1))
        assert trace.dropped == 0


@pytest.mark.usefixtures("fresh_session")
def test_a_long_trace_loses_nothing(tmp_path):
    with InputNode() as inp:
        dag = Actor.remote().echo.bind(inp)
    with dag.compile() as graph, graph.trace(tmp_path / "run.json") as trace:
        for _ in range(60):  # more events than a ring holds
            conveyor.get([graph.execute(i) for i in range(200)])
    assert trace.dropped == 0
    assert trace.events >= 12_000 * 6
    with open(tmp_path / "run.json") as file:
        slices = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
    count = Counter(e["cat"] for e in slices)
    assert {count[kind] for kind in ("execute", "task")} == {12_000}
    assert {count[kind] for kind in ("send", "receive")} == {24_000}


@pytest.mark.usefixtures("fresh_session")
def test_a_forked_child_leaves_the_trace_to_its_parent(tmp_path):
    with InputNode() as inp:
        dag = Actor.remote().echo.bind(inp)
    path = tmp_path / "run.json"

    def forks(graph):
        with graph.trace(path):
            conveyor.get(graph.execute(1))
            child = os.fork()
            if child == 0:
                return 0
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert not path.exists()
            conveyor.get(graph.execute(2))
        return child

    with dag.compile() as graph:
        if forks(graph) == 0:
            try:
                with pytest.raises(RuntimeStateError):
                    graph.trace(path).__enter__()
            except BaseException:
                os._exit(1)
            os._exit(0)
    assert BootstrapFile(path).count()["Actor.echo"] == 2


@pytest.mark.usefixtures("fresh_session")
def test_an_actor_that_dies(tmp_path, wait_until):
    a, b = Actor.options(name="a").remote(), Actor.options(name="b").remote()
    pid = conveyor.get(b.pid.remote())
    with InputNode() as inp:
        dag = b.arrive.bind(a.echo.bind(inp))
    graph = dag.compile()
    here = str(tmp_path / "here")
    with graph.trace(tmp_path / "run.json"):
        ref = graph.execute(here)
        wait_until(lambda: os.path.exists(here))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError):
            conveyor.get(ref)
    told = BootstrapFile(tmp_path / "run.json")
    assert told.count() == {
        "execute": 1,
        "send input": 1,
        "receive input": 1,
        "a.echo": 1,
        "send a.echo": 1,
        "receive a.echo": 1,
        "b.arrive": 1,
    }
    [last] = [e for e in told.slices if e["name"] == "b.arrive"]
    assert last["args"] == {"execution": 0, "unfinished": True}
    assert last["pid"] == pid
    assert told.processes[pid] == "b"
    assert len(told.flows) == 2
    graph.teardown()


@pytest.mark.usefixtures("fresh_session")
def test_each_actor_is_a_process_with_its_pid(tmp_path):
    a, b = Actor.options(name="a").remote(), Actor.options(name="b").remote()
    pids = conveyor.get([a.pid.remote(), b.pid.remote()])
    with InputNode() as inp:
        dag = b.echo.bind(a.echo.bind(inp))
    with dag.compile(name="work") as graph, graph.trace(tmp_path / "run.json"):
        conveyor.get(graph.execute(1))
    told = BootstrapFile(tmp_path / "run.json")
    assert told.processes == {os.getpid(): "driver", pids[0]: "a", pids[1]: "b"}
    assert told.threads[pids[0], pids[0]] == "work"
    assert told.threads[os.getpid(), os.getpid()] == "MainThread"
