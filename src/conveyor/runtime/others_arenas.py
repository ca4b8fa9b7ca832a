"""The arenas of processes that this one need not have met: values of theirs are read there, in place."""

from __future__ import annotations

import os
from typing import Protocol

from conveyor import _core


class _Process(Protocol):
    board: _core.Board

    def known_arena(self, slot: int, incarnation: int) -> _core.ArenaView | None: ...

    @property
    def arena_size(self) -> _Size: ...


class _Size(Protocol):
    @property
    def file(self) -> int: ...


class OthersArenas:
    """The arenas that this process has opened, until it hears that their processes are dead."""

    def __init__(self, process: _Process) -> None:
        self._process = process
        # By slot and incarnation. Single steps change it, so it needs no lock.
        self._opened: dict[tuple[int, int], _core.ArenaView] = {}

    def of(
        self, slot: int, incarnation: int, pid: int, descriptor: int, inode: int
    ) -> _core.ArenaView | None:
        """The arena of a process, which has that file open under that number. ``None``: it cannot be opened.

        By a file of ``/proc``, so neither that process nor the driver is asked."""
        place = slot, incarnation
        known = self._opened.get(place) or self._process.known_arena(slot, incarnation)
        if known is not None:
            return known
        try:
            fd = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except (
            OSError
        ):  # it is dead, or the system has no such directory or does not let us: it is copied
            return None
        try:
            # Its number may be another process's by now, and the descriptor's another file's.
            if os.fstat(fd).st_ino != inode:
                return None
            size, board = self._process.arena_size.file, self._process.board
            view = self._opened[place] = _core.ArenaView(fd, size, board, slot)
        finally:
            os.close(fd)
        if board.gone(
            slot, incarnation
        ):  # meanwhile, and this process may have heard of it already
            self._opened.pop(place, None)
        return view

    def forget_gone(self) -> None:
        """Some processes are dead. Values in their arenas stay as long as they are held."""
        for place in list(self._opened):
            if self._process.board.gone(*place):
                self._opened.pop(place, None)

    def clear(self) -> None:
        """The session is over."""
        self._opened.clear()
