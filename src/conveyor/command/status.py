"""``conveyor status``: the sessions of this machine, as text or as JSON."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path

import msgspec
from msgspec import MsgspecError, to_builtins

from conveyor import _core
from conveyor.cluster.display import FILE as STATUS_FILE
from conveyor.cluster.display import OWN_NODE, PLAIN, WITH_STACKS, NodeSeen
from conveyor.driver.actors import DRIVER_SLOT
from conveyor.driver.deployments import FILE, DeployedGraph, read_graph_list
from conveyor.graph.telemetry import stack_of
from conveyor.local_sockets import KEY_BYTES, owner, prove
from conveyor.observe.dataflow import printable
from conveyor.observe.units import size
from conveyor.runtime.status import ActorStatus, Label, actor_status, status_of, with_node

#: Seconds that the driver has to answer; it gives its nodes less. Stacks take longer.
_SECONDS, _STACKS_SECONDS = 5.0, 20.0
#: Bytes that an answer may have. The driver may be another user's.
_MOST_BYTES = 1 << 26


def nodes_of(driver: int, content: bytes, stacks: bool) -> list[NodeSeen]:
    """Return the session's other nodes. Where the driver does not answer, one without a name says why.

    ``content``: of the driver's memory file (``display.FILE``); nothing if there are no other nodes.
    """
    if not content:
        return []
    key, name = content[:KEY_BYTES], content[KEY_BYTES:].decode(errors="replace")
    try:
        return _ask(driver, key, name, _STACKS_SECONDS if stacks else _SECONDS, stacks)
    except (OSError, msgspec.MsgspecError) as error:
        why = str(error) or type(error).__name__
        return [NodeSeen("", (), f"the driver does not answer ({why})")]


def _ask(driver: int, key: bytes, name: str, seconds: float, stacks: bool) -> list[NodeSeen]:
    deadline = _core.monotonic() + seconds
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(seconds)
        sock.connect(f"\0{name}")
        pid, user = owner(sock)
        if pid != driver:
            raise OSError("another process has its socket")
        prove(sock, key, user=user)
        sock.sendall(WITH_STACKS if stacks else PLAIN)
        data = bytearray()
        while True:
            sock.settimeout(max(deadline - _core.monotonic(), 0.001))
            some = sock.recv(1 << 16)
            if not some:
                break
            data += some
            if len(data) > _MOST_BYTES:
                raise OSError(f"its answer has more than {_MOST_BYTES} bytes")
            if _core.monotonic() > deadline:
                raise TimeoutError(f"its answer has not ended after {seconds:g} s")
    if not data:
        raise OSError("it has ended the connection")
    return msgspec.msgpack.decode(data, type=list[NodeSeen])


_PROC = Path("/proc")
_PROCESS_TABLE = "conveyor-process-table"
#: Conditions of a slot whose process is there.
_THERE = (1, 2, 3)  # starting, alive, dying


class NoSuchSession(Exception):
    """A process has no part in a session, or may not be looked at; the text says which."""


@dataclass(frozen=True, slots=True)
class SessionProcess:
    """A process of a session: what it does, and its part of its host's shared memory, in bytes. node: where
    it is, if not on this machine."""

    status: ActorStatus
    memory: int
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """Session of this machine.

    pid: of its driver. program: the driver's command line. memory: the session's shared memory, in bytes.
    graphs: the deployed ones. members: its processes, the driver first. unknown: the other nodes that told
    nothing, and why; the name "" means all of them. troubles: what nodes wait for.
    """

    pid: int
    program: str
    memory: int
    graphs: tuple[DeployedGraph, ...]
    processes: tuple[SessionProcess, ...]
    unknown: tuple[tuple[str, str], ...] = ()
    troubles: tuple[tuple[str, str], ...] = ()


def find_sessions(pid: int | None = None, stacks: bool = False) -> list[Session]:
    """Return the sessions of this machine whose processes may be looked at, by their drivers' pids. ``pid``:
    only the sessions of that process; ``NoSuchSession`` if there is none. ``stacks``: ask other nodes for
    stacks."""
    process_tables: dict[tuple[int, int], Path] = {}
    for process in _processes() if pid is None else [pid]:
        try:
            found = _files(process, _PROCESS_TABLE)
        except FileNotFoundError:
            if pid is not None:
                raise NoSuchSession(f"there is no process {pid} on this machine") from None
            continue
        except PermissionError:
            if pid is not None:
                raise NoSuchSession(
                    f"process {pid} may not be looked at: it is another user's, or protected by the kernel"
                ) from None
            continue
        for path, identity in found:
            process_tables.setdefault(identity, path)
    sessions = [
        session
        for identity, path in process_tables.items()
        if (session := _look(path, identity, stacks)) is not None
    ]
    if pid is not None and not sessions:
        raise NoSuchSession(f"process {pid} has no part in a session of Conveyor")
    return sorted(sessions, key=lambda session: session.pid)


def _processes() -> Iterator[int]:
    for entry in os.listdir(_PROC):
        if entry.isdecimal():
            yield int(entry)


def _files(process: int, name: str) -> list[tuple[Path, tuple[int, int]]]:
    """Return the memory files of that name which a process has open, each with what tells it from others."""
    found = []
    folder = _PROC / str(process) / "fd"
    for entry in os.listdir(folder):
        path = folder / entry
        try:
            if os.readlink(path) == f"/memfd:{name} (deleted)":
                status = os.stat(path)
                found.append((path, (status.st_dev, status.st_ino)))
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


def _open(path: Path, identity: tuple[int, int]) -> int:
    """Open that very file and return its descriptor. ``OSError`` if the process has closed its own meanwhile:
    the number may be another file's by now, also one whose opening would wait."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(file)
    if (status.st_dev, status.st_ino) != identity:
        os.close(file)
        raise FileNotFoundError(f"{path} is another file by now")
    return file


def _look(path: Path, identity: tuple[int, int], stacks: bool = False) -> Session | None:
    """Return the session of that process table, or ``None`` if it has ended meanwhile or is of another
    version."""
    try:
        file = _open(path, identity)
        try:
            process_table = _core.ProcessTable.look(file)
        finally:
            os.close(file)
    except OSError:
        return None
    driver = process_table.pid(DRIVER_SLOT)
    if not driver:
        return None
    graphs = _graphs(driver)
    label = _labels(graphs)
    nodes = nodes_of(driver, _content(driver, STATUS_FILE), stacks)
    remote = [
        SessionProcess(status_of(snapshot, label), snapshot.memory, n.name)
        for n in nodes
        for snapshot in n.snapshots
    ]
    unknown = tuple((node.name, node.unknown) for node in nodes if node.unknown)
    troubles = tuple((node.name, trouble) for node in nodes for trouble in node.troubles)
    known = {process.status.name for process in remote}
    processes = [
        SessionProcess(status, process_table.memory(slot))
        for slot in range(process_table.used)
        if process_table.condition(slot) in _THERE
        # On this process table a process of another node has one that stands for it.
        and (
            (status := actor_status(process_table, slot, None, label)).state != "elsewhere"
            or status.name not in known
        )
    ]
    nodes_by_name = {m.status.name: m.node or "the driver's node" for m in (*processes, *remote)}
    nodes_by_slot = {
        slot: nodes_by_name.get(process_table.name(slot)) for slot in range(process_table.used)
    }
    found = [
        replace(one, status=with_node(one.status, nodes_by_slot.get))
        for one in (*processes, *remote)
    ]
    return Session(
        driver,
        _program(driver),
        process_table.session_memory,
        tuple(graphs.values()),
        tuple(found),
        unknown,
        troubles,
    )


def _graphs(driver: int) -> dict[int, DeployedGraph]:
    try:
        return read_graph_list(_content(driver, FILE).splitlines(keepends=True))
    except MsgspecError:  # it is no list of graphs: the driver may be another user's
        return {}


def _content(process: int, name: str) -> bytes:
    """Return the content of the process's memory file of that name, or nothing if there is none. A process of
    another user may have put anything there, and any amount."""
    try:
        for path, identity in _files(process, name):
            with os.fdopen(_open(path, identity), "rb") as file:
                data = file.read(_MOST_BYTES + 1)
            return data if len(data) <= _MOST_BYTES else b""
    except OSError:  # the process has ended
        pass
    return b""


def _labels(graphs: Mapping[int, DeployedGraph]) -> Label:
    def label(graph: int, node: int) -> str | None:
        found = graphs.get(graph)
        return None if found is None or found.tasks is None else found.tasks.get(node)

    return label


def _program(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode(errors="replace") for word in words)


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
    processes = len(session.processes)
    lines = [
        f"session of pid {session.pid}: {program}",
        f"  {processes} process{'es' if processes != 1 else ''}, {size(session.memory)} of shared memory",
    ]
    lines += [f"  graph {graph.number}: {graph.name}" for graph in session.graphs]
    for process in session.processes:
        lines.append(f"  {_line(session, process)}")
        if stacks:
            lines += [f"      {line}" for line in (_stack(process) or "").splitlines()]
    for node, why in session.unknown:
        what = f"node {node}" if node else "what is on other nodes"
        lines.append(f"  {what}: not known, as {why}")
    for node, trouble in session.troubles:
        lines.append(f"  {node if node == OWN_NODE else f'node {node}'}: {trouble}")
    return lines


def _stack(process: SessionProcess) -> str | None:
    """Return the stack of a process. A process of another node sent it along with its status; without a
    process id there is none."""
    if process.node is not None or not process.status.pid:
        return process.status.stack
    return stack_of(process.status.pid)


def _line(session: Session, process: SessionProcess) -> str:
    status = process.status
    where = f" on {process.node}" if process.node else ""
    pid = (
        f" (pid {status.pid}{where})" if status.pid else ""
    )  # it has none while it is being started
    line = f"{status.name}{pid}, {size(process.memory)}"
    # The process table says of the driver only whether it is stopped: what its threads do is its program's
    # affair.
    if _is_driver(session, process) and status.state == "idle":
        return line
    return f"{line}: {status.describe()}"


def _is_driver(session: Session, process: SessionProcess) -> bool:
    return process.node is None and process.status.pid == session.pid


def _as_json(session: Session, stacks: bool) -> dict[str, object]:
    return {
        "pid": session.pid,
        "program": session.program,
        "memory": session.memory,
        "graphs": [{"number": graph.number, "name": graph.name} for graph in session.graphs],
        "unknown": [{"node": node or None, "why": why} for node, why in session.unknown],
        "troubles": [{"node": node, "what": what} for node, what in session.troubles],
        "processes": [_process_as_json(session, process, stacks) for process in session.processes],
    }


def _process_as_json(session: Session, process: SessionProcess, stacks: bool) -> dict[str, object]:
    status = process.status
    return {
        "name": status.name,
        "pid": status.pid,
        "driver": _is_driver(session, process),
        "node": process.node,
        "memory": process.memory,
        "state": status.state,
        "method": status.method,
        "execution": status.execution,
        "call": status.call,
        "since": status.since,
        "start_waits_for": status.start_waits_for,
        "blocked_on": status.blocked_on,
        "fetching": status.fetching,
        "decoding": status.decoding,
        "stack": _stack(process) if stacks else None,
    }
