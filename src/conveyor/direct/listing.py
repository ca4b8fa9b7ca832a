"""What all processes of the session keep for others.

Every process keeps a directory in its memory (``native/directory.h``), which is read as the values are.
Nobody is asked, so it is told also of a process that computes, or is stopped.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass

from conveyor import _core
from conveyor.direct.permission import let_session_read
from conveyor.runtime import context

_STARTING, _ALIVE = 1, 2

_Number = int
_Slot = int


@dataclass(frozen=True, slots=True)
class KeptObject:
    """A value that stays in the memory of the process that made it, as :func:`conveyor.objects` tells it.

    id: which no other value has, in any process. ``ref.value_id()`` gives it of a reference.
    keeper: the process that keeps it: an actor's name, or ``"driver"``.
    nbytes: of all the memory that others may have.
    transport: the name that was asked for; ``snapshot``: it is a copy that nobody writes to.
    age: seconds since it has been kept.
    route: how this process would get it: ``"here"``, it is the object itself; ``"read"``, from the keeper's
        memory; or the name of another route, of what lies on a device.
    holders: who keeps it from going, in the order of their names: the processes that have a reference to it
        or a call that takes it, those that have passed one on until it has arrived, and those that read it
        where it lies.
    """

    id: str
    keeper: str
    nbytes: int
    transport: str
    snapshot: bool
    age: float
    route: str
    holders: tuple[str, ...]


def objects() -> list[KeptObject]:
    """All values that are kept in the session's processes, this one among them, the oldest first.

    Nobody takes part in it, so it also works while an actor computes. What is kept, or let go of, meanwhile
    may be told or not. Where processes may not read each other's memory no value stays, and only this one's
    are told.
    """
    runtime = context.current()
    process = runtime.process
    let_session_read(runtime.own_actor is None)
    kept: list[tuple[_core.KeptValue, _Slot]] = []
    holders: dict[_Number, set[_Slot]] = {}
    for slot, (values, held, sent) in _directories(process.board, process.slot):
        kept += [(value, slot) for value in values]
        for number in held:
            holders.setdefault(number, set()).add(slot)
        for number, reader, incarnation in sent:
            if not process.board.gone(reader, incarnation):
                holders.setdefault(number, set()).add(reader)
        for number in process.board.announced(slot):
            holders.setdefault(number, set()).add(slot)
    now = _core.monotonic_ns()
    name = process.board.name
    found = []
    for (number, nbytes, since, names), slot in sorted(kept, key=lambda one: one[0][2]):
        # They may be cut off.
        transport, by, snapshot, *_ = [*names.decode(errors="replace").split("\0"), "", ""]
        here = slot == process.slot and not snapshot
        who = tuple(sorted({name(holder) for holder in holders.get(number, ())}))
        found.append(
            KeptObject(
                id_of(number),
                name(slot),
                nbytes,
                transport,
                bool(snapshot),
                max(now - since, 0) / 1e9,
                "here" if here else by or "read",
                who,
            )
        )
    return found


def id_of(number: int) -> str:
    """What a value of that number is called."""
    return f"{number:016x}"


def _directories(board: _core.Board, own: int) -> Iterator[tuple[int, _core.Directory]]:
    """Of each process that lives."""
    for slot in range(board.used):
        incarnation, pid = board.incarnation(slot), board.pid(slot)
        pid = os.getpid() if slot == own else pid
        address = board.directory(slot)
        if not address or not pid or board.condition(slot) not in (_STARTING, _ALIVE):
            continue
        try:
            directory = _core.read_directory(pid, address)
        except OSError as error:
            # It has ended, its memory is another program's by now, or it may not be read.
            if error.errno in (errno.ESRCH, errno.EPERM, errno.EFAULT, errno.EPROTO):
                continue
            raise
        if not board.gone(slot, incarnation):
            yield slot, directory
