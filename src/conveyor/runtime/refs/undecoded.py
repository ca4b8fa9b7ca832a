"""What was received, and is decoded when it is needed."""

from __future__ import annotations

from typing import Any

from conveyor import _core
from conveyor.codec import claims


class Undecoded:
    """A value of which something may have to be fetched from where it has stayed. It holds what it refers
    to. What :meth:`decode` raises may be tried again; what it has given once it is not asked for again."""

    __slots__ = ("_refs", "_snapshot")

    def __init__(self, snapshot: _core.Snapshot) -> None:
        self._snapshot = snapshot
        self._refs = claims.take(snapshot.meta) if snapshot.has_refs else ()

    def decode(self, fetches: bool = True) -> Any:
        """The value. Not ``fetches``: with what stands for a value (``Unfetched``) where one has stayed."""
        return self._snapshot.decode(fetches)
