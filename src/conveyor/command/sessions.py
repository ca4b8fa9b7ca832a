"""The sessions of this machine, as they can be seen from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import MsgspecError

from conveyor import _core
from conveyor.command.nodes import nodes_of
from conveyor.engine.net.display import FILE as STATUS_FILE
from conveyor.runtime.driver.graphs.layer import FILE, LaidGraph, read_roster
from conveyor.runtime.driver.processes.table import DRIVER_SLOT
from conveyor.runtime.status import ActorStatus, Label, actor_status, status_of, with_node

_PROC = Path("/proc")
_BOARD = "conveyor-board"
#: Bytes of a memory file that are read.
_MOST_BYTES = 1 << 26
_THERE = (1, 2, 3)  # starting, alive, dying


class NoSuchSession(Exception):
    """A process has no part in a session, or may not be looked at; the text says which."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process of a session: what it does, and its part of its host's shared memory, in bytes. node: where
    it is, if not on this machine."""

    status: ActorStatus
    memory: int
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """One session. pid: of its driver. program: its command line. memory: its shared memory, in bytes.
    graphs: those that are laid. members: its processes, the driver first. unknown: the other nodes of
    which it is not known what is there, and why; "" is all of them. troubles: what nodes wait for."""

    pid: int
    program: str
    memory: int
    graphs: tuple[LaidGraph, ...]
    members: tuple[Member, ...]
    unknown: tuple[tuple[str, str], ...] = ()
    troubles: tuple[tuple[str, str], ...] = ()


def find_sessions(pid: int | None = None, stacks: bool = False) -> list[Session]:
    """The sessions of this machine whose processes may be looked at, by their drivers' numbers; with ``pid``
    those that this process has a part in. Raises ``NoSuchSession`` if that has none. ``stacks``: other nodes
    are to look for those."""
    boards: dict[tuple[int, int], Path] = {}
    for process in _processes() if pid is None else [pid]:
        try:
            found = _files(process, _BOARD)
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
            boards.setdefault(identity, path)
    sessions = [
        session
        for identity, path in boards.items()
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
    """The memory files of that name which a process has open, with what tells each from others."""
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
    """A descriptor of that very file. ``OSError`` if the process has closed its own meanwhile: the number may
    be another file's by now, also one whose opening would wait."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(file)
    if (status.st_dev, status.st_ino) != identity:
        os.close(file)
        raise FileNotFoundError(f"{path} is another file by now")
    return file


def _look(path: Path, identity: tuple[int, int], stacks: bool = False) -> Session | None:
    """The session whose board that is. ``None``: it has ended meanwhile, or is of another version."""
    try:
        file = _open(path, identity)
        try:
            board = _core.Board.look(file)
        finally:
            os.close(file)
    except OSError:
        return None
    driver = board.pid(DRIVER_SLOT)
    if not driver:
        return None
    graphs = _graphs(driver)
    label = _labels(graphs)
    nodes = nodes_of(driver, _content(driver, STATUS_FILE), stacks)
    far = [Member(status_of(page, label), page.memory, n.name) for n in nodes for page in n.pages]
    unknown = tuple((node.name, node.unknown) for node in nodes if node.unknown)
    troubles = tuple((node.name, trouble) for node in nodes for trouble in node.troubles)
    known = {member.status.name for member in far}
    members = [
        Member(status, board.memory(slot))
        for slot in range(board.used)
        if board.condition(slot) in _THERE
        # On this board a process of another node has one that stands for it.
        and (
            (status := actor_status(board, slot, None, label)).state != "elsewhere"
            or status.name not in known
        )
    ]
    nodes_by_name = {m.status.name: m.node or "the driver's node" for m in (*members, *far)}
    nodes_by_slot = {slot: nodes_by_name.get(board.name(slot)) for slot in range(board.used)}
    found = [
        replace(one, status=with_node(one.status, nodes_by_slot.get)) for one in (*members, *far)
    ]
    return Session(
        driver,
        _program(driver),
        board.session_memory,
        tuple(graphs.values()),
        tuple(found),
        unknown,
        troubles,
    )


def _graphs(driver: int) -> dict[int, LaidGraph]:
    try:
        return read_roster(_content(driver, FILE).splitlines(keepends=True))
    except MsgspecError:  # it is no roster: the driver may be another user's
        return {}


def _content(process: int, name: str) -> bytes:
    """What the process's memory file of that name holds; nothing if there is none. A process of another user
    may have put anything there, and any amount."""
    try:
        for path, identity in _files(process, name):
            with os.fdopen(_open(path, identity), "rb") as file:
                data = file.read(_MOST_BYTES + 1)
            return data if len(data) <= _MOST_BYTES else b""
    except OSError:  # the process has ended
        pass
    return b""


def _labels(graphs: Mapping[int, LaidGraph]) -> Label:
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
