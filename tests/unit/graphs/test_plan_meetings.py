"""Collectives by a communicator in the Plan: who meets whom, and that the programs are proved to meet."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from conveyor.config import Config
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.dag.methods import bind
from conveyor.exceptions import GraphError
from conveyor.experimental import collective
from conveyor.experimental.channel import Communicator
from conveyor.plan import explain, lower
from conveyor.plan.channels import _domain_of, _domains
from conveyor.plan.model import Call
from conveyor.plan.schedule import prove_programs


@dataclass(frozen=True)
class Actor:
    index: int
    name: str

    @property
    def _id(self) -> Actor:  # a handle and what it stands for are one here
        return self


A, B = Actor(0, "a"), Actor(1, "b")


class Named(Communicator):
    def __init__(self, actors: Any) -> None:
        self.actors = actors

    def get_transport_name(self) -> str:
        return "named"

    def get_actor_handles(self) -> Any:
        return self.actors

    def get_rank(self, actor: Any) -> int:
        return self.actors.index(actor)

    def initialize(self, rank: int) -> None: ...
    def get_self_rank(self) -> None: ...
    def send(self, value: Any, peer_rank: int) -> None: ...
    def recv(self, shape: Any, dtype: Any, peer_rank: int, allocator: Any) -> Any: ...
    def destroy(self) -> None: ...


def plan_of_two(communicator: Communicator) -> Any:
    """A plan in which two collectives follow each other."""
    inp: Any = InputNode()
    first = collective.allreduce.bind(
        [bind(x, "x", (inp,), {}) for x in (A, B)], transport=communicator
    )
    second = collective.allreduce.bind(first, transport=communicator)
    # Nobody uses what the second rank gets, which it takes part in all the same.
    return lower(MultiOutputNode([second[0]]), Config())


def calls(plan: Any) -> list[list[Call]]:
    return [
        [step for step in program.steps if isinstance(step, Call) and step.meets]
        for program in plan.programs
    ]


def test_the_plan_says_who_meets_whom():
    plan = plan_of_two(Named([A, B]))
    by_a, by_b = calls(plan)
    assert [step.meets for step in by_a] == [step.meets for step in by_b]
    assert [step.meets for step in by_a] == [
        (mine.task, theirs.task) for mine, theirs in zip(by_a, by_b, strict=True)
    ]
    offers = [edge for edge in plan.edges if edge.out_of_band]
    assert len(offers) == 4
    assert {edge.route for edge in offers} == {"communicator named"}
    assert "communicator named, depth 16: its ranks meet" in explain(plan)


def test_an_order_in_which_they_cannot_meet_is_refused():
    plan = plan_of_two(Named([A, B]))
    first, second = calls(plan)[1]
    turned = {first: second, second: first}
    program = plan.programs[1]
    # Without their receives they stand in each other's way only by meeting.
    steps = tuple([turned.get(step, step) for step in program.steps if isinstance(step, Call)])
    own = tuple([step for step in plan.programs[0].steps if isinstance(step, Call)])
    programs = [replace(plan.programs[0], steps=own), replace(program, steps=steps)]
    said = r"no order of the graph's tasks is possible: allreduce by communicator named.* on a waits for "
    with pytest.raises(GraphError, match=said):
        prove_programs(programs, plan.tasks, plan.edges)


def test_graphs_that_name_one_communicator_share_its_domain():
    named, other = Named([A, B]), Named([A, B])
    domains = [
        {edge.transport._domain for edge in plan_of_two(each).edges if edge.out_of_band}
        for each in (named, named, other)
    ]
    assert domains[0] == domains[1] != domains[2]
    assert len(domains[0]) == 1
    place = id(named)
    assert _domain_of(named) == _domains[place][1]
    del named
    gc.collect()
    assert place not in _domains
