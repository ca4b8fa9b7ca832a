"""What is seen of actors on other nodes: what they do, what they have counted, and their part of a trace."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import cloudpickle
import inside
import pytest
import ray
from ray_nodes import HERE, THERE, TIMEOUT, WAIT, Adds, get

import conveyor
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.exceptions import ActorDiedError, WaitTimeoutError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@conveyor.remote
class Stage(Adds):
    def hold(self, x, inside, go):
        open(inside, "w").close()
        while not os.path.exists(go):
            time.sleep(0.002)
        return x

    def ask(self, other, x, inside, go):
        return conveyor.get(other.hold.remote(x, inside, go))

    def graph_over(self, stages, path):
        with InputNode() as inp:
            node = inp
            for stage in stages:
                node = stage.run.bind(node)
        with node.compile() as graph:
            with graph.trace(path) as trace:
                got = conveyor.get([graph.execute(i) for i in range(10)])
            stats = until(graph.stats, lambda stats: not stats.unknown)
            states = [actor.state for actor in status_of(graph).actors]
        counts = [task.running.count for task in stats.tasks]
        return got, counts, states, trace.dropped


@pytest.fixture(scope="module")
def nodes(two_nodes, leaves_nothing):
    """Two actors here and two there, in a session in which each of two nodes is a host of its own."""
    with leaves_nothing():
        conveyor.init(engine="ray", shared_memory="node", node_timeout=TIMEOUT)
        here, there = (
            [Stage.options(**where, name=f"{name} {i}").remote() for i in (0, 1)]
            for name, where in (("here", HERE), ("there", THERE))
        )
        yield here, there
        conveyor.shutdown()


def until(find, good):
    """What is found once it is good: a node that has little time may not answer at once."""
    end = time.monotonic() + WAIT
    while not good(found := find()):
        assert time.monotonic() < end, found
    return found


def stats_of(graph):
    return until(graph.stats, lambda stats: not stats.unknown)


def status_of(graph):
    states = ("elsewhere",)
    return until(graph.status, lambda found: all(a.state not in states for a in found.actors))


def pipeline(*stages):
    with InputNode() as inp:
        node = inp
        for stage in stages:
            node = stage.run.bind(node)
    return node


def agent():
    (host,) = inside.agents()
    return host


def test_counters_of_another_node(nodes):
    (here, _), (one, two) = nodes
    with pipeline(one, here, two, one).compile() as graph:
        assert get([graph.execute(i) for i in range(10)]) == [i + 4 for i in range(10)]
        stats = stats_of(graph)
        assert [task.running.count for task in stats.tasks] == [10] * 4
        assert [edge.frames for edge in stats.edges] == [10] * len(stats.edges)
        assert all(edge.bytes > 0 for edge in stats.edges)
        assert all(w.waiting.count == 10 for e in stats.edges[:-1] for w in e.waits)
        assert all(task.running.total_s > 0 for task in stats.tasks)
    assert "torn down" in graph.stats().unknown["there 0"]


def test_latency_of_results_from_another_node(nodes, tmp_path, wait_until):
    (here, _), (one, _) = nodes
    with pipeline(here, one).compile() as graph:
        began = time.monotonic()
        got = [get(graph.execute(i)) for i in range(40)]
        took = time.monotonic() - began
        assert got == [i + 2 for i in range(40)]
        latency = graph.stats().latency
        assert latency.count == 40
        assert 0 < latency.p50_s <= latency.max_s
        assert latency.total_s <= took
    inside, go = str(tmp_path / "inside"), str(tmp_path / "go")
    with InputNode() as inp:
        # The one here is done long before the other.
        dag = MultiOutputNode([one.hold.bind(inp, inside, go), here.run.bind(inp)])
    with dag.compile(fail_fast=False) as graph:
        began = time.monotonic()
        refs = graph.execute(1)
        submitted = time.monotonic()
        wait_until(lambda: os.path.exists(inside), WAIT)
        wait_until(lambda: refs[1].done(), WAIT)
        held = time.monotonic() - submitted
        open(go, "w").close()
        assert get(refs) == [1, 2]
        assert held <= graph.stats().latency.max_s <= time.monotonic() - began


def test_what_actors_of_another_node_do(nodes, tmp_path, wait_until):
    (here, _), (one, two) = nodes
    inside, go = str(tmp_path / "inside"), str(tmp_path / "go")
    with InputNode() as inp:
        first = one.hold.bind(inp, inside, go)
        dag = MultiOutputNode([two.run.bind(first), here.run.bind(inp)])
    with dag.compile(fail_fast=False) as graph:
        refs = graph.execute(1)
        wait_until(lambda: os.path.exists(inside), WAIT)
        wait_until(lambda: refs[1].done(), WAIT)
        by_name = {actor.name: actor for actor in status_of(graph).actors}
        works, waits = by_name["there 0"], by_name["there 1"]
        assert (works.state, works.method, works.execution) == ("running", "there 0.hold", 0)
        assert works.host == waits.host == agent().name
        assert waits.state == "waiting"
        assert (waits.waits_for.source, waits.waits_for.writer) == ("there 0.hold", "there 0")
        assert by_name["here 0"].host is None
        task = next(task for task in stats_of(graph).tasks if task.task == "there 0.hold")
        assert task.current_s > 0
        # Who waits says what it waits for, also there.
        with pytest.raises(WaitTimeoutError) as caught:
            conveyor.get(refs[0], timeout=0.05)
        if "not known" not in str(caught.value):  # its host has little time for this
            assert "there 0 is running there 0.hold (execution 0)" in str(caught.value)
            assert "there 1 is idle, waiting for there 0.hold of execution 0" in str(caught.value)
        open(go, "w").close()
        assert get(refs) == [2, 2]
        pid = get(one.pid.remote())
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: graph.status().actors[0].state == "stopped", WAIT)
        finally:
            os.kill(pid, signal.SIGCONT)


def test_a_call_that_is_waited_for_says_what_its_actor_waits_for(nodes, tmp_path, wait_until):
    _, (one, two) = nodes
    inside, go = tmp_path / "inside", tmp_path / "go"
    ref = one.ask.remote(two, 1, str(inside), str(go))
    wait_until(inside.exists, WAIT)

    def said():
        with pytest.raises(WaitTimeoutError) as caught:
            conveyor.get(ref, timeout=0.05)
        return str(caught.value)

    until(said, lambda text: re.search(r"there 0 is running ask .* which waits for there 1", text))
    go.touch()
    assert get(ref) == 1


def test_a_node_that_does_not_answer_is_not_known(nodes):
    """Its agent is stopped: it says so, and nobody waits for long."""
    (here, _), (one, _) = nodes
    with pipeline(here, one).compile() as graph:
        assert get(graph.execute(1)) == 3
        pid = ray.get(agent().agent.__ray_call__.remote(lambda self: os.getpid()), timeout=WAIT)
        os.kill(pid, signal.SIGSTOP)
        try:
            status, stats = graph.status(), graph.stats()
        finally:
            os.kill(pid, signal.SIGCONT)
        far = status.actors[1]
        assert (far.state, far.name) == ("elsewhere", "there 0")
        assert "what it does is not known: its host has not answered for 2 s" in str(status)
        assert "has not answered" in stats.unknown["there 0"]
        # There is no sample of it: 0 would say that it has begun anew.
        assert "not known: there 0, as its host has not answered" in str(stats)
        import conveyor.metrics

        assert stats.tasks[0].running.count == 1
        # It answers again, and then the questions before this one do not count.
        assert stats_of(graph).tasks[1].running.count == 1
        until(
            lambda: conveyor.metrics.prometheus_text([graph]),
            lambda text: 'actor="there 0"' in text,
        )


def executed_until_it_fails(graph):
    while True:
        get(graph.execute(1))


def events_of(path):
    with open(path) as file:
        return json.load(file)


@pytest.mark.parametrize("by", ["driver", "actor"])
def test_traces_over_nodes(nodes, tmp_path, by):
    (here, other), (one, two) = nodes
    path = str(tmp_path / "trace.json")
    if by == "driver":
        with pipeline(here, one, two).compile(name="traced") as graph:
            get(graph.execute(0))

            def traced():
                with graph.trace(path) as trace:
                    assert get([graph.execute(i) for i in range(10)]) == list(range(3, 13))
                assert trace.dropped == 0
                return events_of(path)

            trace = until(traced, lambda trace: not trace["otherData"]["not_known"])
        far, near = {"there 0", "there 1"}, "the driver's node"
    else:

        def traced_there():
            stages = [here, two, other]
            got, counts, states, dropped = get(one.graph_over.remote(stages, path))
            assert got == list(range(3, 13))
            assert (counts, dropped) == ([10] * 3, 0)
            assert "elsewhere" not in states
            return events_of(path)

        trace = until(traced_there, lambda trace: not trace["otherData"]["not_known"])
        far, near = {"here 0", "here 1"}, agent().name
    data = trace["otherData"]
    assert data["clock"] == f"CLOCK_MONOTONIC of {near}"
    assert set(data["clocks"]) == far
    # Both nodes are this machine, with one clock.
    for clock in data["clocks"].values():
        assert abs(clock["ahead_ns"]) <= clock["error_ns"] < 10**10
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    tasks = [event for event in slices if event["cat"] == "task"]
    assert len(tasks) == 30
    names = {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "process_name"
    }
    for name in far:
        assert any(
            re.fullmatch(rf"{name} on .*, times within .*", shown) for shown in names.values()
        )
    # Frames arrive after they were sent, as far as the clocks are known.
    error = max(clock["error_ns"] for clock in data["clocks"].values()) / 1000
    sent = {e["id"]: e["ts"] for e in trace["traceEvents"] if e["ph"] == "s"}
    came = {e["id"]: e["ts"] for e in trace["traceEvents"] if e["ph"] == "f"}
    assert sent.keys() == came.keys()
    assert len(sent) >= 30
    spans = {(e["pid"], e["tid"], e["ts"]): e["ts"] + e["dur"] for e in slices}
    ends = {
        e["id"]: spans[e["pid"], e["tid"], e["ts"]] for e in trace["traceEvents"] if e["ph"] == "f"
    }
    assert all(ends[i] >= sent[i] - 2 * error for i in sent)


def test_who_dies_while_it_is_traced(nodes, tmp_path):
    (here, _), _ = nodes
    doomed = Stage.options(**THERE, name="doomed").remote()
    path = tmp_path / "trace.json"
    with pipeline(here, doomed).compile() as graph:
        with graph.trace(path):
            assert get(graph.execute(1)) == 3
            conveyor.kill(doomed)
            with pytest.raises(ActorDiedError):
                executed_until_it_fails(graph)
        assert graph.status().actors[1].state == "dead"
        assert stats_of(graph).tasks[1].running.count >= 1
    trace = events_of(path)
    done = [e for e in trace["traceEvents"] if e.get("cat") == "task" and "doomed" in e["name"]]
    assert done or "doomed" in trace["otherData"]["not_known"]


def seen(*words):
    """What the command says of this session, in JSON."""
    command = [sys.executable, "-m", "conveyor", "status", str(os.getpid()), "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    sessions = json.loads(done.stdout)
    # Tests of the core that this process has run before may have boards of their own here.
    (session,) = [one for one in sessions if any(p["name"] == "here 0" for p in one["processes"])]
    return session


def fails(*how):
    """As if the other node could not connect to the driver's for values."""
    failing = None if how == (None,) else how
    setting = agent().agent.__ray_call__.remote(
        lambda self: setattr(self._carrier._supply, "_failing", failing)
    )
    ray.get(setting, timeout=WAIT)


def test_the_command_shows_all_nodes(nodes, tmp_path, wait_until):
    _, (one, two) = nodes
    inside, go = tmp_path / "inside", tmp_path / "go"
    get(two.pid.remote())
    with InputNode() as inp:
        dag = one.hold.bind(inp, str(inside), str(go))
    with dag.compile(name="held") as graph:
        ref = graph.execute(1)
        wait_until(inside.exists, WAIT)
        session = until(seen, lambda session: not session["unknown"])
        by_name = {process["name"]: process for process in session["processes"]}
        assert len(by_name) == len(session["processes"])
        works = by_name["there 0"]
        assert (works["state"], works["method"], works["execution"]) == (
            "running",
            "there 0.hold",
            0,
        )
        assert works["node"] == by_name["there 1"]["node"] == agent().name
        assert works["pid"]
        assert by_name["there 1"]["state"] == "idle"
        assert by_name["here 0"]["node"] is None
        assert session["troubles"] == []
        fails(time.monotonic(), 3, "refused")
        (trouble,) = until(seen, lambda session: not session["unknown"])["troubles"]
        fails(None)
        assert trouble["node"] == agent().name
        assert re.fullmatch(
            r"values that lie on the driver's node are waited for, to which no connection comes about since "
            r".* s \(3 tries; refused\)",
            trouble["what"],
        )
        go.touch()
        assert get(ref) == 1
    pid = ray.get(agent().agent.__ray_call__.remote(lambda self: os.getpid()), timeout=WAIT)
    os.kill(pid, signal.SIGSTOP)
    try:
        session = seen()
        (unknown,) = session["unknown"]
        assert unknown["node"] == agent().name
        assert "has not answered" in unknown["why"]
        by_name = {process["name"]: process for process in session["processes"]}
        assert by_name["there 0"]["state"] == "elsewhere"
    finally:
        os.kill(pid, signal.SIGCONT)
