"""What the actors of a graph are told, from the Plan and where its channels lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conveyor.config import Config
from conveyor.plan.model import Plan
from conveyor.runtime.graph.edges.layout import Assignment, Layout, Tasks
from conveyor.runtime.process import Place


def assign(
    plan: Plan,
    config: Config,
    number: int,
    name: str,
    places: Mapping[int, Place],
    layout: Layout,
    tasks: Sequence[Tasks],
    first: int,
) -> list[Assignment]:
    """The assignment of each actor. number, name: the graph's. tasks: those of each actor. first: the
    number of the next execution. Of the plan only the actors, the edges and the programs are read."""
    made = []
    for program in plan.programs:
        actor = program.actor
        reads, writes = layout.reads.get(actor, ()), layout.writes.get(actor, ())
        edges = [end.edge for end in reads] + [end.edge for end in writes]
        assignment = Assignment(
            number,
            name,
            plan.actors[actor].name,
            places[actor].bit,
            program,
            tasks[actor],
            reads,
            writes,
            layout.peers_of(actor, dict(places)),
            {edge: plan.edges[edge].source for edge in edges},
            layout.limits,
            layout.failures,
            layout.recorders[actor],
            first,
            config.memory_bytes,
            config.spin_us,
            layout.conduits.get(actor, ()),
            {
                end.edge: promise
                for end in writes
                if (promise := plan.edges[end.edge].promise) is not None
            },
            {
                end.edge: stays
                for end in writes
                if (stays := plan.edges[end.edge].stays) is not None
            },
        )
        made.append(assignment)
    return made
