"""The Plan: what a graph becomes before any process is touched.

Everything here is immutable data over one index space: actors, edges, tasks and registers are
small integers. ``explain``, the tests, the driver and the workers all read the same Plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conveyor.dag.parts import Key
from conveyor.plan.portable import Portable
from conveyor.plan.steps import Step

#: The driver's place in ``writer`` and ``readers``; actors count from 0.
DRIVER = -1


@dataclass(frozen=True, slots=True)
class ActorInfo(Portable):
    """One actor of the graph. ``key`` is the engine's identity of it, ``name`` is for people."""

    index: int
    key: Any
    name: str


@dataclass(frozen=True, slots=True)
class Reg(Portable):
    """A place in a program's register file, used where an argument's value will stand."""

    index: int


@dataclass(frozen=True, slots=True)
class Nested(Portable):
    """A container argument with nodes inside: ``template`` is the container with ``Reg`` leaves.

    A container without nodes in it stands there whole as a ``Const``, so ``fill`` need not look
    inside it.
    """

    template: Any


@dataclass(frozen=True, slots=True)
class Fields(Portable):
    """In a ``Nested`` template, a dataclass: ``instance`` with other values in some of its fields.

    ``instance`` has ``None`` there, so that it can be pickled without the nodes.
    """

    instance: Any
    changed: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Const(Portable):
    """A constant argument."""

    value: Any


Argument = Reg | Const | Nested


@dataclass(frozen=True, slots=True)
class Task(Portable):
    """One bound method call, or, with ``function``, a function's. ``label`` names it in errors:
    ``"stage1.forward"``, with ``#2`` where a graph binds the same method of the same actor more than
    once."""

    id: int
    actor: int
    method: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    num_returns: int | None
    label: str
    function: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class Edge(Portable):
    """One channel: what ``source`` makes, from one writer to a fixed set of readers.

    ``source`` is a label for people (``"input"``, ``"input[0], input['k']"``, ``"a.echo"``,
    ``"a.split[1]"``). ``readers`` are sorted, without the writer. ``depth`` is the ring's number of
    slots. ``route`` names the transport and ``reason`` says why it was chosen.
    """

    id: int
    writer: int
    readers: tuple[int, ...]
    source: str
    depth: int
    route: str
    reason: str


@dataclass(frozen=True, slots=True)
class Program(Portable):
    """What one actor does for one execution, in order."""

    actor: int
    registers: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class InputBundle(Portable):
    """Inputs with the same set of readers travel in one frame on one edge.

    ``keys == (None,)`` is the whole input: the frame is the value itself. ``keys == ()`` carries
    nothing (``None``): it starts an execution at readers that get no other input. Otherwise the frame
    is a tuple in the order of ``keys``: arguments of ``execute`` by position or name, and parts of
    them (``conveyor.dag.parts.Path``).
    """

    edge: int
    keys: tuple[Key | None, ...]


@dataclass(frozen=True, slots=True)
class Passed(Portable):
    """A result that is a part of the input (``None``: the whole)."""

    key: Key | None


Leaf = int | Passed | Const
"""One result: the place of its edge in ``Plan.outputs``, a part of the input, or a constant."""


@dataclass(frozen=True, slots=True)
class Shape(Portable):
    """Results that are more than a list of what tasks made: ``template`` is a container with ``Reg``
    leaves, each the place of a result in ``leaves``."""

    template: Any
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, slots=True)
class Plan(Portable):
    """A compiled graph as data.

    actors, tasks, edges: each stands at its own number.
    programs: one for each actor, at the actor's number.
    order: the numbers of all tasks in an order that every program keeps to; whatever a task needs is
        made before it.
    inputs: the edges that the executor writes.
    outputs: the edges that it reads, one for each output in order (an edge may stand there twice).
    multi_output: a list of results is asked for, not one.
    positional, keywords: what ``execute`` must be given.
    whole_input: this is one argument, and it travels as it is.
    depth: so many executions may be under way.
    shape: the form of the results, where it is not a list.
    effects: the edges on which the executor hears that a task without a result has run.
    streams: pairs of edges: an output that says that a generator has ended, and the one on which its
        items come.
    """

    actors: tuple[ActorInfo, ...]
    tasks: tuple[Task, ...]
    edges: tuple[Edge, ...]
    programs: tuple[Program, ...]
    order: tuple[int, ...]
    inputs: tuple[InputBundle, ...]
    outputs: tuple[int, ...]
    multi_output: bool
    positional: int
    keywords: tuple[str, ...]
    whole_input: bool
    depth: int
    shape: Shape | None = None
    effects: tuple[int, ...] = ()
    streams: tuple[tuple[int, int], ...] = ()
