"""Process trees, read from /proc: who descends from whom, what they cost, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
_RAY_SEMAPHORE = re.compile(r"sem\.(?:hdr|obj)(\d+)-")


def become_subreaper() -> None:
    """Orphans among our descendants become our children, so that none is lost from sight."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name: state, ppid, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def descendants(root: int) -> list[int]:
    """All living descendants of ``root``, without it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(int(_stat(int(entry))[1]), []).append(int(entry))
    found: list[int] = []
    pending = [root]
    while pending:
        next_ones = children.get(pending.pop(), [])
        found += next_ones
        pending += next_ones
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time of a whole process, all of its threads, to the nanosecond (0 if it is gone)."""
    clock = (~pid << 3) | 2  # clock_getcpuclockid(3): the kernel's name for another process's clock
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0


def tree_cpu_seconds(root: int) -> dict[int, float]:
    """CPU time of every descendant of ``root``."""
    return {pid: cpu_seconds(pid) for pid in descendants(root)}


def cpu_between(before: dict[int, float], after: dict[int, float]) -> float:
    """CPU seconds used between two readings; what processes used that ended since is lost."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def last_core(pid: int) -> int:
    """The core on which the main thread of ``pid`` ran last (-1 if it is gone)."""
    try:
        return int(_stat(pid)[36])
    except OSError:
        return -1


def pss_mib(pid: int) -> float:
    """Proportional set size: private pages plus the process's part of the shared ones."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"no Pss in /proc/{pid}/smaps_rollup")


def remaining_descendants(wait_s: float) -> list[int]:
    """This process's descendants, after those that ended within ``wait_s`` have been reaped."""
    deadline = time.monotonic() + wait_s
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        alive = descendants(os.getpid())
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.01)


def kill_descendants(timeout_s: float = 20.0) -> None:
    """SIGKILL and reap all of this process's descendants. Needs ``become_subreaper``."""
    deadline = time.monotonic() + timeout_s
    while alive := remaining_descendants(0.0):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {alive} do not die")
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def remove_ray_semaphores(since: float) -> int:
    """Remove the named semaphores that killed Ray processes left in /dev/shm since ``since``."""
    removed = 0
    for path in Path("/dev/shm").glob("sem.*"):
        match = _RAY_SEMAPHORE.match(path.name)
        if match is None or Path(f"/proc/{match[1]}").exists():
            continue
        with contextlib.suppress(OSError):
            if path.stat().st_mtime >= since:
                path.unlink()
                removed += 1
    return removed
