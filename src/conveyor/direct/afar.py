"""Getting the memory of a value whose keeper is on another host: this process's own host fetches it."""

from __future__ import annotations

import errno
from typing import Any

from conveyor import _core
from conveyor.codec.direct import Located
from conveyor.exceptions import RuntimeStateError
from conveyor.runtime.far_memory import Brought, Wanted
from conveyor.runtime.waiting.patience import wait_until


def is_afar(where: Located, process: Any) -> bool:
    """Whether a value's keeper is on another host than this process, and lives."""
    board: _core.Board = process.board
    if not board.gone(where.slot, where.incarnation):
        return board.elsewhere(where.slot)
    # It is dead, or of a host that this one has had nothing to do with.
    far = process.far_memory
    return far is not None and bool(far.introduce((where.slot, where.incarnation)))


def fetch_afar(where: Located, process: Any) -> _core.Buffer:
    """All of the value's memory: its ranges, each aligned, or joined.

    Raises:
        OSError: as reading on one host would.
        RuntimeStateError: this process was forked from one of the session's.
        WaitTimeoutError: the ``get`` that needs it has no longer.
    """
    if process.inbox.inherited:
        raise RuntimeStateError(
            f"a value that {where.keeper} keeps on another host cannot be fetched by a forked child: get it "
            "before the fork"
        )
    board: _core.Board = process.board
    came: list[Brought] = []

    def tell(brought: Brought) -> None:
        came.append(brought)
        process.ring()

    def died() -> bool:
        return board.gone(where.slot, where.incarnation)

    place = where.slot, where.incarnation
    process.far_memory.fetch(
        Wanted(place, where.number, where.anchor, where.ranges, where.joined), tell
    )
    board.note_fetch(process.slot, where.slot)
    try:
        wait_until(
            process.inbox,
            lambda: bool(came) or died(),
            _core.seconds_to_fetch(),
            lambda: f"a value that {where.keeper} keeps, on another host",
            lambda: "it is being fetched",
        )
    finally:
        board.note_fetch(process.slot, -1)
    if not came:
        raise ProcessLookupError(errno.ESRCH, "its keeper has died")
    brought = came[0]
    if brought.error or brought.memory is None:
        raise OSError(brought.error, brought.why)
    return brought.memory


def split(where: Located, memory: _core.Buffer) -> list[_core.Buffer]:
    """A buffer for each of the value's ranges, or one for all if they are joined."""
    if where.joined:
        return [memory]
    found, at = [], 0
    for length in _core.lengths_of(where.ranges):
        found.append(memory.part(at, length))
        at += length + 63 & ~63
    return found
