"""Permission for the processes of a session to read each other's memory.

The system may forbid it: to all (a filter of system calls), but to a process's parents (Yama), or to who
is in another user namespace. Then values do not stay where they were made: they travel in shared memory,
as any other.
"""

from __future__ import annotations

import os
from contextlib import suppress

from conveyor import _core

_YAMA = "/proc/sys/kernel/yama/ptrace_scope"

#: The process that was asked for, and the answer. A forked child asks again.
_known: tuple[int, bool] | None = None


def let_session_read(is_driver: bool) -> bool:
    """Let all processes of the session read this one's memory. Returns whether they can.

    An actor asks whether it may read the fork server, which is to it as it is to another actor.
    """
    global _known
    pid = os.getpid()
    if _known is None or _known[0] != pid:
        # All actors descend from the fork server, which descends from the driver.
        family = pid if is_driver else os.getppid()
        _core.let_read(family)
        _known = pid, _core.may_read(family) and not (is_driver and _is_forbidden())
    return _known[1]


def _is_forbidden() -> bool:
    """Whether only an administrator's processes may read others. The driver has no process to try it on
    that is to it as its actors are."""
    with suppress(OSError, ValueError), open(_YAMA) as file:
        return int(file.read()) >= 2 and not _core.may_read(1)
    return False
