"""What every process of a session has: its place on the board, its bell, its arena, its peers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from conveyor import _core
from conveyor.channel import SentDefinitions, set_up_codec
from conveyor.exceptions import RuntimeStateError
from conveyor.runtime.waiting.alarm import Alarm

#: Rings for calls: outstanding calls of one caller to one actor, and what a slot holds in place.
CALL_SLOTS = 64
CALL_STRIDE = 2048
CONTROL_SLOTS = 64


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """``file``: addresses; ``cap``: bytes with memory behind them."""

    file: int
    cap: int


def default_arena_size() -> ArenaSize:
    """Half of what this process may use, by the machine or the cgroup; ``CONVEYOR_ARENA_BYTES`` wins."""
    chosen = os.environ.get("CONVEYOR_ARENA_BYTES")
    cap = int(float(chosen)) if chosen else _memory_limit() // 2
    cap = max(cap, 1 << 20)
    return ArenaSize(file=max(16 * cap, 1 << 30), cap=cap)


def _memory_limit() -> int:
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            text = file.read().strip()
    except OSError:
        return limit
    return min(limit, int(text)) if text.isdigit() else limit


class Process:
    """This process's endpoints. Made once, by the driver's start or by an actor's ``main``."""

    def __init__(
        self, board: _core.Board, slot: int, eventfd: int, arena_fd: int, arena: ArenaSize
    ) -> None:
        set_up_codec()
        self.board = board
        self.slot = slot
        self.arena_size = arena
        self.inbox = _core.Inbox(board, slot, eventfd, threading.main_thread().ident or 0)
        spin = os.environ.get("CONVEYOR_SPIN_US")
        if spin is not None:
            self.inbox.spin_ns = max(int(float(spin) * 1000), 0)
        self._spin_ns = self.inbox.spin_ns
        self._spin_limits: dict[int, int] = {}
        board.set_eventfd(slot, eventfd)  # threads of this process ring it too
        self.alarm = Alarm(lambda: board.ring(slot, _core.ATTENTION_BIT))
        self.arena = _core.Arena(arena_fd, arena.file, arena.cap)
        self._views: dict[int, _core.ArenaView] = {}

    def adopt(self, slot: int, arena_fd: int, eventfd: int) -> None:
        """Make the process in ``slot`` a peer. The descriptors stay the caller's."""
        self._views[slot] = _core.ArenaView(arena_fd, self.arena_size.file)
        self.board.set_eventfd(slot, eventfd)

    def limit_spin(self, graph: int, microseconds: float | None) -> None:
        """What this process may spin while it has a part in ``graph``; ``None``: that is over, or it
        does not say."""
        before = self._spin_limits.pop(graph, None)
        if microseconds is not None:
            self._spin_limits[graph] = int(microseconds * 1000)
        if self._spin_limits.get(graph) != before:
            self.inbox.spin_ns = min([self._spin_ns, *self._spin_limits.values()])

    def close(self) -> None:
        """The session is over: values that are held stay, nothing new can come or go."""
        self.alarm.close()
        self._views.clear()
        self.board.close_fds()
        self.arena.close_fd()
        self.inbox.close_fds()

    def forget(self, slot: int) -> None:
        """``slot`` is no peer any more; values received from it stay as long as they are held."""
        self._views.pop(slot, None)
        self.board.forget_eventfd(slot)

    def writer(
        self,
        segment: _core.Segment,
        offset: int,
        targets: list[tuple[int, int]],
        carries: str,
        graph: int = 0,
        edge: int = 0,
        *,
        arguments: bool = False,
        budget: _core.MemoryBudget | None = None,
    ) -> _core.Writer:
        """The writing end of a ring; ``targets`` are the readers' (slot, bell bit). ``carries`` says
        in words, and ``graph`` and ``edge`` say by number, what goes over it. ``arguments``: refs in
        what it sends travel as their values. ``budget``: what its values, and others', may take of
        the arena."""
        return _core.Writer(
            segment,
            offset,
            self.board,
            targets,
            self.arena,
            SentDefinitions(values=arguments),
            graph,
            edge,
            carries,
            budget,
        )

    def reader(
        self,
        segment: _core.Segment,
        offset: int,
        index: int,
        writer: tuple[int, int],
        *,
        shared: bool,
    ) -> _core.Reader:
        """Reading end ``index`` of a ring written by process ``writer[0]``. Large values of a
        ``shared`` ring are read-only, because somebody else reads the same memory."""
        view = self._views.get(writer[0])
        if view is None:  # whoever lays a channel introduces its ends first
            raise RuntimeStateError(f"{self.board.name(writer[0])} has died: nothing comes from it")
        return _core.Reader(segment, offset, index, self.board, writer, view, shared)


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


class BellBits:
    """Which bits of one process's bell are taken. Kept by the driver, who lays all channels."""

    def __init__(self, reserved: int) -> None:
        """``reserved``: the highest bit that has a fixed meaning."""
        # Not a list of all that are free: a session may have had very many actors.
        self._next = max(reserved, _core.ATTENTION_BIT) + 1
        self._returned: list[int] = []

    def take(self) -> int:
        if self._returned:
            return self._returned.pop()
        if self._next == _core.BELL_BITS:
            raise RuntimeError("a process has more channels than its bell has bits")
        self._next += 1
        return self._next - 1

    def give_back(self, bit: int) -> None:
        self._returned.append(bit)
