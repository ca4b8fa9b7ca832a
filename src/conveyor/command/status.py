"""``conveyor status``: the sessions of this machine, as text or as JSON."""

from __future__ import annotations

import sys
from json import dumps

from msgspec import to_builtins

from conveyor.command.sessions import Member, NoSuchSession, Session, find_sessions
from conveyor.engine.net.display import OWN_NODE
from conveyor.observe.dataflow import printable
from conveyor.observe.units import size
from conveyor.runtime.graph.telemetry.stacks import stack_of

_PROGRAM = 120


def show(pid: int | None, as_json: bool, stacks: bool) -> int:
    """Print the sessions; the exit status of the command."""
    try:
        sessions = find_sessions(pid, stacks)
    except NoSuchSession as error:
        print(f"conveyor: {printable(str(error))}", file=sys.stderr)
        return 1
    if as_json:
        print(
            # Only printable ASCII: texts may be another user's.
            dumps(to_builtins([_as_json(session, stacks) for session in sessions]), indent=2)
        )
        return 0
    if not sessions:
        print("no session of Conveyor is running that this user may look at")
    for session in sessions:
        # Names, command lines and stacks may be another user's, and are no commands for this terminal.
        print("\n".join(map(printable, _lines(session, stacks))))
    return 0


def _lines(session: Session, stacks: bool) -> list[str]:
    program = (
        session.program if len(session.program) <= _PROGRAM else session.program[:_PROGRAM] + "..."
    )
    processes = len(session.members)
    lines = [
        f"session of pid {session.pid}: {program}",
        f"  {processes} process{'es' if processes != 1 else ''}, {size(session.memory)} of shared memory",
    ]
    lines += [f"  graph {graph.number}: {graph.name}" for graph in session.graphs]
    for member in session.members:
        lines.append(f"  {_line(session, member)}")
        if stacks:
            lines += [f"      {line}" for line in (_stack(member) or "").splitlines()]
    for node, why in session.unknown:
        what = f"node {node}" if node else "what is on other nodes"
        lines.append(f"  {what}: not known, as {why}")
    for node, trouble in session.troubles:
        lines.append(f"  {node if node == OWN_NODE else f'node {node}'}: {trouble}")
    return lines


def _stack(member: Member) -> str | None:
    """Of another node it has come with the rest; of a process without a number there is none to be had."""
    if member.node is not None or not member.status.pid:
        return member.status.stack
    return stack_of(member.status.pid)


def _line(session: Session, member: Member) -> str:
    status = member.status
    where = f" on {member.node}" if member.node else ""
    pid = (
        f" (pid {status.pid}{where})" if status.pid else ""
    )  # it has none while it is being started
    line = f"{status.name}{pid}, {size(member.memory)}"
    # The board says of the driver only whether it is stopped: what its threads do is its program's affair.
    if _is_driver(session, member) and status.state == "idle":
        return line
    return f"{line}: {status.describe()}"


def _is_driver(session: Session, member: Member) -> bool:
    return member.node is None and member.status.pid == session.pid


def _as_json(session: Session, stacks: bool) -> dict[str, object]:
    return {
        "pid": session.pid,
        "program": session.program,
        "memory": session.memory,
        "graphs": [{"number": graph.number, "name": graph.name} for graph in session.graphs],
        "unknown": [{"node": node or None, "why": why} for node, why in session.unknown],
        "troubles": [{"node": node, "what": what} for node, what in session.troubles],
        "processes": [_member_as_json(session, member, stacks) for member in session.members],
    }


def _member_as_json(session: Session, member: Member, stacks: bool) -> dict[str, object]:
    status = member.status
    return {
        "name": status.name,
        "pid": status.pid,
        "driver": _is_driver(session, member),
        "node": member.node,
        "memory": member.memory,
        "state": status.state,
        "method": status.method,
        "execution": status.execution,
        "call": status.call,
        "since": status.since,
        "start_waits_for": status.start_waits_for,
        "blocked_on": status.blocked_on,
        "fetching": status.fetching,
        "decoding": status.decoding,
        "stack": _stack(member) if stacks else None,
    }
