"""Whether a process that was killed was killed by the kernel, for want of memory."""

from __future__ import annotations

import os
import re
from contextlib import suppress

from conveyor.runtime.memory_limit import memory_groups, read_text

_RECORD_BYTES = 8192  # the kernel's log gives one record for each read, none is longer


class MemoryKills:
    """Tells the out-of-memory killer's victims from others that ended by SIGKILL.

    The kernel's own log names its victims, where it may be read. Otherwise its counters are compared
    with what they were: of this process's memory cgroup, and of the machine.
    """

    def __init__(self, root: str = "/") -> None:
        """``root``: where ``proc``, ``sys`` and ``dev`` are."""
        self._root = root
        self._counter = _cgroup_counter(self._root)
        self._in_cgroup = self._read_cgroup()
        self._on_machine = self._read_machine()

    def killed(self, pid: int) -> bool | None:
        """Whether ``pid``, which has ended by SIGKILL, was a victim; ``None``: it may have been."""
        in_cgroup, on_machine = self._read_cgroup(), self._read_machine()
        if on_machine is not None and on_machine == self._on_machine:
            return False
        more = in_cgroup is not None and self._in_cgroup is not None and in_cgroup > self._in_cgroup
        if not more and not self._logged(pid):
            return None
        # One kill explains one end; others may still have to be explained.
        if self._on_machine is not None:
            self._on_machine += 1
        if more and self._in_cgroup is not None:
            self._in_cgroup += 1
        return True

    def _read_cgroup(self) -> int | None:
        return None if self._counter is None else _count(self._counter)

    def _read_machine(self) -> int | None:
        return _count(os.path.join(self._root, "proc/vmstat"))

    def _logged(self, pid: int) -> bool:
        found = False
        with suppress(OSError):
            log = os.path.join(self._root, "dev/kmsg")
            fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                name = re.compile(rb"[Kk]illed process %d[ ,(]" % pid)
                while not found:
                    try:
                        record = os.read(fd, _RECORD_BYTES)
                    except BrokenPipeError:  # records were overwritten meanwhile
                        continue
                    if not record:
                        break
                    found = name.search(record) is not None
            finally:
                os.close(fd)
        return found


def _count(path: str) -> int | None:
    with suppress(OSError, ValueError):
        for line in read_text(path).splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _cgroup_counter(root: str) -> str | None:
    """The file that counts the kills in this process's memory cgroup."""
    for group in memory_groups(root):
        for name in ("memory.events", "memory.oom_control"):
            counter = os.path.join(group, name)
            if _count(counter) is not None:
                return counter
    return None
