"""Explanation of a Plan to people, as text."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from conveyor.dag.inputs import key_label, root_of
from conveyor.plan.flow import Made, few, value_label
from conveyor.plan.model import (
    EXECUTOR,
    Argument,
    Const,
    Edge,
    Fields,
    Leaf,
    Nested,
    Passed,
    Plan,
    Reg,
    Task,
)
from conveyor.plan.reading import Held, Values, moves
from conveyor.plan.schedule import early_receives

#: The widest column of the table of edges, in characters.
_WIDEST = 48

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 40


def explain(plan: Plan, name: str = "", hosts: Mapping[int, str] | None = None) -> str:
    """Say what every process will do at each execution, in order, over which channel, and why. ``hosts``:
    where the actors and the executor are, if not all of them are on one host. ::

    name: 2 actors, 2 tasks, 3 edges; up to 16 executions on the way

    driver
      1  send  input            to a
      2  recv  b.echo           from b

    a
      1  recv  input            from driver
      2  call  a.echo(input)
      3  send  a.echo           to b
    ...
    edges
      #0  input   driver → a   shm, depth 16: same host
    """
    values, actors = Values(plan), range(len(plan.actors))
    blocks = [
        f"{name}{name and ': '}{counted(len(plan.actors), 'actor')}, {counted(len(plan.tasks), 'task')}, "
        f"{counted(len(plan.edges), 'edge')}; up to {counted(plan.depth, 'execution')} on the way\n"
        f"execute({_parameters(plan)}) → {_results(plan)}",
        *(
            _block(_name(plan, participant), _steps(plan, participant, values))
            for participant in (EXECUTOR, *actors)
        ),
        _edges(plan, hosts or {}),
    ]
    if plan.overlap:
        blocks.append("\n".join(["overlap", *(f"  {line}" for line in _overlap(plan))]))
    return "\n\n".join(blocks)


def _parameters(plan: Plan) -> str:
    used = {root_of(key) for bundle in plan.inputs for key in bundle.keys if key is not None}
    if plan.shape is not None:
        passed = [leaf.key for leaf in plan.shape.leaves if isinstance(leaf, Passed)]
        used |= {root_of(key) for key in passed if key is not None}
    whole = not used and plan.positional == 1
    if whole:
        return "input"
    names = [f"input[{i}]" if i in used else f"input[{i}] (unused)" for i in range(plan.positional)]
    return ", ".join([*names, *(f"{name}=" for name in plan.keywords)])


def _results(plan: Plan) -> str:
    sources = [plan.edges[edge].source for edge in plan.outputs]
    if plan.shape is not None:
        leaves = [_leaf(leaf, sources) for leaf in plan.shape.leaves]
        return _nested(plan.shape.template, dict(enumerate(leaves)))
    return f"[{', '.join(sources)}]" if plan.multi_output else sources[0]


def _leaf(leaf: Leaf, sources: Sequence[str]) -> str:
    if isinstance(leaf, Const):
        return _value(leaf.value)
    if isinstance(leaf, Passed):
        return key_label(leaf.key, "input")
    return sources[leaf]


def _steps(plan: Plan, participant: int, values: Values) -> list[tuple[str, str, str]]:
    """Say what ``participant`` does: the kind, what it is about, and with whom."""
    steps: list[tuple[str, str, str]] = []
    for kind, number in moves(plan, participant):
        if kind == "call":
            task, held = plan.tasks[number], values.held[participant]
            steps.append((kind, _call(plan, task, held), _unused(task, held)))
        else:
            edge = plan.edges[number]
            sends = kind == "send"
            peers = f"→ {_names(plan, edge.readers)}" if sends else f"← {_name(plan, edge.writer)}"
            what = f"tensors of {edge.source}" if kind == "wait" else edge.source
            steps.append((kind, what, peers))
    return steps


def _call(plan: Plan, task: Task, held: Mapping[int, Held]) -> str:
    if task.collective is not None:
        return task.collective
    labels = [task.label for task in plan.tasks]
    names = {reg: value_label(known.value, labels) for reg, known in held.items()}
    shown = [_argument(argument, names) for argument in task.args]
    shown += [f"{name}={_argument(value, names)}" for name, value in task.kwargs]
    return f"{task.label}({', '.join(shown)})"


def _unused(task: Task, held: Mapping[int, Held]) -> str:
    used = {known.value for known in held.values()}
    elements = range(task.num_returns or 0)
    unused = [f"[{i}]" for i in elements if Made(task.id, i) not in used]
    return f"({', '.join(unused)} unused)" if unused else ""


def _argument(argument: Argument, names: Mapping[int, str]) -> str:
    if isinstance(argument, Reg):
        return names[argument.index]
    if isinstance(argument, Const):
        return _value(argument.value)
    return _nested(argument, names)


def _nested(value: Any, names: Mapping[int, str]) -> str:
    """Write a container with the names of its values, shortened if the container is long."""
    if isinstance(value, Nested):
        return _nested(value.template, names)
    if isinstance(value, (Reg, Const)):
        return _argument(value, names)
    if isinstance(value, Fields):
        items = few(f"{name}={_nested(item, names)}" for name, item in value.changed)
        return f"{type(value.instance).__name__}({items}, ...)"
    if isinstance(value, list):
        return f"[{few(_nested(item, names) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{few(f'{_value(k)}: {_nested(v, names)}' for k, v in value.items())}}}"
    if isinstance(value, tuple):
        items = few(_nested(item, names) for item in value)
        kind = type(value).__name__ if hasattr(value, "_fields") else ""
        return f"{kind}({items}{',' if len(value) == 1 and not kind else ''})"
    return _value(value)


def _value(value: Any) -> str:
    # An array's repr has lines.
    return " ".join(_short.repr(value).split())


def _edges(plan: Plan, hosts: Mapping[int, str]) -> str:
    rows = [
        (
            f"#{edge.id}",
            edge.source,
            f"{_name(plan, edge.writer)} → {_names(plan, edge.readers)}",
            f"{_route(edge, hosts)}{_streams(plan, edge)}",
        )
        for edge in plan.edges
    ]
    return "\n".join(["edges", *_columns(rows)])


def _route(edge: Edge, hosts: Mapping[int, str]) -> str:
    own = hosts.get(edge.writer)
    others = {hosts.get(reader): None for reader in edge.readers}
    there = [f"{host}" for host in others if host != own]
    if not there:
        return f"{edge.route}, depth {edge.depth}: {edge.reason}"
    local = "; shm to those on its own host" if own in others else ""
    out_of_band = f"; its tensors by {edge.route}, {edge.reason}" if edge.out_of_band else ""
    reason = f"; {edge.reason}" if edge.by_reference is not None else ""
    return f"network link, depth {edge.depth}: from {own} to {', '.join(there)}{local}{out_of_band}{reason}"


def _streams(plan: Plan, edge: Edge) -> str:
    if edge.streams is None:
        return ""
    own = plan.overlap or edge.streams == "own"
    return "; on streams of its own" if own else "; on the stream of the program"


def _block(title: str, steps: list[tuple[str, str, str]]) -> str:
    # What is called may be long: it takes no part in the alignment of what is sent and received.
    values = max((len(what) for kind, what, _ in steps if kind != "call"), default=0)
    lines = [
        f"  {number:>{len(str(len(steps)))}}  {kind:4}  {what.ljust(values)}  {rest}".rstrip()
        for number, (kind, what, rest) in enumerate(steps, 1)
    ]
    return "\n".join([title, *lines])


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align the columns of all rows. What follows a long cell begins on the next line, so that it
    neither leaves its column nor pushes all others far away."""
    widths = [min(max(map(len, column)), _WIDEST) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        line = at = "  "
        for cell, width in zip(row, widths, strict=True):
            if len(line) > len(at):
                lines.append(line.rstrip())
                line = at
            line += cell.ljust(width) + "  "
            at += " " * (width + 2)
        lines.append(line.rstrip())
    return lines


def _overlap(plan: Plan) -> list[str]:
    """Say what stands early, and why nothing else does."""
    sends = "every send stands right behind the task that makes its value: it waits for nothing"
    out_of_band = [edge for edge in plan.edges if edge.out_of_band]
    if not out_of_band:
        return [
            sends,
            "nothing is received early: all values travel in their frames, which their writers copy and "
            "their readers read in place",
        ]
    early = {(one.actor, one.edge): one for one in early_receives(plan)}
    lines = [sends]
    for edge in out_of_band:
        for reader in edge.readers:
            one = early.get((reader, edge.id))
            what = f"#{edge.id} {edge.source} at {_name(plan, reader)}"
            if one is None:
                lines.append(
                    f"{what}: not early; no other task there is bound between its maker and its reader"
                )
            else:
                tasks = ", ".join(plan.tasks[task].label for task in one.ahead)
                user = plan.tasks[one.user].label
                lines.append(
                    f"{what}: tried ahead of {tasks}, bound after its maker and before {user}, which needs "
                    "it; taken from there on as soon as it has come"
                )
    return lines


def _names(plan: Plan, participants: Iterable[int]) -> str:
    return ", ".join(_name(plan, participant) for participant in participants)


def _name(plan: Plan, participant: int) -> str:
    return "driver" if participant == EXECUTOR else plan.actors[participant].name


def counted(number: int, noun: str) -> str:
    """Write a number and its noun: ``1 task``, ``2 tasks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
