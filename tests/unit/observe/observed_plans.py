"""Plans to draw, made without any process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from conveyor.config import Config
from conveyor.dag import InputNode, MultiOutputNode
from conveyor.dag.methods import bind
from conveyor.plan import Plan, lower


@dataclass(frozen=True)
class Actor:
    index: int
    name: str


def call(actor: Actor, method: str, *args: Any, n: int = 1, **kwargs: Any) -> Any:
    return bind(actor, method, args, kwargs, num_returns=n)


def pipeline(*names: str) -> Plan:
    """One task on each of the named actors, in a row."""
    node: Any = InputNode()
    for index, name in enumerate(names):
        node = call(Actor(index, name), "run", node)
    return lower(node, Config())


def diamond() -> Plan:
    """Two inputs, elements of a result, a register, a value with two readers, three outputs."""
    split, left, right = Actor(0, "split"), Actor(1, "left"), Actor(2, "right")
    inp = InputNode()
    x = call(split, "prepare", inp[0])
    a, b = call(split, "halve", x, n=2)
    y = call(left, "work", {"part": [a]}, weight=inp.weight)
    z = call(right, "work", b, inp.weight)
    return lower(MultiOutputNode([call(right, "join", y, z), x, y]), Config())


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Random graphs; what nothing uses is an output."""
    actors = [Actor(i, draw(st.sampled_from("ab"))) for i in range(draw(st.integers(1, 4)))]
    inp = InputNode()
    values: list[Any] = [inp] if draw(st.booleans()) else [inp[0], inp[1], inp.k]
    loose: dict[int, Any] = {}
    task_of: dict[int, int] = {}
    for task in range(draw(st.integers(1, 12))):
        needed = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
        made = call(draw(st.sampled_from(actors)), "f", *needed, n=draw(st.integers(1, 3)))
        parts = list(made) if isinstance(made, tuple) else [made]
        for node in needed:
            loose.pop(task_of.get(id(node), -1), None)
        task_of.update((id(part), task) for part in parts)
        loose[task] = draw(st.sampled_from(parts))
        values += parts
    ends = list(loose.values())
    return lower(ends[0] if len(ends) == 1 else MultiOutputNode(ends), Config())


def layered(depth: int, width: int) -> Plan:
    """``depth`` layers of ``width`` tasks, each of which uses two of the layer before."""
    actors = [Actor(i, f"a{i}") for i in range(8)]
    inp = InputNode()
    deployer: list[Any] = [call(actors[i % 8], "f", inp) for i in range(width)]
    for _ in range(1, depth):
        deployer = [
            call(actors[i % 8], "f", deployer[i], deployer[(i * 7 + 3) % width])
            for i in range(width)
        ]
    return lower(MultiOutputNode(deployer), Config())
