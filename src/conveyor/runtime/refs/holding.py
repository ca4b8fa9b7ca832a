"""What is sent for a ref, where that is not just what it has received."""

from __future__ import annotations

from typing import Any

from conveyor import _core


class Holding:
    """As an argument, what a ref has received, whose value refers to other refs, or is kept elsewhere for
    this one: it is encoded later, and until then that ref may be garbage to everybody else."""

    __slots__ = ("ref", "snapshot")

    def __init__(self, ref: Any, snapshot: _core.Snapshot) -> None:
        self.ref = ref
        self.snapshot = snapshot

    def __reduce__(self) -> Any:
        return same, (self.snapshot,)


def same(value: Any) -> Any:
    """In a pickle: what stands there for something else."""
    return value
