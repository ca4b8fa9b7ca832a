"""Metrics of graphs for Prometheus and OpenTelemetry."""

import re
import subprocess
import sys

import pytest

import conveyor
from conveyor import metrics
from conveyor.dag import InputNode, MultiOutputNode

LINE = re.compile(r'([a-z_]+)\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\} (\S+)')
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


@conveyor.remote
class Worker:
    def half(self, x):
        return x / 2

    def add(self, x, y):
        return x + y


def graph_of(name):
    a, b = Worker.options(name=f"{name} a").remote(), Worker.options(name=f"{name} b").remote()
    with InputNode() as inp:
        half = a.half.bind(inp)
        dag = MultiOutputNode([half, b.add.bind(half, inp)])
    return dag.compile(name=name, fail_fast=False)


def parsed(text):
    """{(name, labels): value}; every line must be one of the format."""
    found = {}
    for line in text.splitlines():
        if line.startswith("# "):
            assert re.fullmatch(
                r"# (HELP conveyor_\S+ .+|TYPE conveyor_\S+ (counter|gauge|summary))", line
            )
            continue
        match = LINE.fullmatch(line)
        assert match, line
        key = (match[1], frozenset(LABEL.findall(match[2])))
        assert key not in found, line
        found[key] = float(match[3])
    return found


def value(found, name, **labels):
    (match,) = [v for (n, have), v in found.items() if n == name and set(labels.items()) <= have]
    return match


def test_prometheus(engine):
    with graph_of("first") as graph, graph_of('odd "name"\\'):
        conveyor.get([graph.execute(x) for x in range(5)])
        failed = graph.execute("text")
        conveyor.wait(failed, num_returns=len(failed))
        with pytest.raises(TypeError):
            conveyor.get(failed)
        text = metrics.prometheus_text()
        found = parsed(text)
        stats = graph.stats()
        assert value(found, "conveyor_executions_submitted_total", graph="first") == 6
        assert value(found, "conveyor_executions_completed_total", graph="first") == 6
        assert value(found, "conveyor_executions_in_flight", graph="first") == 0
        assert value(found, "conveyor_execution_latency_seconds_count", graph="first") == 6
        latency = value(found, "conveyor_execution_latency_seconds", graph="first", quantile="0.5")
        assert latency == pytest.approx(stats.latency.p50_s)
        task = {"graph": "first", "task": "first a.half", "actor": "first a"}
        assert value(found, "conveyor_task_run_seconds_count", **task) == 6
        assert value(found, "conveyor_task_errors_total", **task) == 1
        assert value(found, "conveyor_task_skipped_total", graph="first", actor="first b") == 1
        for edge in stats.edges:
            where = {"graph": "first", "edge": str(edge.edge)}
            assert value(found, "conveyor_edge_frames_total", **where) == edge.frames
            assert value(found, "conveyor_edge_sent_bytes_total", **where) == edge.bytes
        nothing = value(found, "conveyor_executions_submitted_total", graph='odd \\"name\\"\\\\')
        assert nothing == 0
        only = parsed(metrics.prometheus_text([graph]))
        assert {dict(labels)["graph"] for _, labels in only} == {"first"}
    assert metrics.prometheus_text() == ""
    assert parsed(metrics.prometheus_text([graph]))


def test_graphs_of_one_name_are_told_apart(engine):
    with graph_of("same") as one:
        a = conveyor.get_actor("same a")
        with a.half.bind(InputNode()).compile(name="same") as two:
            conveyor.get(two.execute(1))
            found = parsed(metrics.prometheus_text())
            counts = [
                value(found, "conveyor_executions_submitted_total", graph_id=graph.get_id())
                for graph in (one, two)
            ]
            assert counts == [0, 1]


@pytest.mark.usefixtures("engine")
def test_it_takes_graphs_in_a_list():
    with graph_of("single") as graph:
        for graphs, given in ((graph, "CompiledGraph"), ([graph, 3], "int"), (3, "int")):
            with pytest.raises(TypeError, match=rf"prometheus_text\(\[graph\]\), not {given}"):
                metrics.prometheus_text(graphs)


def test_without_a_session_there_is_nothing():
    assert metrics.prometheus_text() == ""


def test_opentelemetry(engine):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    metrics.observe_with_opentelemetry(provider)
    with graph_of("told") as graph:
        conveyor.get([graph.execute(x) for x in range(3)])
        (resource,) = reader.get_metrics_data().resource_metrics
        (scope,) = resource.scope_metrics
        found = {metric.name: metric for metric in scope.metrics}
        (point,) = found["conveyor.executions_completed"].data.data_points
        assert (point.value, point.attributes["graph"]) == (3, "told")
        assert found["conveyor.executions_completed"].data.is_monotonic
        (point,) = found["conveyor.execution_latency.p99"].data.data_points
        assert point.value == pytest.approx(graph.stats().latency.p99_s)
        assert found["conveyor.execution_latency.p99"].unit == "s"
        runs = {
            p.attributes["task"]: p.value for p in found["conveyor.task_run.count"].data.data_points
        }
        assert runs == {"told a.half": 3, "told b.add": 3}
    provider.shutdown()


def test_nothing_of_opentelemetry_is_imported_unasked():
    code = "import sys, conveyor.metrics; assert not any('opentelemetry' in m for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_is_an_attribute_of_the_package_and_is_imported_when_it_is_requested_for():
    code = """
import sys, conveyor
assert "conveyor.metrics" not in sys.modules
assert conveyor.metrics.prometheus_text() == ""
assert conveyor.metrics is sys.modules["conveyor.metrics"]
try:
    conveyor.metric
except AttributeError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "module 'conveyor' has no attribute 'metric'\n"
