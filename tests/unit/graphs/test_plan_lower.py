"""Lowering: the Plan of given graphs, step by step, and the graphs that have none."""

from __future__ import annotations

import pickle
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest

from conveyor.config import Config
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.dag.inputs import Path, key_of
from conveyor.dag.methods import bind
from conveyor.exceptions import GraphError
from conveyor.plan import (
    EXECUTOR,
    ActorInfo,
    Call,
    Const,
    InputBundle,
    Nested,
    Passed,
    Plan,
    Recv,
    Reg,
    Send,
    Shape,
    explain,
    fill,
    lower,
)


@dataclass(frozen=True)
class Actor:
    index: int
    name: str


A, B, C = Actor(7, "a"), Actor(4, "b"), Actor(5, "c")


def call(actor: Actor, method: str, *args: Any, n: int = 1, **kwargs: Any) -> Any:
    return bind(actor, method, args, kwargs, num_returns=n)


def plan_of(root: Any, **options: Any) -> Plan:
    return lower(root, Config(**options))


def edges(plan: Plan) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(edge.source, edge.writer, edge.readers) for edge in plan.edges]


def steps(plan: Plan, actor: int = 0) -> list[Any]:
    return list(plan.programs[actor].steps)


def test_one_actor():
    plan = plan_of(call(A, "echo", InputNode()), depth=3)
    assert plan.actors == (ActorInfo(0, A, "a"),)
    assert edges(plan) == [("input", EXECUTOR, (0,)), ("a.echo", 0, (EXECUTOR,))]
    assert steps(plan) == [Recv(0, 0), Call(0, 1), Send(1, 1)]
    assert plan.programs[0].registers == 2
    assert plan.tasks[0].args == (Reg(0),)
    assert plan.tasks[0].kwargs == ()
    assert plan.tasks[0].label == "a.echo"
    assert plan.tasks[0].num_returns is None
    assert plan.inputs == (InputBundle(0, (None,)),)
    assert (plan.outputs, plan.multi_output) == ((1,), False)
    assert (plan.positional, plan.keywords, plan.whole_input) == (1, (), True)
    assert plan.depth == 3
    assert {edge.depth for edge in plan.edges} == {3}
    assert {(edge.route, edge.reason) for edge in plan.edges} == {("shm", "same host")}


def test_a_chain():
    node = InputNode()
    for actor in (A, B, C):
        node = call(actor, "echo", node)
    plan = plan_of(node)
    assert edges(plan) == [
        ("input", EXECUTOR, (0,)),
        ("a.echo", 0, (1,)),
        ("b.echo", 1, (2,)),
        ("c.echo", 2, (EXECUTOR,)),
    ]
    assert steps(plan, 1) == [Recv(1, 0), Call(1, 1), Send(2, 1)]


def test_an_input_of_several_actors_is_one_edge():
    inp = InputNode()
    plan = plan_of(MultiOutputNode([call(actor, "echo", inp) for actor in (A, B, C)]))
    assert edges(plan)[0] == ("input", EXECUTOR, (0, 1, 2))
    assert plan.outputs == (1, 2, 3)
    assert plan.multi_output


def test_parts_with_the_same_readers_share_an_edge():
    inp = InputNode()
    x = call(A, "f", inp[2], inp.scale, inp[0])
    y = call(B, "g", inp[0], x, shift=inp.shift, scale=inp.scale)
    plan = plan_of(y)
    assert plan.inputs == (
        InputBundle(0, (0, "scale")),
        InputBundle(1, (2,)),
        InputBundle(2, ("shift",)),
    )
    assert edges(plan)[:3] == [
        ("input[0], input['scale']", EXECUTOR, (0, 1)),
        ("input[2]", EXECUTOR, (0,)),
        ("input['shift']", EXECUTOR, (1,)),
    ]
    assert (plan.positional, plan.keywords, plan.whole_input) == (3, ("scale", "shift"), False)
    assert steps(plan, 0) == [Recv(0, None, (0, 1)), Recv(1, None, (2,)), Call(0, 3), Send(3, 3)]
    assert plan.tasks[0].args == (Reg(2), Reg(1), Reg(0))
    assert dict(plan.tasks[1].kwargs) == {"shift": Reg(2), "scale": Reg(1)}


def test_a_single_part_is_still_a_tuple():
    plan = plan_of(call(A, "f", InputNode()[0]))
    assert plan.inputs == (InputBundle(0, (0,)),)
    assert steps(plan)[0] == Recv(0, None, (0,))
    assert (plan.positional, plan.whole_input) == (1, False)


def test_keywords_only():
    plan = plan_of(call(A, "f", InputNode().x))
    assert (plan.positional, plan.keywords, plan.whole_input) == (0, ("x",), False)


def test_a_part_that_nobody_uses_is_no_parameter():
    inp = InputNode()
    kept = inp[3]
    assert plan_of(call(A, "f", inp[0])).positional == 1
    assert key_of(kept) == 3


def test_a_value_of_the_driver_and_several_actors_is_one_edge():
    x = call(A, "f", InputNode())
    plan = plan_of(MultiOutputNode([x, call(B, "g", x), call(C, "g", x)]))
    assert edges(plan)[1] == ("a.f", 0, (EXECUTOR, 1, 2))
    assert plan.outputs == (1, 2, 3)


def test_use_on_the_same_actor_is_a_register():
    x = call(A, "f", InputNode())
    y = call(A, "g", x, x)
    plan = plan_of(y)
    assert edges(plan) == [("input", EXECUTOR, (0,)), ("a.g", 0, (EXECUTOR,))]
    assert steps(plan) == [Recv(0, 0), Call(0, 1), Call(1, 2), Send(1, 2)]
    assert plan.tasks[1].args == (Reg(1), Reg(1))


def test_the_same_node_as_several_arguments_is_received_once():
    x = call(A, "f", InputNode())
    y = call(B, "g", x, [x], x=x)
    plan = plan_of(call(B, "h", y, x))
    assert steps(plan, 1) == [Recv(1, 0), Call(1, 1), Call(2, 2), Send(2, 2)]


def test_tasks_of_an_actor_run_in_bind_order():
    inp = InputNode()
    first = call(A, "f", inp)
    is_remote = call(B, "g", first)
    second = call(A, "f", is_remote)
    third = call(A, "h", inp)
    plan = plan_of(MultiOutputNode([third, second]))
    # Received just before the call that needs it, sent right after the one that makes it.
    assert steps(plan, 0) == [
        Recv(0, 0),
        Call(0, 1),
        Send(1, 1),
        Recv(2, 2),
        Call(2, 3),
        Send(3, 3),
        Call(3, 4),
        Send(4, 4),
    ]
    assert [task.label for task in plan.tasks] == ["a.f", "b.g", "a.f#2", "a.h"]
    assert plan.outputs == (4, 3)


def test_elements_are_registers_and_edges_of_their_own():
    inp = InputNode()
    first, _, third, fourth = call(A, "split", inp, n=4)
    plan = plan_of(MultiOutputNode([call(B, "g", third), call(A, "h", first), fourth, third]))
    assert plan.tasks[0].num_returns == 4
    assert edges(plan) == [
        ("input", EXECUTOR, (0,)),
        ("a.split[2]", 0, (EXECUTOR, 1)),
        ("a.split[3]", 0, (EXECUTOR,)),
        ("b.g", 1, (EXECUTOR,)),
        ("a.h", 0, (EXECUTOR,)),
    ]
    assert steps(plan, 0) == [
        Recv(0, 0),
        Call(0, None, (1, None, 2, 3)),
        Send(1, 2),
        Send(2, 3),
        Call(2, 4),
        Send(4, 4),
    ]
    assert plan.outputs == (3, 4, 2, 1)


def test_one_element_as_the_output():
    plan = plan_of(call(A, "split", InputNode(), n=2)[1])
    assert steps(plan)[1] == Call(0, None, (None, 1))
    assert (plan.outputs, plan.multi_output) == ((1,), False)


def test_the_whole_of_several_returns_can_be_read_as_well():
    first, _ = call(A, "split", InputNode(), n=2)
    plan = plan_of(MultiOutputNode([call(A, "g", first), call(B, "h", first.task)]))
    assert steps(plan)[1:3] == [Call(0, 1, (2, None)), Send(1, 1)]
    assert edges(plan)[1] == ("a.split", 0, (1,))


def test_duplicate_outputs_are_one_edge():
    x = call(A, "f", InputNode())
    plan = plan_of(MultiOutputNode([x, x, x]))
    assert plan.outputs == (1, 1, 1)
    assert len(plan.edges) == 2


def test_one_output_in_a_list_is_still_a_list():
    assert plan_of(MultiOutputNode([call(A, "f", InputNode())])).multi_output


Pair = namedtuple("Pair", "left right")


def test_nested_nodes_become_templates():
    inp = InputNode()
    x = call(A, "f", inp)
    constant = {"deep": [1, 2]}
    plan = plan_of(call(B, "g", [x, {"k": (inp, Pair(x, 1))}, constant], [1, 2], k=Reg(5)))
    task = plan.tasks[1]
    template, plain = task.args
    assert template == Nested([Reg(1), {"k": (Reg(0), Pair(Reg(1), 1))}, Const(constant)])
    assert plain == Const([1, 2])
    assert task.kwargs == (("k", Const(Reg(5))),)
    regs = ["input", "x"]
    assert fill(template.template, regs) == ["x", {"k": ("input", Pair("x", 1))}, constant]
    assert type(fill(template.template, regs)[1]["k"][1]) is Pair
    assert fill(template.template, regs)[2] is constant
    assert fill(template.template, regs) is not fill(template.template, regs)


def test_values_that_look_like_a_template_stay_values():
    inp = InputNode()
    odd = [Reg(0), Const(1), Nested(2), (), {}]
    (argument,) = plan_of(call(A, "f", [inp, odd, *odd])).tasks[0].args
    assert fill(argument.template, ["in"]) == ["in", odd, *odd]


def test_actors_of_one_name_are_told_apart():
    inp = InputNode()
    twins = [Actor(3, "Echo"), Actor(9, "Echo")]
    nodes = [call(actor, "echo", inp) for actor in [*twins, A, twins[0]]]
    plan = plan_of(MultiOutputNode(nodes))
    assert [actor.name for actor in plan.actors] == ["Echo[3]", "Echo[9]", "a"]
    assert [task.label for task in plan.tasks] == [
        "Echo[3].echo",
        "Echo[9].echo",
        "a.echo",
        "Echo[3].echo#2",
    ]
    assert [actor.key for actor in plan.actors] == [*twins, A]


def test_equal_actors_are_one_whatever_the_object():
    inp = InputNode()
    plan = plan_of(call(Actor(7, "a"), "g", call(A, "f", inp)))
    assert len(plan.actors) == 1


def test_the_same_graph_can_be_lowered_again_and_extended():
    inp = InputNode()
    x = call(A, "f", inp)
    first = plan_of(x)
    assert plan_of(x) == first
    assert len(plan_of(call(B, "g", x)).tasks) == 2


def test_hints_change_no_value():
    inp = InputNode()
    hinted = inp.with_tensor_transport()
    x = call(A, "f", hinted)
    far = x.with_tensor_transport(transport="shm")
    first, _ = call(B, "split", far, inp, n=2)
    plan = plan_of(MultiOutputNode([x, first.with_tensor_transport(device="cpu")]))
    assert edges(plan) == [
        ("input", EXECUTOR, (0, 1)),
        ("a.f", 0, (EXECUTOR, 1)),
        ("b.split[0]", 1, (EXECUTOR,)),
    ]
    assert plan.edges[1].reason == "asked for by with_tensor_transport"


def test_a_plan_is_data():
    inp = InputNode()
    plan = plan_of(call(A, "f", [inp[0]], inp.k, 3))
    assert pickle.loads(pickle.dumps(plan)) == plan


# Graphs that have no plan


def refused(root: Any) -> str:
    with pytest.raises(GraphError) as caught:
        plan_of(root)
    return str(caught.value)


def test_no_input():
    plan = plan_of(call(B, "g", call(A, "f", 1)))
    assert (plan.positional, plan.keywords, plan.whole_input) == (0, (), False)
    assert plan.inputs == (InputBundle(0, ()),)
    assert plan.edges[0].source == "start"
    assert plan.edges[0].readers == (0,)
    assert "start" in explain(plan)


def test_two_inputs():
    text = refused(call(A, "f", InputNode(), [InputNode()]))
    assert "2 InputNodes" in text
    assert "inp[0], inp[1]" in text


def test_whole_input_and_parts():
    inp = InputNode()
    plan = plan_of(call(B, "g", call(A, "f", inp), k=inp.key, j=inp.key[0]))
    assert (plan.positional, plan.keywords, plan.whole_input) == (0, ("key",), False)
    keys = ("key", Path("key", ((True, 0),)))
    assert [bundle.keys for bundle in plan.inputs] == [keys, (None,)]
    assert [edge.source for edge in plan.edges[:2]] == ["input['key'], input['key'][0]", "input"]


def test_a_task_without_a_node_among_its_arguments():
    inp = InputNode()
    apart = plan_of(call(A, "f", inp, call(B, "setup", 3)))
    assert [bundle.keys for bundle in apart.inputs] == [(None,), ()]
    assert apart.positional == 1
    # Where its actor gets some of the input, that begins it.
    together = plan_of(call(A, "f", InputNode()[0], call(A, "setup", 3)))
    assert [bundle.keys for bundle in together.inputs] == [(0,)]
    assert isinstance(steps(together)[0], Recv)


def test_an_actor_that_needs_no_value_gets_none():
    inp = InputNode()
    # Part 0 of the input is not for the actor with the number 0.
    plan = plan_of(call(B, "f", call(A, "setup"), inp[0]))
    assert [actor.name for actor in plan.actors] == ["a", "b"]
    assert edges(plan)[:2] == [("input[0]", EXECUTOR, (1,)), ("start", EXECUTOR, (0,))]


def test_an_input_as_output():
    inp = InputNode()
    assert "has no task" in refused(inp)
    plan = plan_of(MultiOutputNode([inp.k, call(A, "f", inp[0]), 5, inp]))
    assert plan.shape == Shape(
        [Reg(0), Reg(1), Reg(2), Reg(3)], (Passed("k"), 0, Const(5), Passed(None))
    )
    assert (plan.positional, plan.keywords) == (1, ("k",))
    assert [bundle.keys for bundle in plan.inputs] == [(0,)]


def test_an_effect():
    inp = InputNode()
    x = call(A, "f", inp)
    plan = plan_of(MultiOutputNode([x], effects=[call(B, "log", x)]))
    assert plan.effects == (2,)
    assert plan.edges[2].readers == (EXECUTOR,)
    assert steps(plan, 1)[-1] == Send(2, 1, only_done=True)


def test_a_leaf():
    inp = InputNode()
    x = call(A, "f", inp)
    leaf = call(B, "log", x)
    text = refused(call(C, "g", x))
    assert text.startswith("b.log does not reach the output")
    assert "MultiOutputNode" in text
    assert plan_of(MultiOutputNode([call(C, "g", call(A, "f", InputNode()))]))
    assert leaf.label == "b.log"


def test_a_leaf_that_no_variable_holds():
    inp = InputNode()
    call(B, "log", inp[0])
    assert "b.log does not reach" in refused(call(A, "f", inp[0]))


def test_leaves_are_named_by_their_ends():
    inp = InputNode()
    call(B, "end", call(B, "middle", inp))
    call(C, "split", inp, n=2)
    text = refused(call(A, "f", inp))
    assert text.startswith("b.end, c.split do not reach the output")


def test_a_leaf_below_a_hinted_node():
    inp = InputNode()
    x = call(A, "f", inp)
    call(B, "log", [x.with_tensor_transport()])
    assert "b.log" in refused(x)


def test_another_graph_on_the_same_actors_is_no_leaf():
    one, other = call(A, "f", InputNode()), call(A, "f", InputNode())
    assert len(plan_of(one).tasks) == len(plan_of(other).tasks) == 1


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        ({"transport": "nccl"}, "transport 'nccl'"),
        ({"transport": "cuda_ipc"}, "transport 'cuda_ipc'"),
        ({"transport": "accelerator"}, "transport 'accelerator'"),
        ({"device": "cuda"}, "device 'cuda'"),
        ({"device": "gpu", "transport": "shm"}, "device 'gpu'"),
    ],
)
def test_transports_that_are_not_there_yet(hint, text):
    def sent() -> Any:
        return call(A, "send", InputNode()).with_tensor_transport(**hint)

    for root in (sent(), call(B, "recv", sent()), call(A, "recv", sent())):
        message = refused(root)
        assert message.startswith("a.send: with_tensor_transport(")
        assert text in message
        assert "can be used here" in message
    hinted = InputNode().with_tensor_transport(**hint)
    assert refused(call(A, "f", hinted)).startswith("input: ")
    hinted = InputNode().with_tensor_transport(**hint)
    assert refused(call(A, "f", hinted["k"])).startswith("input['k']: ")
