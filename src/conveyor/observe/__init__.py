"""Inspection of compiled and running graphs: statistics, traces, drawings, simulations. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conveyor.graph.status import ExecutionStatus, GraphStatus
from conveyor.later import names_later
from conveyor.runtime.status import ActorStatus, EdgeWait

__all__ = [
    "ActorStatus",
    "EdgeWait",
    "ExecutionStatus",
    "GraphStats",
    "GraphStatus",
    "Simulation",
    "Trace",
]

if TYPE_CHECKING:
    from conveyor.observe.drawing.formats import graph_html as graph_html
    from conveyor.observe.drawing.formats import visualize as visualize
    from conveyor.observe.simulation import Simulation
    from conveyor.observe.simulation import simulate as simulate
    from conveyor.observe.simulation import simulate_graph as simulate_graph
    from conveyor.observe.stats import GraphStats
    from conveyor.observe.stats import read_stats as read_stats
    from conveyor.observe.trace import Trace

# Imported at first use: most programs need none of these.
__getattr__, __dir__ = names_later(
    globals(),
    {
        "GraphStats": "conveyor.observe.stats",
        "Simulation": "conveyor.observe.simulation",
        "Trace": "conveyor.observe.trace",
        "graph_html": "conveyor.observe.drawing.formats",
        "simulate": "conveyor.observe.simulation",
        "simulate_graph": "conveyor.observe.simulation",
        "read_stats": "conveyor.observe.stats",
        "visualize": "conveyor.observe.drawing.formats",
    },
)
