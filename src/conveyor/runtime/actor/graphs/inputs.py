"""Inputs of graphs' steps, on an event loop, that have stayed elsewhere: the loop runs on while they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.later import import_later
from conveyor.runtime.actor.unwanted import Unwanted, until

if TYPE_CHECKING:
    from conveyor.runtime.actor.calls.arriving import Arriving


class Inputs:
    """The inputs of one program, which waits for one at a time."""

    def __init__(self, program: _core.Program, limits: _core.Limits) -> None:
        self._program, self._limits = program, limits
        self._arriving: Arriving | None = None

    @property
    def awaited(self) -> bool:
        """Whether the program waits for one."""
        return self._arriving is not None

    def begin(self, snapshot: _core.Snapshot) -> object:
        """The program needs what this is of."""
        module = import_later("conveyor.runtime.actor.calls.arriving")
        self._arriving = module.Arriving(snapshot)
        return self._arriving

    def take(self) -> Any:
        """The value; ``NotImplemented`` if it has not come yet.

        Raises:
            Unwanted: nobody waits for the execution any more.
        """
        assert self._arriving is not None
        try:
            if until(self._limits, self._program.execution) < 0:
                raise Unwanted("nobody waits any more for an input that has not come")
            value = self._arriving.decode()
        except BaseException:
            self.close()
            raise
        if value is _core.EMPTY:
            return NotImplemented
        self.close()
        return value

    def close(self) -> None:
        """None is needed any more."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.end()
