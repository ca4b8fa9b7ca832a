"""Traces whose beginning or end is broken off, by Ctrl-C say: nothing of them goes on."""

import json

import pytest

import conveyor
from conveyor.dag import InputNode
from conveyor.graph.telemetry import RemoteStatus


@conveyor.remote
class Actor:
    def echo(self, x):
        return x


@pytest.fixture
def graph(engine):
    with InputNode() as inp:
        dag = Actor.remote().echo.bind(inp)
    with dag.compile() as made:
        yield made


def interrupted(*_, **__):
    raise KeyboardInterrupt


def works(graph, path):
    with graph.trace(path):
        assert conveyor.get(graph.execute(3), timeout=60) == 3
    events = json.loads(path.read_text())["traceEvents"]
    assert [e for e in events if e.get("cat") == "task"]


@pytest.mark.parametrize("at", ["tracks", "remote_status"])
def test_at_its_end(graph, tmp_path, monkeypatch, at):
    trace = graph.trace(tmp_path / "one.json")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), trace:
        patch.setattr(type(trace._graph), at, interrupted)
    assert list(tmp_path.iterdir()) == []
    works(graph, tmp_path / "two.json")


def test_at_its_beginning(graph, tmp_path, monkeypatch):
    """Other nodes may have begun: they are told that it has ended."""
    requested = []

    def remote_status(self, question, time_limit):
        requested.append(question.trace)
        if question.trace == "begin":
            raise KeyboardInterrupt
        return RemoteStatus()

    trace = graph.trace(tmp_path / "one.json")
    with monkeypatch.context() as patch:
        patch.setattr(type(trace._graph), "remote_status", remote_status)
        with pytest.raises(KeyboardInterrupt), trace:
            pass
    assert requested == ["begin", "end"]
    assert list(tmp_path.iterdir()) == []
    works(graph, tmp_path / "two.json")
