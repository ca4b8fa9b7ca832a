"""The proof that programs cannot wait for each other for ever, on steps of a kind that no Plan has."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.exceptions import GraphError
from conveyor.plan.schedule import prove


@dataclass(frozen=True)
class Meet:
    """All members come together: whoever comes first waits for the others."""

    number: int
    me: int
    members: frozenset[int]

    def waits_for(self) -> list[Hashable]:
        return [("met", self.number, other) for other in sorted(self.members - {self.me})]

    def enables(self) -> list[Hashable]:
        return [("met", self.number, self.me)]


@dataclass(frozen=True)
class Give:
    """Does not wait for whoever takes it."""

    number: int

    def waits_for(self) -> list[Hashable]:
        return []

    def enables(self) -> list[Hashable]:
        return [("given", self.number)]


@dataclass(frozen=True)
class Take:
    number: int

    def waits_for(self) -> list[Hashable]:
        return [("given", self.number)]

    def enables(self) -> list[Hashable]:
        return []


def name_step(program: int, place: int) -> str:
    return f"{program}.{place}"


def name_event(event: Any) -> str:
    return "-".join(map(str, event))


@st.composite
def orderly(draw: st.DrawFn) -> list[list[Any]]:
    """Programs that fit: all have what they do together in one order."""
    programs: list[list[Any]] = [[] for _ in range(draw(st.integers(2, 4)))]
    actors = st.integers(0, len(programs) - 1)
    for number in range(draw(st.integers(1, 8))):
        members = draw(st.frozensets(actors, min_size=2))
        if draw(st.booleans()):
            for me in members:
                programs[me].append(Meet(number, me, members))
        else:
            giver, *takers = members
            programs[giver].append(Give(number))
            for taker in takers:
                programs[taker].append(Take(number))
    return programs


def fits(programs: list[list[Any]]) -> bool:
    """Whether there is an order of all steps: those that meet are one, what is taken was given before."""
    before: dict[Hashable, set[Hashable]] = {}
    for program, steps in enumerate(programs):
        last: Hashable = None
        for place, step in enumerate(steps):
            node: Hashable = ("meet", step.number) if isinstance(step, Meet) else (program, place)
            before.setdefault(node, set())
            if last is not None:
                before[node].add(last)
            if isinstance(step, Give):
                before.setdefault(("given", step.number), set()).add(node)
            if isinstance(step, Take):
                before[node].add(("given", step.number))
            last = node
    try:
        list(TopologicalSorter(before).static_order())
    except CycleError:
        return False
    return True


@given(programs=orderly())
@settings(max_examples=200, deadline=None)
def test_one_order_for_all_is_proved(programs):
    assert fits(programs)
    prove(programs, [], name_step, name_event)


@given(programs=orderly(), data=st.data())
@settings(max_examples=400, deadline=None)
def test_an_order_is_refused_exactly_if_somebody_waits_for_ever(programs, data):
    shuffled = [data.draw(st.permutations(steps)) for steps in programs]
    if fits(shuffled):
        prove(shuffled, [], name_step, name_event)
        return
    with pytest.raises(GraphError, match="no order of the graph's tasks is possible") as caught:
        prove(shuffled, [], name_step, name_event)
    # Each clause says who waits for whom, and the last waits for the first.
    clauses = str(caught.value).partition(": ")[2].split("; ")
    for clause in clauses:
        who, _, what = clause.partition(",")[0].partition(" waits for ")
        program, place = map(int, who.split("."))
        events = ["-".join(map(str, event)) for event in shuffled[program][place].waits_for()]
        assert what in events


@given(programs=orderly(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_step_that_is_left_out_is_missed(programs, data):
    """The others of a meeting wait for ever for one who does not come."""
    program = data.draw(st.sampled_from([i for i, steps in enumerate(programs) if steps]))
    place = data.draw(st.integers(0, len(programs[program]) - 1))
    left_out = programs[program].pop(place)
    if isinstance(left_out, Take):
        prove(programs, [], name_step, name_event)
        return
    with pytest.raises(GraphError, match=f"-{left_out.number}.*, which nothing makes"):
        prove(programs, [], name_step, name_event)


def test_two_that_meet_in_opposite_orders():
    both = frozenset({0, 1})
    programs = [[Meet(0, 0, both), Meet(1, 0, both)], [Meet(1, 1, both), Meet(0, 1, both)]]
    with pytest.raises(GraphError) as caught:
        prove(programs, [], name_step, name_event)
    assert str(caught.value) == (
        "no order of the graph's tasks is possible: "
        "0.0 waits for met-0-1, which its actor makes after 1.0; "
        "1.0 waits for met-1-0, which its actor makes after 0.0"
    )


def test_what_happens_anyway_is_not_waited_for():
    with pytest.raises(GraphError, match=r"0\.0 waits for given-7, which nothing makes"):
        prove([[Take(7)]], [], name_step, name_event)
    prove([[Take(7)]], [("given", 7)], name_step, name_event)
