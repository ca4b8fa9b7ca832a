"""Stored values of the processes of one node, read from the directories in their memory
(``native/directory.h``): nobody is asked."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from msgspec import Struct

from conveyor import _core

_STARTING, _ALIVE = 1, 2


class StoreSnapshot(Struct, frozen=True):
    """Object store of one process, with the names of all processes concerned.

    values: number, bytes, age in nanoseconds, and the names that ``direct.store`` has noted of each.
    held: the numbers of the values whose frames this process has and made itself, and of the values that it
    reads where they lie.
    sent: number and holder of each value whose frames this process has sent, and whose holder has not let go
    of it.
    """

    holder: str
    slot: int
    values: Sequence[tuple[int, int, int, bytes]]
    held: Sequence[int]
    sent: Sequence[tuple[int, str]]


def stores_on(process_table: _core.ProcessTable, own: int | None) -> list[StoreSnapshot]:
    """List the stored values of each living process of this node. ``own``: the slot of this process, if it
    has any."""
    found = []
    for slot in range(process_table.used):
        incarnation, pid = process_table.incarnation(slot), process_table.pid(slot)
        pid = os.getpid() if slot == own else pid
        address = process_table.directory(slot)
        here = not process_table.is_remote(slot) and process_table.condition(slot) in (
            _STARTING,
            _ALIVE,
        )
        if not address or not pid or not here:
            continue
        try:
            values, held, sent = _core.read_directory(pid, address)
        except OSError as error:
            # It has ended, its memory is another program's by now, or it may not be read.
            if error.errno in (errno.ESRCH, errno.EPERM, errno.EFAULT, errno.EPROTO):
                continue
            raise
        if process_table.gone(slot, incarnation):
            continue
        now, name = _core.monotonic_ns(), process_table.name
        aged = [(number, size, max(now - since, 0), names) for number, size, since, names in values]
        holders = [
            (number, name(reader))
            for number, reader, which in sent
            if not process_table.gone(reader, which)
        ]
        reading = [*held, *process_table.announced(slot)]
        found.append(StoreSnapshot(name(slot), slot, aged, reading, holders))
    return found


def others_have_values(process_table: _core.ProcessTable, own: int) -> bool:
    """Whether another living process has references to values that this process, of slot ``own``, keeps. The
    doorbell rings when one has let go of them."""
    address = process_table.directory(own)
    if not address:
        return False
    try:
        _, _, sent = _core.read_directory(os.getpid(), address)
    except OSError:  # where no memory may be read nothing stays
        return False
    return any(reader != own and not process_table.gone(reader, which) for _, reader, which in sent)
