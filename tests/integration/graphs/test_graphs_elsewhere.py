"""What a compiled graph is in actors: one that compiles it, and those that it is passed to."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
from integration_helpers import WAIT, compiled, get, hold

import conveyor
from conveyor.dag import InputNode
from conveyor.exceptions import GraphTornDownError, RuntimeStateError, WaitTimeoutError


@conveyor.remote
class Stage:
    def echo(self, x: Any) -> Any:
        return x

    def hold(self, x: Any, path: str) -> Any:
        hold(path)
        return x

    def pack(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


@conveyor.remote
class Holder:
    """Has graphs that it was given, or has compiled."""

    def __init__(self) -> None:
        self.graph: Any = None

    def keep(self, graph: Any) -> None:
        self.graph = graph

    def compile(self, stage: Any) -> None:
        self.graph = stage.echo.bind(InputNode()).compile(name="made here")

    def kind(self) -> tuple[bool, str, str]:
        graph = self.graph
        return isinstance(graph, conveyor.CompiledGraph), type(graph).__name__, repr(graph)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return conveyor.get(self.graph.execute(*args, **kwargs), timeout=WAIT)

    def told(self, name: str, *args: Any) -> Any:
        found = getattr(self.graph, name)
        return found(*args) if callable(found) else found

    def seen(self) -> Any:
        return self.graph._repr_html_()

    def enter(self) -> str:
        with self.graph:
            return "inside"

    def drop(self) -> bool:
        """Whether the graph is gone without the help of a collection."""
        left = weakref.ref(self.graph)
        gc.disable()
        self.graph = None
        gone = left() is None
        gc.enable()
        return gone


@pytest.fixture
def stage(session: Any) -> Any:
    return Stage.remote()


@pytest.fixture
def holder(session: Any) -> Any:
    return Holder.remote()


@pytest.fixture
def graph(stage: Any, holder: Any) -> Any:
    with compiled(lambda inp: stage.echo.bind(inp), name="shared", depth=2) as graph:
        get(holder.keep.remote(graph))
        yield graph
        get(holder.keep.remote(None))


def test_the_class_in_an_actor_that_compiles(stage: Any, holder: Any) -> None:
    get(holder.compile.remote(stage))
    is_one, kind, text = get(holder.kind.remote())
    assert (is_one, kind) == (True, "CompiledGraph")
    assert text == "<CompiledGraph made here: 1 task on 1 actor, ready>"
    assert "echo" in get(holder.told.remote("explain"))
    assert get(holder.drop.remote())


def test_the_class_of_a_handle(graph: Any, holder: Any) -> None:
    is_one, kind, text = get(holder.kind.remote())
    assert (is_one, kind) == (True, "CompiledGraph")
    assert text == "<CompiledGraph shared: compiled by another process>"
    assert get(holder.told.remote("get_id")) == graph.get_id()
    assert get(holder.told.remote("name")) == "shared"


def test_a_handle_is_explained_and_counted_by_its_owner(graph: Any, holder: Any) -> None:
    assert get(holder.told.remote("explain")) == graph.explain()
    assert [get(holder.run.remote(i)) for i in range(3)] == [0, 1, 2]
    get(graph.execute(3))
    stats = get(holder.told.remote("stats"))
    assert (stats.graph, stats.submitted, stats.completed) == ("shared", 4, 4)
    assert [task.running.count for task in stats.tasks] == [4]
    assert "shared" in get(holder.seen.remote())


def test_a_handle_says_its_status_while_its_graph_is_busy(
    stage: Any, holder: Any, latches: Any, wait_until: Any
) -> None:
    go = latches()
    with compiled(lambda inp: stage.hold.bind(inp, go.path), name="busy", depth=1) as graph:
        get(holder.keep.remote(graph))
        first = graph.execute(1)
        # An execution of another handle of it waits for room meanwhile.
        other = Holder.remote()
        get(other.keep.remote(graph))
        waiting = other.run.remote(2)
        status = get(holder.told.remote("status"))
        assert (status.name, status.state, status.submitted) == ("busy", "ready", 1)
        assert [execution.number for execution in status.executions] == [0]
        assert not waiting.done()
        go.open()
        assert get([first, waiting]) == [1, 2]
        wait_until(lambda: get(holder.told.remote("status")).completed == 2)


def test_a_handle_knows_when_its_graph_is_torn_down(stage: Any, holder: Any) -> None:
    graph = compiled(lambda inp: stage.echo.bind(inp), name="over")
    late = Holder.remote()
    get([holder.keep.remote(graph), late.keep.remote(graph)])
    assert get(holder.told.remote("is_teardown")) is False
    assert get(holder.run.remote(1)) == 1
    graph.teardown()
    # One has a connection, and the other opens one.
    assert get(holder.told.remote("is_teardown")) is True
    assert get(late.told.remote("is_teardown")) is True
    for handle in (holder, late):
        assert get(handle.told.remote("stats")).completed == 1
        assert get(handle.told.remote("status")).state == "torn down"
        assert get(handle.told.remote("explain")) == graph.explain()
        with pytest.raises(GraphTornDownError, match="over"):
            get(handle.run.remote(2))


def test_a_handle_of_a_graph_that_nobody_holds_any_more(stage: Any, holder: Any) -> None:
    graph = compiled(lambda inp: stage.echo.bind(inp), name="gone")
    get(holder.keep.remote(graph))
    graph.teardown()
    del graph
    gc.collect()
    assert get(holder.told.remote("is_teardown")) is True
    with pytest.raises(GraphTornDownError, match="gone"):
        get(holder.told.remote("explain"))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("teardown", ()),
        ("restart", ()),
        ("plan", ()),
        ("config", ()),
        ("visualize", (None,)),
        ("trace", ("trace.json",)),
    ],
)
def test_what_only_the_owner_can_do(graph: Any, holder: Any, name: str, args: tuple[Any]) -> None:
    with pytest.raises(
        RuntimeStateError, match=r"shared can only be .* by the process that compil"
    ):
        get(holder.told.remote(name, *args))
    assert get(holder.run.remote("usable")) == "usable"


def test_a_block_of_a_handle_is_refused_before_it_begins(graph: Any, holder: Any) -> None:
    with pytest.raises(RuntimeStateError, match="'with' block"):
        get(holder.enter.remote())
    assert get(graph.execute("usable")) == "usable"


def test_inputs_called_as_the_options_are(stage: Any, holder: Any) -> None:
    with compiled(lambda inp: stage.pack.bind(inp.timeout, inp.deadline)) as graph:
        get(holder.keep.remote(graph))
        expected = (("t", "d"), {})
        assert get(graph.execute(timeout="t", deadline="d")) == expected
        assert get(graph.try_execute(timeout="t", deadline="d")) == expected
        assert get(holder.run.remote(timeout="t", deadline="d")) == expected


def test_a_handle_is_gone_with_its_last_reference(graph: Any, holder: Any) -> None:
    assert get(holder.run.remote(1)) == 1
    assert get(holder.drop.remote())


def test_who_gives_up_waiting_for_room_gives_up_its_turn(stage: Any, latches: Any) -> None:
    go = latches()
    with compiled(lambda inp: stage.hold.bind(inp, go.path), depth=1) as graph:
        first = graph.execute(1)
        with pytest.raises(WaitTimeoutError, match="room for another execution") as kept:
            graph.execute(2, timeout=0.02)
        go.open()
        assert get(first) == 1
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(graph.execute(3, timeout=WAIT)))
        thread.start()
        thread.join()
        assert get(got) == [3]
        del kept  # until now with all of its frames
