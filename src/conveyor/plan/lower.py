"""From the user's graph to the Plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conveyor.config import Config
from conveyor.dag import DAGNode, InputAttributeNode, InputNode, MethodNode
from conveyor.dag.inputs import key_of
from conveyor.dag.survey import Survey, survey
from conveyor.exceptions import GraphError
from conveyor.plan.flow import Done, Flow, Items, Made, Part, Source, Start, trace
from conveyor.plan.model import (
    DRIVER,
    Const,
    Edge,
    InputBundle,
    Leaf,
    Passed,
    Plan,
    Reg,
    Shape,
)
from conveyor.plan.route import choose
from conveyor.plan.schedule import global_order, write_programs
from conveyor.plan.template import template


def lower(root: DAGNode, config: Config, placement: Mapping[MethodNode, Any] | None = None) -> Plan:
    """The Plan of the graph that ends in ``root``; ``placement``: the actors of its functions that were
    bound to none.

    Raises:
        GraphError: the graph is not valid. Nothing has been touched then.
    """
    shape = survey(root)
    _check(shape, config)
    flow = trace(shape, placement or {})
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
        whole_input=shape.whole and not shape.keys and len(inputs) == 1,
        depth=config.depth,
        shape=_shape(shape),
        effects=tuple(edge_of[Done(source)] for source in flow.effects),
        streams=tuple(
            (edge_of[items.made], edge)
            for items, edge in edge_of.items()
            if isinstance(items, Items)
        ),
        name=config.name,
    )


def _check(shape: Survey, config: Config) -> None:
    """What a compiled graph needs beyond being a graph."""
    if shape.unused and not config.ignore_unused:
        names = ", ".join(dict.fromkeys(record.label for record in shape.unused))
        verb = "does" if len(shape.unused) == 1 else "do"
        raise GraphError(
            f"{names} {verb} not reach the output of the graph and would not run: if it is to run "
            f"for its effect, end the graph with MultiOutputNode([...], effects=[...]); if it "
            f"belongs to another graph, compile with ignore_unused=True"
        )


def _shape(shape: Survey) -> Shape | None:
    """The shape of the results, where it is not just a list (or one) of what tasks made."""
    plain = not shape.multi_output or type(shape.structure) in (list, tuple)
    items = shape.structure if shape.multi_output and plain else [shape.structure]
    if plain and all(_is_made(item) for item in items):
        return None
    leaves: list[Leaf] = []
    made = 0

    def leaf(node: DAGNode) -> Reg:
        nonlocal made
        if _is_made(node):
            leaves.append(made)
            made += 1
        else:
            leaves.append(Passed(key_of(node) if isinstance(node, InputAttributeNode) else None))
        return Reg(len(leaves) - 1)

    def constant(value: object) -> Reg:
        leaves.append(Const(value))
        return Reg(len(leaves) - 1)

    return Shape(template(shape.structure, leaf, constant), tuple(leaves))


def _is_made(item: object) -> bool:
    return isinstance(item, DAGNode) and not isinstance(item, (InputNode, InputAttributeNode))


def _edges(
    flow: Flow, shape: Survey, config: Config
) -> tuple[tuple[Edge, ...], tuple[InputBundle, ...], dict[Source | Done | Items, int]]:
    """One edge for each value that leaves its process; inputs with the same readers share one."""
    edges: list[Edge] = []
    edge_of: dict[Source | Done | Items, int] = {}

    def lay_plain(
        what: Done | Items | Made, writer: int, label: str, depth: int, reason: str
    ) -> None:
        edge_of[what] = len(edges)
        edges.append(Edge(len(edges), writer, (DRIVER,), label, depth, "shm", reason))

    def lay(writer: int, readers: tuple[int, ...], sources: list[Source]) -> int:
        label = ", ".join(dict.fromkeys(flow.label(source) for source in sources))
        hints = [hint for source in sources for hint in flow.hints.get(source, ())]
        route = choose(label, hints)
        edge = Edge(len(edges), writer, readers, label, config.depth, route.name, route.reason)
        edges.append(edge)
        edge_of.update((source, edge.id) for source in sources)
        return edge.id

    bundles: dict[tuple[int, ...], list[Part]] = {}
    for part in [Part(key) for key in shape.keys]:
        if part in flow.readers:  # else only the driver uses it, as a result
            bundles.setdefault(flow.readers[part], []).append(part)
    inputs = [
        InputBundle(lay(DRIVER, readers, [*parts]), tuple(part.key for part in parts))
        for readers, parts in bundles.items()
    ]
    whole = Part(None)
    if whole in flow.readers:
        # Alone in its frame, which then is the value itself.
        inputs.append(InputBundle(lay(DRIVER, flow.readers[whole], [whole]), (None,)))
    starts: list[Source] = [source for source in flow.readers if isinstance(source, Start)]
    if starts:
        started = sorted(source.actor for source in starts if isinstance(source, Start))
        inputs.append(InputBundle(lay(DRIVER, tuple(started), starts), ()))

    made = sorted(
        (source for source in flow.readers if isinstance(source, Made)),
        key=lambda source: (source.task, -1 if source.element is None else source.element),
    )
    for source in made:
        writer, label = flow.actor_of[source.task], flow.label(source)
        if flow.nodes[source.task].streams:
            choose(label, flow.hints.get(source, ()))
            lay_plain(source, writer, label, config.depth, "only that its items have ended")
            credit = config.stream_items
            lay_plain(Items(source), writer, f"items of {label}", credit, "a generator's items")
        elif flow.readers[source]:
            lay(flow.actor_of[source.task], flow.readers[source], [source])
        else:
            # It stays on its actor, in a register; but what was asked for it must still exist.
            choose(flow.label(source), flow.hints.get(source, ()))
    for source in flow.effects:
        label = f"done {flow.label(source)}"
        reason = "an effect: only that it has run"
        lay_plain(Done(source), flow.actor_of[source.task], label, config.depth, reason)
    return tuple(edges), tuple(inputs), edge_of
