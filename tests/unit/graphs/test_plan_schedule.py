"""The passes over programs, on programs that no graph would give."""

from __future__ import annotations

import pytest

from conveyor.exceptions import GraphError
from conveyor.plan import EXECUTOR, Call, Edge, Program, Recv, Send, Task
from conveyor.plan.schedule import hoist, prove_programs


def edge(index: int, writer: int, readers: tuple[int, ...], source: str) -> Edge:
    return Edge(index, writer, readers, source, 1, "shm", "same host")


def task(index: int, actor: int, label: str) -> Task:
    return Task(index, actor, label.split(".")[1], (), (), None, label)


INPUT = edge(0, EXECUTOR, (0, 1), "input")


def test_programs_that_give_way_to_each_other():
    tasks = [task(0, 0, "a.f"), task(1, 1, "b.g"), task(2, 0, "a.h")]
    edges = [
        INPUT,
        edge(1, 0, (1,), "a.f"),
        edge(2, 1, (0,), "b.g"),
        edge(3, 0, (EXECUTOR,), "a.h"),
    ]
    programs = [
        Program(0, 3, (Recv(0, 0), Call(0, 1), Send(1, 1), Recv(2, 2), Call(2, 1), Send(3, 1))),
        Program(1, 2, (Recv(1, 0), Call(1, 1), Send(2, 1))),
    ]
    prove_programs(programs, tasks, edges)


def test_a_cycle_is_named_in_the_users_terms():
    tasks = [task(0, 0, "a.f"), task(1, 0, "a.g"), task(2, 1, "b.f"), task(3, 1, "b.g")]
    edges = [INPUT, edge(1, 0, (1,), "a.g"), edge(2, 1, (0,), "b.g")]
    programs = [
        Program(0, 2, (Recv(2, 0), Call(0, None), Call(1, 1), Send(1, 1))),
        Program(1, 2, (Recv(1, 0), Call(2, None), Call(3, 1), Send(2, 1))),
    ]
    with pytest.raises(GraphError) as caught:
        prove_programs(programs, tasks, edges)
    assert str(caught.value) == (
        "no order of the graph's tasks is possible: "
        "a.f waits for b.g, which its actor makes after b.f; "
        "b.f waits for a.g, which its actor makes after a.f"
    )


def test_a_cycle_among_others_names_only_its_members():
    tasks = [task(0, 0, "a.f"), task(1, 1, "b.f"), task(2, 2, "c.f")]
    edges = [edge(0, 1, (0,), "b.f"), edge(1, 2, (1,), "c.f"), edge(2, 1, (2,), "b.f")]
    programs = [
        Program(0, 1, (Recv(0, 0), Call(0, None))),
        Program(1, 2, (Recv(1, 0), Call(1, 1), Send(0, 1), Send(2, 1))),
        Program(2, 2, (Recv(2, 0), Call(2, 1), Send(1, 1))),
    ]
    with pytest.raises(GraphError) as caught:
        prove_programs(programs, tasks, edges)
    assert str(caught.value).endswith(": b.f waits for c.f; c.f waits for b.f")


def test_a_value_that_nothing_makes():
    tasks = [task(0, 0, "a.f")]
    with pytest.raises(GraphError, match=r"a\.f waits for b\.g, which nothing makes"):
        prove_programs(
            [Program(0, 1, (Recv(0, 0), Call(0, None))), Program(1, 0, ())],
            tasks,
            [edge(0, 1, (0,), "b.g")],
        )


def test_several_wait_for_one():
    tasks = [task(0, 0, "a.f"), task(1, 1, "b.f"), task(2, 2, "c.f")]
    edges = [edge(0, EXECUTOR, (2,), "input"), edge(1, 2, (0, 1), "c.f")]
    wait = [Program(i, 1, (Recv(1, 0), Call(i, None))) for i in (0, 1)]
    programs = [*wait, Program(2, 2, (Recv(0, 0), Call(2, 1), Send(1, 1)))]
    prove_programs(programs, tasks, edges)


def test_what_is_made_is_sent_at_once():
    late = Program(
        0,
        5,
        (
            Recv(0, None, (0, None, 1)),
            Call(0, 2, (3, 4)),
            Call(1, None),
            Send(5, 4),
            Recv(1, 5),
            Call(2, None),
            Send(3, 2),
            Send(4, 1, only_done=True),
        ),
    )
    assert hoist(late).steps == (
        Recv(0, None, (0, None, 1)),
        Send(4, 1, only_done=True),
        Call(0, 2, (3, 4)),
        Send(3, 2),
        Send(5, 4),
        Call(1, None),
        Recv(1, 5),
        Call(2, None),
    )
    assert hoist(hoist(late)) == hoist(late)
