"""What is read off programs without running them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conveyor.config import Config
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.dag.methods import bind
from conveyor.experimental import collective
from conveyor.plan import EXECUTOR, Call, Plan, Program, Recv, Send, lower
from conveyor.plan.flow import Made, Part, Start
from conveyor.plan.reading import (
    Held,
    Outline,
    Values,
    edges_only_read,
    in_order,
    moves,
    registers_read,
    task_of_each_step,
)


@dataclass(frozen=True)
class Actor:
    index: int
    name: str


A, B, C = Actor(0, "a"), Actor(1, "b"), Actor(2, "c")


def call(actor: Actor, method: str, *args: Any, n: int = 1, **kwargs: Any) -> Any:
    return bind(actor, method, args, kwargs, num_returns=n)


def everything() -> Plan:
    """Parts of an input, elements, a start, a value that stays, an effect, and a generator."""
    inp = InputNode()
    left, _, right = call(A, "split", inp[0], inp.k, n=3)
    here = call(A, "join", [left], right=right)
    alone = call(B, "setup")
    items = bind(B, "items", (here, right, alone), {}, num_returns=1, generator=True)
    log = call(C, "log", {"x": here})
    return lower(MultiOutputNode([items, here], effects=[log]), Config())


def test_the_kinds_of_steps_of_a_program():
    plan = everything()
    edge = {e.source: e.id for e in plan.edges}
    a, b, _ = map(Outline, plan.programs)
    assert a.tasks == [0, 1]
    assert a.receives == [edge["input[0], input['k']"]]
    assert a.sends == [edge["a.split[2]"], edge["a.join"]]
    assert a.streams == []
    assert b.streams == [(3, edge["items of b.items"])]
    # Its items are no frame of each execution; that it has ended is.
    assert b.sends == [edge["b.items"]]


def test_what_people_are_shown():
    plan = everything()
    edge = {e.source: e.id for e in plan.edges}
    assert list(moves(plan, EXECUTOR)) == [
        ("send", edge["input[0], input['k']"]),
        ("send", edge["start"]),
        ("recv", edge["items of b.items"]),
        ("recv", edge["b.items"]),
        ("recv", edge["a.join"]),
        ("recv", edge["done c.log"]),
    ]
    assert list(moves(plan, 1)) == [
        ("recv", edge["start"]),
        ("call", 2),
        ("recv", edge["a.split[2]"]),
        ("recv", edge["a.join"]),
        ("call", 3),
        ("send", edge["items of b.items"]),
        ("send", edge["b.items"]),
    ]


def test_where_the_values_are():
    plan = everything()
    edge = {e.source: e.id for e in plan.edges}
    values = Values(plan)
    assert values.carried == {
        edge["input[0], input['k']"]: (Part(0), Part("k")),
        edge["start"]: (),
        edge["a.split[2]"]: (Made(0, 2),),
        edge["a.join"]: (Made(1, None),),
        edge["items of b.items"]: (Made(3, None),),
        edge["b.items"]: (Made(3, None),),
        edge["done c.log"]: (Made(4, None),),
    }
    inputs = edge["input[0], input['k']"]
    assert values.needs == [
        [Held(Part(0), inputs), Held(Part("k"), inputs)],
        [Held(Made(0, 0), None), Held(Made(0, 2), None)],
        [Held(Start(1), edge["start"])],
        [
            Held(Made(1, None), edge["a.join"]),
            Held(Made(0, 2), edge["a.split[2]"]),
            Held(Made(2, None), None),
        ],
        [Held(Made(1, None), edge["a.join"])],
    ]
    assert set(values.held[2].values()) == {
        Held(Made(1, None), edge["a.join"]),
        Held(Made(4, None), None),
    }


def test_the_tasks_one_after_the_other():
    plan = everything()
    assert plan.order == (0, 1, 2, 3, 4)
    found = in_order(plan)
    assert [(stage.actor, stage.call.task) for stage in found] == [
        (0, 0), (0, 1), (1, 2), (1, 3), (2, 4),
    ]  # fmt: skip
    for program in plan.programs:
        own = [stage for stage in found if stage.actor == program.actor]
        steps = [step for stage in own for step in (*stage.receives, stage.call, *stage.sends)]
        assert tuple(steps) == program.steps


def test_for_whom_a_step_is():
    steps = (Recv(0, 0), Recv(1, 1), Call(5, 2), Send(2, 2), Recv(3, 3), Send(4, 2), Call(6, None))
    program = Program(0, 4, (*steps, Recv(5, 3)))
    assert task_of_each_step(program) == [5, 5, 5, 5, 6, 5, 6, None]


def test_what_a_step_reads():
    plan = everything()
    tasks = {task.id: task for task in plan.tasks}
    for stage in in_order(plan):
        held = Values(plan).held[stage.actor]
        read = [held[reg] for reg in registers_read(stage.call, tasks)]
        assert read == [
            h for h in Values(plan).needs[stage.call.task] if type(h.value) is not Start
        ]
        assert [registers_read(send, tasks) for send in stage.sends] == [
            (send.reg,) for send in stage.sends
        ]
        assert all(registers_read(step, tasks) == () for step in stage.receives)


def test_an_edge_whose_values_only_ranks_of_collectives_take_is_only_read():
    inp = InputNode()
    made = [call(A, "make", inp), call(C, "make", inp)]
    here, there = collective.allreduce.bind([call(A, "more", made[1]), call(B, "more", made[0])])
    alone, _ = collective.allreduce.bind([made[0], made[1]])
    plan = lower(MultiOutputNode([here, call(B, "use", there), alone]), Config())
    sources = {edge.id: edge.source for edge in plan.edges}
    ranks = {task.id for task in plan.tasks if task.collective is not None}
    found = [edges_only_read(program, plan.tasks) for program in plan.programs]
    assert any(found)
    for program, only_read in zip(plan.programs, found, strict=True):
        assert only_read == {
            edge
            for edge in sources
            if (reading := [s for s in program.steps if reads(s, program, edge, plan)])
            and all(isinstance(step, Call) and step.task in ranks for step in reading)
            and all(
                getattr(plan.tasks[step.task].function, "only_reads", False) for step in reading
            )
        }


def reads(step: Any, program: Program, edge: int, plan: Plan) -> bool:
    """Whether ``step`` reads a register that a frame of ``edge`` fills."""
    filled = {
        reg
        for recv in program.steps
        if isinstance(recv, Recv) and recv.edge == edge
        for reg in (recv.reg, *(recv.spread or ()))
    }
    return not filled.isdisjoint(registers_read(step, plan.tasks))
