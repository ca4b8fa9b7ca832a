"""Pipeline-parallel training in virtual time: the bubble is that of the formula."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from simulated_graphs import Actor, call

from conveyor.config import Config
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.observe import simulate
from conveyor.plan import lower

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "pipeline"))

import schedules

FORWARD, BACKWARD = 0.010, 0.020


class Stage:
    """Binds like an actor's handle."""

    def __init__(self, index):
        self.actor = Actor(index, f"stage{index}")
        self.forward, self.backward, self.weights = (
            _Method(self.actor, name) for name in ("forward", "backward", "weights")
        )


class _Method:
    def __init__(self, actor, name):
        self.actor, self.name = actor, name

    def bind(self, *args):
        return call(self.actor, self.name, *args)


def plan_of(orders, count):
    with InputNode() as inp:
        ends = schedules.bind([Stage(i) for i in range(len(orders))], orders, count, inp)
        return lower(MultiOutputNode(ends), Config())


def bubble(orders, count, **seconds):
    seconds = {"forward": FORWARD, "backward": BACKWARD, **seconds}
    return simulate(plan_of(orders, count), seconds, executions=1, latency=0).bubble


SIZES = [(2, 2), (2, 8), (3, 4), (4, 4), (4, 8), (4, 16), (8, 8), (8, 32)]


@pytest.mark.parametrize(("stages", "count"), SIZES)
@pytest.mark.parametrize("schedule", [schedules.gpipe, schedules.one_f_one_b])
def test_the_bubble_is_the_formulas(schedule, stages, count):
    found = bubble(schedule(stages, count), count)
    assert found == pytest.approx((stages - 1) / (count + stages - 1), rel=0.01)


@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_zero_bubble(stages, count):
    # With a backward pass in two halves of the same length, as long as a forward pass each, ZB-H1 has a
    # third of the bubble: each stage has 3 M units of work and S - 1 of idleness.
    if count < stages:
        pytest.skip("too few microbatches to fill the pipeline")
    orders = schedules.zero_bubble(stages, count)
    found = bubble(orders, count, backward=FORWARD, weights=FORWARD)
    assert found == pytest.approx((stages - 1) / (3 * count + stages - 1), rel=0.01)


@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_1f1b_holds_fewer_activations(stages, count):
    def most_held(order):
        held = most = 0
        for kind, _ in order:
            held += {"forward": 1, "backward": -1}.get(kind, 0)
            most = max(most, held)
        return most

    assert {most_held(order) for order in schedules.gpipe(stages, count)} == {count}
    held = [most_held(order) for order in schedules.one_f_one_b(stages, count)]
    assert held == [min(stages - i, count) for i in range(stages)]


@pytest.mark.parametrize(
    "schedule", [schedules.gpipe, schedules.one_f_one_b, schedules.zero_bubble]
)
def test_the_order_of_every_stage_is_the_schedules(schedule):
    orders = schedule(4, 8)
    plan = plan_of(orders, 8)
    made = simulate(plan, 0.01, executions=1)
    for stage, order in enumerate(orders):
        done = [
            s.label for s in made.timeline.spans if s.participant == stage and s.kind == "compute"
        ]
        assert [label.split(".")[1].split("#")[0] for label in done] == [kind for kind, _ in order]


def test_an_order_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="no stage can go on"):
        plan_of([[("backward", 0), ("forward", 0)], [("forward", 0), ("backward", 0)]], 1)
