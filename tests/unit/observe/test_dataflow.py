"""The nodes and arrows of a Plan."""

from __future__ import annotations

from hypothesis import given, settings
from observed_plans import Actor, call, diamond, pipeline, plans

from conveyor.config import Config
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.observe.dataflow import arrow_lines, dataflow, printable
from conveyor.plan import lower


def test_all_of_it():
    plan = diamond()
    flow = dataflow(plan)
    assert [(node.kind, node.label) for node in flow.nodes] == [
        ("input", "input[0]"),
        ("input", "input['weight']"),
        ("task", "split.prepare"),
        ("task", "split.halve"),
        ("task", "left.work"),
        ("task", "right.work"),
        ("task", "right.join"),
        ("output", "output"),
    ]
    names = [node.label for node in flow.nodes]
    arrows = {
        (names[a.source], names[a.target], " ".join(arrow_lines(plan, a, False)))
        for a in flow.arrows
    }
    edge = {e.source: f"#{e.id}" for e in plan.edges}
    assert arrows == {
        ("input[0]", "split.prepare", edge["input[0]"]),
        ("split.prepare", "split.halve", ""),
        ("input['weight']", "left.work", edge["input['weight']"]),
        ("input['weight']", "right.work", edge["input['weight']"]),
        ("split.halve", "left.work", f"{edge['split.halve[0]']} [0]"),
        ("split.halve", "right.work", f"{edge['split.halve[1]']} [1]"),
        ("left.work", "right.join", edge["left.work"]),
        ("right.work", "right.join", ""),
        ("right.join", "output", f"{edge['right.join']} to [0]"),
        ("split.prepare", "output", f"{edge['split.prepare']} to [1]"),
        ("left.work", "output", f"{edge['left.work']} to [2]"),
    }


def test_details_tell_the_route():
    plan = diamond()
    by_edge = {arrow.edge: arrow_lines(plan, arrow, True) for arrow in dataflow(plan).arrows}
    assert by_edge[0] == ("#0", "shm, depth 16", "same host")
    assert by_edge[None] == ("no channel",)


def test_names_are_made_printable():
    assert printable("a\nb\0\ud800é→") == "a\\nb\\x00\\ud800é→"
    assert dataflow(pipeline("a\nb")).nodes[1].label == "a\\nb.run"


@given(plan=plans())
@settings(max_examples=100, deadline=None)
def test_every_edge_is_an_arrow_to_each_of_its_readers(plan):
    flow = dataflow(plan)
    drawn = {(arrow.edge, flow.nodes[arrow.target].actor) for arrow in flow.arrows}
    assert {(e.id, reader) for e in plan.edges for reader in e.readers} <= drawn
    for arrow in flow.arrows:
        ends = flow.nodes[arrow.source].actor, flow.nodes[arrow.target].actor
        # A value without a channel cannot leave its actor.
        assert (arrow.edge is None) == (ends[0] == ends[1])


def test_starts_effects_and_inputs_that_are_results():
    inp = InputNode()
    made = call(Actor(0, "a"), "f", inp[0])
    first, _ = call(Actor(2, "c"), "log", made, n=2)
    results = {"x": made, "in": inp.k, "const": call(Actor(1, "b"), "const", 1)}
    plan = lower(MultiOutputNode(results, effects=[first]), Config())
    flow = dataflow(plan)
    names = [node.label for node in flow.nodes]
    texts = {
        (names[a.source], names[a.target]): " ".join(arrow_lines(plan, a, False)).split(" ")[-1]
        for a in flow.arrows
    }
    assert texts["start", "b.const"] == "start"
    assert texts["c.log", "output"] == "done"
    assert texts["input['k']", "output"] == ""
    assert texts["a.f", "output"].startswith("#")
