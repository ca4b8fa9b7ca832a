"""A call that is here, but for some of its arguments: these have stayed elsewhere, and are on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conveyor import _core
from conveyor.codec.faults import NotThere
from conveyor.direct.awaiting import Attempts
from conveyor.runtime.refs.undecoded import Undecoded


class Arriving:
    """What lets an event loop run on until a call can be decoded."""

    __slots__ = ("_attempts", "_call", "_ready")

    def __init__(self, snapshot: _core.Snapshot) -> None:
        self._call = Undecoded(snapshot)
        self._attempts = Attempts()
        # Of what was missing the last time.
        self._ready: Callable[[], bool] | None = None

    def decode(self) -> Any:
        """The call; ``EMPTY``: something is missing still."""
        if self._ready is not None and not self._ready():
            return _core.EMPTY
        try:
            return self._attempts.of(self._call.decode)
        except NotThere as one:
            self._ready = one.ready
            return _core.EMPTY

    def unfetched(self) -> Any:
        """The call, without what is missing."""
        return self._call.decode(fetches=False)

    def end(self) -> None:
        """It is decoded, or not needed any more."""
        self._attempts.end()
