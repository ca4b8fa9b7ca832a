"""Memory limit of this process: by the machine, and by each control group that it is in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress


def memory_limit(root: str = "/") -> int:
    """Return the memory limit in bytes: the least of the machine's memory and the limits of the process's
    memory groups and of those around them, whichever version they are. ``root``: where ``proc`` and ``sys``
    are."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in memory_groups(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError):
                text = read_text(os.path.join(group, name)).strip()
                if text.isdigit():  # else "max"
                    limits.append(int(text))
    return min(limits)


def memory_groups(root: str) -> Iterator[str]:
    """The folders of this process's memory groups, from the innermost to the outermost."""
    try:
        lines = read_text(os.path.join(root, "proc/self/cgroup")).splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = os.path.join(root, "sys/fs/cgroup")
        elif "memory" in controllers.split(","):
            top = os.path.join(root, "sys/fs/cgroup/memory")
        else:
            continue
        # In a container the path may be the host's, or lead out of what can be seen from here ("/../x"):
        # what is not there has no files, and the container's own group is at the top.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for inner in range(len(parts), -1, -1):
            yield os.path.join(top, *parts[:inner])


def read_text(path: str) -> str:
    """Read a small file. (``pathlib``, which would do it, is slow to import.)"""
    with open(path, encoding="utf-8") as file:
        return file.read()
