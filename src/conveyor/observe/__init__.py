"""Users look at what is compiled and at what runs, and change nothing by it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from conveyor.later import names_later
from conveyor.runtime.graph import views
from conveyor.runtime.graph.status import ExecutionStatus, GraphStatus
from conveyor.runtime.status import ActorStatus, EdgeWait

__all__ = ["ActorStatus", "EdgeWait", "ExecutionStatus", "GraphStats", "GraphStatus", "Trace"]

if TYPE_CHECKING:
    from conveyor.observe.observed import Observed
    from conveyor.observe.stats import GraphStats
    from conveyor.observe.trace import Trace

__getattr__, __dir__ = names_later(
    globals(), {"GraphStats": "conveyor.observe.stats", "Trace": "conveyor.observe.trace"}
)


class _Views:
    # Imported where they are asked for: most programs ask for none.

    def draw(self, *args: Any) -> str:
        from conveyor.observe.visualize import visualize

        return visualize(*args)

    def stats(self, graph: Observed) -> GraphStats:
        from conveyor.observe.stats import read_stats

        return read_stats(graph)

    def trace(self, graph: Observed, path: str | os.PathLike[str], max_events: int) -> Trace:
        from conveyor.observe.trace import Trace

        return Trace(graph, path, max_events)

    def html(self, graph: Observed, title: str) -> str:
        from conveyor.observe.notebook import graph_html

        return graph_html(graph, title)


views.install(_Views())
