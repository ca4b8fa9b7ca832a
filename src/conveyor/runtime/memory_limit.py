"""How much memory this process may use: by the machine, and by each control group that it is in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["memory_groups", "memory_limit"]


def memory_limit(root: str | Path = "/") -> int:
    """In bytes: the least of the machine's memory and the limits of the process's memory groups and of
    those around them, whichever version they are. ``root``: where ``proc`` and ``sys`` are."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in memory_groups(Path(root)):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError):
                text = (group / name).read_text().strip()
                if text.isdigit():  # else "max"
                    limits.append(int(text))
    return min(limits)


def memory_groups(root: Path) -> Iterator[Path]:
    """The folders of this process's memory groups, from the innermost to the outermost."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        # In a container the path may be the host's, or lead out of what can be seen from here ("/../x"):
        # what is not there has no files, and the container's own group is at the top.
        group = Path(*[part for part in path.split("/") if part not in ("", "..")])
        yield top / group
        for parent in group.parents:
            if parent != group:
                yield top / parent
