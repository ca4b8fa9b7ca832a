"""A value that is to stay."""

from __future__ import annotations

from typing import Any


class Direct:
    """A value that is to stay here.

    transport: the name that was asked for, ``"auto"`` among them. One that a user has registered moves
    what it is for; any other is only told.
    snapshot: it stays as it is now, in a copy.
    """

    __slots__ = ("snapshot", "transport", "value")

    def __init__(self, value: Any, transport: str, snapshot: bool = False) -> None:
        self.value = value
        self.transport = transport
        self.snapshot = snapshot
