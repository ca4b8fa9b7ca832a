"""Nodes inside the containers that users pass."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import NamedTuple

import pytest

from conveyor.dag import InputNode
from conveyor.dag.containers import find_nodes, replace_nodes
from conveyor.dag.inputs import key_of
from conveyor.exceptions import GraphError

Pair = namedtuple("Pair", "left right")


class Point(NamedTuple):
    x: object
    y: object


INP = InputNode()
X, Y = INP["x"], INP["y"]


@pytest.mark.parametrize(
    ("value", "nodes"),
    [
        (X, [X]),
        ([X, Y, X], [X, Y]),
        ((1, [Y, {"k": (X,)}]), [Y, X]),
        ({"a": X, "b": {"c": Y}}, [X, Y]),
        (Pair(1, Point(X, [Y])), [X, Y]),
        ([1, "x", b"", None, {1, 2}, {"k": (1,)}], []),
        ("a string", []),
        (OrderedDict(a=1), []),
    ],
)
def test_find(value, nodes):
    assert find_nodes(value) == nodes


def test_replace_rebuilds_what_holds_nodes_and_keeps_the_rest():
    constant = [1, [2]]
    value = [X, {"a": (Y, constant), "b": constant}, Pair(1, X)]
    kept = []

    def keep(part):
        kept.append(part)
        return part

    replaced = replace_nodes(value, key_of, keep)
    assert replaced == ["x", {"a": ("y", [1, [2]]), "b": [1, [2]]}, Pair(1, "x")]
    assert type(replaced[2]) is Pair
    assert replaced[1]["b"] is constant
    assert kept == [constant, constant, 1]
    assert value[0] is X


def test_replace_calls_a_whole_constant_one_part():
    assert replace_nodes([1, [2]], lambda node: None, lambda part: ("const", part)) == (
        "const",
        [1, [2]],
    )


def test_the_same_container_twice():
    shared = [X]
    assert replace_nodes([shared, [1], shared], lambda node: 0) == [[0], [1], [0]]
    assert replace_nodes([[shared], ([shared],)], lambda node: 0) == [[[0]], ([[0]],)]


def test_deep_constants():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert find_nodes([deep, X]) == [X]
    assert replace_nodes([deep, X], lambda node: 1)[0] is deep


def test_constants_that_contain_themselves():
    loop: list = [1]
    loop.append(loop)
    assert find_nodes([loop, X]) == [X]
    assert replace_nodes((loop, X), lambda node: 1)[0] is loop


def test_a_node_in_a_container_that_contains_itself():
    loop: list = [X]
    loop.append({"again": loop})
    with pytest.raises(GraphError, match=r"argument 1 of a\.f has a graph node inside a list that"):
        find_nodes(loop, "argument 1 of a.f")


@dataclasses.dataclass
class Batch:
    data: object


class Odd(list):
    pass


def test_dataclasses_are_filled_without_running_their_init():
    @dataclasses.dataclass(frozen=True, slots=True)
    class Checked:
        a: object
        b: object = 2

        def __post_init__(self):
            assert self.a is X

    value = Checked(X, [Y])
    replaced = replace_nodes([value], key_of)
    assert (replaced[0].a, replaced[0].b) == ("x", ["y"])
    assert value.a is X


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ([{X}], "inside a set"),
        (frozenset([X]), "inside a frozenset"),
        ({X: 1}, "in the key of a dict"),
        ({(1, X): 1}, "in the key of a dict"),
        ({"k": Odd([X])}, "inside a Odd"),
        (OrderedDict(a=X), "inside a OrderedDict"),
        ([(Batch((Odd([[X]]),)),)], "inside a Odd"),
    ],
)
def test_nodes_where_none_can_be_filled_in(value, where):
    with pytest.raises(GraphError, match=where):
        find_nodes(value)
