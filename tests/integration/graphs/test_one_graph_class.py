"""A compiled graph is a ``CompiledGraph`` on each engine, and is gone with what refers to it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import inside
from integration_helpers import compiled, get

import conveyor
from conveyor import metrics


@conveyor.remote
class Stage:
    def echo(self, x: Any) -> Any:
        return x


def test_one_class_on_each_engine(engine: str) -> None:
    graph = compiled(lambda inp: Stage.remote().echo.bind(inp))
    assert type(graph) is conveyor.CompiledGraph
    assert type(graph).__name__ == "CompiledGraph"
    where = "inline, " if engine == "inline" else ""
    assert repr(graph) == f"<CompiledGraph {graph.name}: 1 task on 1 actor, {where}ready>"
    assert get(graph.execute(1)) == 1
    graph.teardown()
    assert repr(graph).endswith("torn down>")


def test_a_graph_is_gone_with_its_last_reference(engine: str) -> None:
    stage = Stage.remote()
    graph = compiled(lambda inp: stage.echo.bind(inp), name="counted")
    ref = graph.execute(1)
    face, held = weakref.ref(graph), weakref.ref(inside.supervision_of(graph))
    gc.collect()
    gc.disable()
    try:
        del graph
        assert face() is None
        # Its refs keep what they need of it, and it is counted as long as there are any.
        assert held() is not None
        assert 'graph="counted"' in metrics.prometheus_text()
        assert get(ref) == 1
        del ref
        assert held() is None
    finally:
        gc.enable()
