"""Object to send for a ref, where the received value alone would not do."""

from __future__ import annotations

from typing import Any

from conveyor import _core


class Holding:
    """Received value of a ref as an argument, for a value that refers to other refs, or is kept elsewhere
    for this one. It is encoded later; until then the ref may be garbage to everybody else."""

    __slots__ = ("ref", "snapshot")

    def __init__(self, ref: Any, snapshot: _core.Snapshot) -> None:
        self.ref = ref
        self.snapshot = snapshot

    def __reduce__(self) -> Any:
        return same, (self.snapshot,)


def same(value: Any) -> Any:
    """Return ``value``: a pickle calls this to put one object in the place of another."""
    return value
