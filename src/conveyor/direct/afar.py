"""Getting the memory of a value whose keeper is on another host: this process's own host fetches it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, cast

from conveyor import _core
from conveyor.codec.direct import Located
from conveyor.codec.faults import NotThere
from conveyor.direct.awaiting import deferral
from conveyor.direct.under_way import UnderWay
from conveyor.exceptions import RuntimeStateError
from conveyor.runtime.remote_memory import SMALL, Brought, Room, Wanted
from conveyor.runtime.threads import start_or_run
from conveyor.runtime.waiting import wait_until

#: To have memory for values of that size may take longer than a turn of an event loop: what nobody has used
#: takes the system about a millisecond for each MiB.
_LARGE = 1 << 20


def is_afar(where: Located, process: Any) -> bool:
    """Whether a value's keeper is on another host than this process, and lives."""
    board: _core.Board = process.board
    if not board.gone(where.slot, where.incarnation):
        return board.elsewhere(where.slot)
    # It is dead, or of a host that this one has had nothing to do with.
    far = process.far_memory
    return far is not None and bool(far.introduce((where.slot, where.incarnation)))


def fetch_afar(where: Located, process: Any) -> _core.Buffer:
    """Fetch all of the value's memory: its ranges, each aligned, or joined.

    Raises:
        OSError: as reading on one node would.
        NotThere: it has not come yet, and this is for an await.
        RuntimeStateError: this process was forked from one of the session's.
        WaitTimeoutError: the ``get`` that needs it has no longer.
    """
    if process.inbox.inherited:
        raise RuntimeStateError(
            f"a value that {where.keeper} keeps on another host cannot be fetched by a forked child: get it "
            "before the fork"
        )
    wanted = Wanted(
        (where.slot, where.incarnation), where.number, where.anchor, where.ranges, where.joined
    )
    stock = deferral.stock
    if stock is not None:
        coming = cast("_Fetch | None", stock.get(wanted))
        if coming is None:
            coming = stock[wanted] = _Fetch(wanted, process, apart=True)
        if not coming.done():
            raise NotThere(coming.done)
        return coming.memory()
    fetch = _Fetch(wanted, process)
    try:
        wait_until(
            process.inbox,
            fetch.done,
            _core.seconds_to_fetch(),
            lambda: f"a value that {where.keeper} keeps, on another host",
            lambda: "it is being fetched",
        )
    finally:
        fetch.give_up()
    return fetch.memory()


class _Fetch:
    """Fetch of one value's memory from another node, under way or done."""

    def __init__(self, wanted: Wanted, process: Any, apart: bool = False) -> None:
        """``apart``: this thread does nothing that takes time."""
        self._process, self._wanted = process, wanted
        self._brought: Brought | None = None
        self._failed: BaseException | None = None
        self._room: Room | None = None
        self._stop: Callable[[], object] | None = None
        self._given_up = False
        self._size = size = wanted.size
        self._wait = UnderWay(process, wanted.process[0], wanted.number, size)
        try:
            if apart and size >= _LARGE:
                start_or_run(self._begin_apart, "room")
            else:
                self._begin()
        except BaseException:
            self._wait.end()
            raise

    def _begin(self) -> None:
        process = self._process
        # It is written to until `tell` is called, which has this.
        self._room = None if self._size < SMALL else Room(process.arena, self._size)
        self._stop = stop = process.far_memory.fetch(self._wanted, self._room, self._tell)
        if self._given_up:  # before this was known
            stop()

    def _begin_apart(self) -> None:
        try:
            if not self._given_up:
                self._begin()
        except BaseException as error:
            self._failed = error
            self._wait.end()
            self._process.ring()

    def _tell(self, brought: Brought) -> None:
        self._brought = brought
        self._wait.end()
        self._process.ring()

    def done(self) -> bool:
        """Whether the memory has come, or never will."""
        if self._brought is not None or self._failed is not None:
            return True
        gone: bool = self._process.board.gone(*self._wanted.process)
        return gone

    def memory(self) -> _core.Buffer:
        """Return the memory that has come. Raises ``OSError`` if it never will, as reading on one node would
        raise it."""
        brought = self._brought
        if self._failed is not None:
            raise self._failed
        if brought is None:
            raise ProcessLookupError(errno.ESRCH, "its keeper has died")
        if brought.error:
            raise OSError(brought.error, brought.why)
        if self._room is not None:
            return self._room.memory()
        memory = _core.Buffer.own(len(brought.data or b""))
        memoryview(memory)[:] = brought.data or b""
        return memory

    def give_up(self) -> None:
        """Stop the fetch, if the memory has not come yet: nobody waits for it any more."""
        self._wait.end()
        self._given_up = True
        if self._brought is None and self._stop is not None:
            self._stop()


def split(where: Located, memory: _core.Buffer) -> list[_core.Buffer]:
    """A buffer for each of the value's ranges, or one for all if they are joined."""
    if where.joined:
        return [memory]
    found, at = [], 0
    for length in _core.lengths_of(where.ranges):
        found.append(memory.part(at, length))
        at += length + 63 & ~63
    return found
