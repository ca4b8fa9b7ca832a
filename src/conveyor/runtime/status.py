"""Status of a process: a snapshot that people can read, and programs too.

All of it is read from the status in each slot of the process table and from ``/proc``: no actor is asked,
so it also works for one that is stuck, stopped or dead.
"""

from __future__ import annotations

import glob
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import Struct, structs

from conveyor import _core
from conveyor.runtime.wait_graph import FOR_THE_DRIVER, STEPS
from conveyor.system_limits import FORK_SERVER

ActorState = Literal[
    "starting", "idle", "decoding", "waiting", "running", "stopped", "dead", "elsewhere"
]
Label = Callable[[int, int], str | None]

_RUNNING = 1
_DRIVER_SLOT = 0


@dataclass(frozen=True, slots=True)
class EdgeWait:
    """Input that an actor's part of a graph needs next: ``source`` as ``graph.explain()`` calls it, of one
    execution, from ``writer`` (an actor's name or ``"driver"``)."""

    edge: int
    source: str
    writer: str
    execution: int


class Fetching(Struct, frozen=True):
    """A value of another process's that one waits for.

    value: its ``id`` among :func:`conveyor.objects`. holder: whose it is. node: on which node that is, if on
    another one than the process that waits. done, total: its bytes that are there, and all of them; a
    ``total`` of 0: it is held back (``conveyor.testing.hold_transfers``). seconds: for how long it has been
    waited for. others: how many more values are. slot: of the holder, if that is on another node.
    """

    value: str
    holder: str
    done: int
    total: int
    seconds: float
    others: int = 0
    slot: int | None = None
    node: str | None = None

    def describe(self) -> str:
        """Describe the fetch, in words to follow what the process does."""
        where = f" on {self.node}" if self.node else ""
        much = f"{self.done:,} of {self.total:,} bytes" if self.total else "held back"
        more = f"; and {self.others} others" if self.others else ""
        return (
            f"fetching a value that {self.holder} keeps{where}, which has not come yet "
            f"({self.value}: {much}, since {self.seconds:.1f} s{more})"
        )


class Decoding(Struct, frozen=True):
    """A value, or several, that a process rebuilds from bytes, which may run any code.

    seconds: for how long it has. importing: the module that is imported for that; empty: none is.
    arguments: it is what the actor is to be called with.
    """

    seconds: float
    importing: str
    arguments: bool

    def describe(self) -> str:
        """Describe the decoding, in words to follow what the process does."""
        what = "its arguments" if self.arguments else "a value"
        imports = f" (importing {self.importing})" if self.importing else ""
        return f"decoding {what}{imports} since {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """Status of one actor.

    state: ``"stopped"`` by a signal or a debugger; ``"waiting"`` for the input in ``waits_for``;
        ``"decoding"`` the arguments of its next call;
        ``"elsewhere"``: it lives, on another node, which has not said what it does.
    method: what it runs (or ran, when it was stopped): a graph's task by its label, or a method.
    node, execution: of that task; the execution alone where it is between two steps, or in a
        coroutine that waits. call: the number of the call, where it is none of a graph's.
    fetches_from: whose memory it wants to read a value from, where that takes its time: it is on another
        node, a device has not computed it yet, or it is held back (``conveyor.testing.hold_transfers``).
        fetching: which value, and how far it is.
    decoding: a value that it rebuilds from bytes, in a method or before it.
    since: when that began (``time.time()``). blocked_on: the actor whose result the method waits for.
    error: how it died. stack: where its Python code is, if that was asked for.
    host: where it is, if not on the node of the caller. unknown: why its status is not known.
    start_waits_for: the fork server, and what that does, where it has not forked the process yet.
    """

    name: str
    pid: int
    state: ActorState
    method: str | None = None
    node: int | None = None
    execution: int | None = None
    call: int | None = None
    since: float | None = None
    waits_for: EdgeWait | None = None
    blocked_on: str | None = None
    fetches_from: str | None = None
    fetching: Fetching | None = None
    decoding: Decoding | None = None
    error: str | None = None
    stack: str | None = None
    host: str | None = None
    unknown: str | None = None
    start_waits_for: str | None = None

    def describe(self) -> str:
        """Describe the status, in words to follow "the actor is"."""
        if self.state == "dead":
            return "dead" + (f": {self.error.splitlines()[0]}" if self.error else "")
        if self.state == "elsewhere":
            why = self.unknown or "only the driver asks other hosts"
            return f"alive, on another host, and what it does is not known: {why}"
        text = ""
        if self.method is not None and self.since is not None:
            number = (
                f"execution {self.execution}" if self.execution is not None else f"call {self.call}"
            )
            clock = time.strftime("%H:%M:%S", time.localtime(self.since))
            text = (
                f"running {self.method} ({number}) since {time.time() - self.since:.1f} s ({clock})"
            )
            if self.blocked_on is not None:
                text += f", which waits for {self.blocked_on}"
        if self.fetching is not None:
            fetching = self.fetching.describe()
            text += f", {fetching}" if text else fetching
        if self.decoding is not None:
            decoding = self.decoding.describe()
            text += f", {decoding}" if text else decoding
        if self.state == "stopped":
            # Not dead: SIGCONT, or the debugger's "continue", and nothing is lost.
            return "stopped (by a signal, or by a debugger)" + (f" while {text}" if text else "")
        if text:
            return text
        wait = self.waits_for
        if wait is not None:
            return (
                f"idle, waiting for {wait.source} of execution {wait.execution} from {wait.writer}"
            )
        if self.state == "idle" and self.execution is not None:
            return f"between two steps of execution {self.execution}"
        if self.start_waits_for is not None:
            return f"{self.state}, waiting for {self.start_waits_for}"
        return self.state

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        text = f"{self.name} (pid {self.pid}{where}): {self.describe()}"
        if self.stack:
            text += "\n" + "\n".join(f"    {line}" for line in self.stack.splitlines())
        return text


class ProcessSnapshot(Struct, frozen=True):
    """Process snapshot: a copy of a row of the process table, with facts from ``/proc``, for readers that
    have access to neither.

    running: what it runs: graph, node, execution or call, since how many nanoseconds, and the method's name.
    blocked_on, fetching, decoding, start_waits_for: as in :class:`ActorStatus`. memory: its part of the
    node's shared memory.
    """

    name: str
    pid: int
    state: ActorState
    stopped: bool = False
    running: tuple[int, int, int, int, str] | None = None
    blocked_on: str | None = None
    fetching: Fetching | None = None
    decoding: Decoding | None = None
    memory: int = 0
    stack: str | None = None
    start_waits_for: str | None = None


def read_snapshot(
    process_table: _core.ProcessTable, slot: int, incarnation: int | None = None
) -> ProcessSnapshot:
    """Take a snapshot of the process in ``slot`` (``incarnation``: which of its processes is meant)."""
    condition, pid, name = (
        process_table.condition(slot),
        process_table.pid(slot),
        process_table.name(slot),
    )
    if incarnation is not None and process_table.gone(slot, incarnation):
        return ProcessSnapshot(name, pid, "dead")
    if condition not in (1, 2):
        return ProcessSnapshot(name, pid, "dead")
    if process_table.is_remote(slot):
        return ProcessSnapshot(name, 0, "elsewhere")
    state, graph, node, execution, since_ns, _signal, what = process_table.status(slot)
    running, blocked_on, decoding = None, None, _decoding(process_table, slot, state)
    if state == _RUNNING:
        waits = (process_table.waits(slot, STEPS) or (0, 0, 0, []))[3]
        running = (graph, node, execution, _core.monotonic_ns() - since_ns, what)
        blocked_on = _blocked_on(process_table, *waits[0]) if waits else None
    return ProcessSnapshot(
        name,
        pid,
        "starting" if condition == 1 else "idle" if decoding is None else "decoding",
        bool(pid) and is_stopped(pid),
        running,
        blocked_on,
        _fetching(process_table, slot),
        decoding,
        process_table.memory(slot),
        start_waits_for=_start_waits_for(process_table) if condition == 1 and not pid else None,
    )


def _start_waits_for(process_table: _core.ProcessTable) -> str | None:
    """Return the driver's fork server and what it does, or None: something else starts processes."""
    for children in glob.glob(f"/proc/{process_table.pid(_DRIVER_SLOT)}/task/*/children"):
        for child in _text(children).split():
            if _text(f"/proc/{child}/comm").strip() == FORK_SERVER:
                does = "is stopped" if is_stopped(int(child)) else "has not answered"
                return f"the fork server (pid {child}), which {does}"
    return None


def _text(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:  # its process has ended
        return ""


def _blocked_on(process_table: _core.ProcessTable, slot: int, _work: int, text: str) -> str:
    """Name the process that is waited for. For the driver, name what it is to do: that does not show
    elsewhere."""
    _, waits, what = text.partition(f" waits for {FOR_THE_DRIVER}")
    return f"{FOR_THE_DRIVER}{what}" if waits else process_table.name(slot)


def _decoding(process_table: _core.ProcessTable, slot: int, state: int) -> Decoding | None:
    found = process_table.decoding(slot)
    if found is None:
        return None
    seconds = (_core.monotonic_ns() - found[0]) / 1e9
    return Decoding(seconds, found[1], state != _RUNNING and slot != _DRIVER_SLOT)


def _fetching(process_table: _core.ProcessTable, slot: int) -> Fetching | None:
    found = process_table.fetching(slot)
    if found is None:
        return None
    holder, number, done, total, others, since_ns = found
    seconds = (_core.monotonic_ns() - since_ns) / 1e9
    name = process_table.name(holder)
    # Who waits is of the process table's own host, and it may be a device that has not made the values yet.
    remote_holder = holder if process_table.is_remote(holder) else None
    return Fetching(f"{number:016x}", name, done, total, seconds, others, remote_holder)


def with_node(status: ActorStatus, name: Callable[[int], str | None]) -> ActorStatus:
    """Return the status with the node of the value that is fetched. ``name(slot)``: the node of the process
    that has that slot."""
    fetching = status.fetching
    if fetching is None or fetching.slot is None or not fetching.total:
        return status
    return replace(status, fetching=structs.replace(fetching, node=name(fetching.slot)))


def status_of(snapshot: ProcessSnapshot, label: Label | None = None) -> ActorStatus:
    """Convert a process snapshot to the status that users see. ``label`` names a (graph, node)."""
    status = ActorStatus(
        snapshot.name,
        snapshot.pid,
        snapshot.state,
        fetches_from=None if snapshot.fetching is None else snapshot.fetching.holder,
        fetching=snapshot.fetching,
        decoding=snapshot.decoding,
        stack=snapshot.stack,
        start_waits_for=snapshot.start_waits_for,
    )
    if snapshot.running is not None:
        graph, node, execution, elapsed, what = snapshot.running
        method = (label(graph, node) if label is not None else None) if graph else what
        status = replace(
            status,
            state="running",
            method=method or f"node {node} of graph {graph}",
            node=node if graph else None,
            execution=execution if graph else None,
            call=None if graph else execution,
            since=time.time() - elapsed / 1e9,
            blocked_on=snapshot.blocked_on,
        )
    return replace(status, state="stopped") if snapshot.stopped else status


def actor_status(
    process_table: _core.ProcessTable,
    slot: int,
    incarnation: int | None = None,
    label: Label | None = None,
) -> ActorStatus:
    """Return the status of the process in ``slot`` (``incarnation``: which of its processes is meant).
    ``label`` names a (graph, node)."""
    return status_of(read_snapshot(process_table, slot, incarnation), label)


def describe_status(
    process_table: _core.ProcessTable, slot: int, label: Label | None = None
) -> str:
    """Describe what the process in ``slot`` is doing."""
    return actor_status(process_table, slot, None, label).describe()


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped, by SIGSTOP or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The state follows the name, which may hold anything.
            return stat.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False
