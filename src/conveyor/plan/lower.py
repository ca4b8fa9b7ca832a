"""From the user's graph to the Plan."""

from __future__ import annotations

from conveyor.config import Config
from conveyor.dag import DAGNode
from conveyor.dag.survey import Survey, survey
from conveyor.exceptions import GraphError
from conveyor.plan.flow import Flow, Made, Part, Source, trace
from conveyor.plan.model import DRIVER, Edge, InputBundle, Plan
from conveyor.plan.route import choose
from conveyor.plan.schedule import global_order, write_programs


def lower(root: DAGNode, config: Config) -> Plan:
    """The Plan of the graph that ends in ``root``.

    Raises:
        GraphError: the graph is not valid. Nothing has been touched then.
    """
    shape = survey(root)
    _check(shape)
    flow = trace(shape)
    edges, inputs, edge_of = _edges(flow, shape, config)
    tasks, programs = write_programs(flow, inputs, edge_of)
    global_order(programs, tasks, edges)
    positional, keywords = shape.parameters
    return Plan(
        actors=flow.actors,
        tasks=tasks,
        edges=edges,
        programs=programs,
        inputs=inputs,
        outputs=tuple(edge_of[source] for source in flow.outputs),
        multi_output=shape.multi_output,
        positional=positional,
        keywords=keywords,
        whole_input=shape.whole,
        depth=config.depth,
    )


def _check(shape: Survey) -> None:
    """What a compiled graph needs beyond being a graph."""
    if shape.input is None:
        first = shape.tasks[0].label
        raise GraphError(
            f"the graph has no InputNode: nothing starts an execution of it; bind one to {first}"
        )
    for task in shape.tasks:
        if not task._upstream():
            raise GraphError(
                f"{task.label} has no graph node among its arguments, so nothing says when to run "
                f"it; bind the input to it, or what another method makes"
            )
    if shape.unused:
        names = ", ".join(dict.fromkeys(record.label for record in shape.unused))
        verb = "does" if len(shape.unused) == 1 else "do"
        raise GraphError(
            f"{names} {verb} not reach the output of the graph, so an error there could reach "
            f"nobody: add to the outputs with MultiOutputNode what was bound there, or use an "
            f"InputNode of its own for another graph"
        )


def _edges(
    flow: Flow, shape: Survey, config: Config
) -> tuple[tuple[Edge, ...], tuple[InputBundle, ...], dict[Source, int]]:
    """One edge for each value that leaves its process; inputs with the same readers share one."""
    edges: list[Edge] = []
    edge_of: dict[Source, int] = {}

    def lay(writer: int, readers: tuple[int, ...], sources: list[Source]) -> int:
        label = ", ".join(flow.label(source) for source in sources)
        hints = [hint for source in sources for hint in flow.hints.get(source, ())]
        route = choose(label, hints)
        edge = Edge(len(edges), writer, readers, label, config.depth, route.name, route.reason)
        edges.append(edge)
        edge_of.update((source, edge.id) for source in sources)
        return edge.id

    bundles: dict[tuple[int, ...], list[Part]] = {}
    for part in [Part(None)] if shape.whole else [Part(key) for key in shape.keys]:
        bundles.setdefault(flow.readers[part], []).append(part)
    inputs = tuple(
        InputBundle(lay(DRIVER, readers, [*parts]), tuple(part.key for part in parts))
        for readers, parts in bundles.items()
    )

    made = sorted(
        (source for source in flow.readers if isinstance(source, Made)),
        key=lambda source: (source.task, -1 if source.element is None else source.element),
    )
    for source in made:
        if flow.readers[source]:
            lay(flow.actor_of[source.task], flow.readers[source], [source])
        else:
            # It stays on its actor, in a register; but what was asked for it must still exist.
            choose(flow.label(source), flow.hints.get(source, ()))
    return tuple(edges), inputs, edge_of
