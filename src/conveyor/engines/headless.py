"""Actors whose main thread is gone: whether their process ends with it, and its end if it does not.

The kernel tells of the end of a thread slightly before it tells of the end of the process. A process
that dies is left to it: it may dump core, or have much memory to free. But the main thread may also have
ended alone (``pthread_exit``), or have become another program's (``os.exec*``). Such a process is no actor
any more and may live for ever, and so it is killed.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

#: Seconds after which a thread that dies has at least begun to, so that one that has not goes on. Asked
#: only where the first look cannot tell.
EXIT_DELAY = 0.5
#: How often all threads are looked at, while some of them vanish meanwhile.
_MAX_SCANS = 10

_PF_EXITING = 0x4  # a thread that has begun to end: see the kernel's sched.h
_PENDING_KILL = 1 << (signal.SIGKILL - 1)


class Headless:
    """Actors whose main thread is gone, as the process that reaps them knows them. Processes are known by
    their pidfds."""

    def __init__(self) -> None:
        self._unclear: dict[int, tuple[int, float]] = {}  # pidfd -> pid, and when to look again
        self._killed: set[int] = set()

    def look(self, pidfd: int, pid: int) -> None:
        """Handle the news that the main thread of ``pid``, which is not reaped yet, is gone."""
        if pidfd in self._killed or pidfd in self._unclear:
            return
        found = goes_on(pid)
        if found is None:
            self._unclear[pidfd] = pid, time.monotonic() + EXIT_DELAY
        elif found:
            self._kill(pidfd)

    def due(self) -> float | None:
        """Milliseconds until :meth:`look_again` has something to do. ``None``: nothing."""
        if not self._unclear:
            return None
        first = min(when for _, when in self._unclear.values())
        return max((first - time.monotonic()) * 1000, 0.0)

    def look_again(self) -> None:
        """Look again at the processes that were unclear and have had their time."""
        now = time.monotonic()
        for pidfd, (pid, when) in list(self._unclear.items()):
            if when <= now:
                del self._unclear[pidfd]
                if goes_on(pid) is not False:
                    self._kill(pidfd)

    def forget(self, pidfd: int, status: int) -> bool:
        """Forget a process that has ended with ``status``. Returns whether it was killed here."""
        self._unclear.pop(pidfd, None)
        killed = pidfd in self._killed
        self._killed.discard(pidfd)
        # The kernel drops a SIGKILL to a process that was ending anyway: its own end is reported then.
        return killed and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL

    def _kill(self, pidfd: int) -> None:
        # Refused where it has become a program of another user's (sudo): it ends when that one does.
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            self._killed.add(pidfd)


def goes_on(pid: int) -> bool | None:
    """Whether process ``pid``, whose main thread was said to be gone, goes on. ``None``: not to be told yet.

    A process that ends as a whole has SIGKILL pending in every thread before any of them ends, and then
    each of them begins to end. So one thread that sleeps with neither goes on.
    """
    for _ in range(_MAX_SCANS):
        try:
            if b"\nCoreDumping:\t1" in _read(f"/proc/{pid}/status"):
                return False
            threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
        except OSError:  # a zombie, or there is no /proc: nothing can be said, and nothing is done
            return False
        unclear = vanished = False
        for thread in threads:
            try:
                state, exiting, pending = _look(pid, thread)
            except OSError:
                # The thread has just ended, or it has got the number of the main thread, which was looked at
                # before.
                vanished = True
                continue
            if exiting or pending:
                continue
            # The main thread that is not ending has lost the life word in another way: by an exec.
            if thread == pid or state == b"S":
                return True
            unclear = True
        if not vanished:
            return None if unclear else False
    return None


def _look(pid: int, thread: int) -> tuple[bytes, bool, bool]:
    """Return the state of a thread, whether it is ending, and whether a SIGKILL is to end it."""
    # In this order: a thread that takes its SIGKILL meanwhile does not sleep any more.
    pending = 0
    for line in _read(f"/proc/{pid}/task/{thread}/status").splitlines():
        if line.startswith(b"SigPnd:"):
            pending = int(line.split()[1], 16)
    fields = _read(f"/proc/{pid}/task/{thread}/stat").rpartition(b")")[2].split()
    state, flags = fields[0], int(fields[6])
    exiting = state in (b"Z", b"X") or bool(flags & _PF_EXITING)
    return state, exiting, bool(pending & _PENDING_KILL)


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()
