"""The ends of channels that this process has."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from conveyor.runtime.meeting import Side

EndT = TypeVar("EndT")

Key = tuple[str, int, Side]
"""An end: the session, the number of the channel, and the side."""


class PresentEnds(Generic[EndT]):
    """Table of the ends of channels in this process, by key, so that an end that comes again is the same
    object.

    The maker of an end enters it, and the end's finalizer takes it out. An end that was not entered, since
    another was there already, or that another has replaced, belongs to nobody: it does not announce its own
    end. No lock is taken, since ends come and go in finalizers and signal handlers, too. Each step on the
    table is one operation of a dictionary instead, and is repeated if another one has come between.
    """

    def __init__(self) -> None:
        self._refs: dict[Key, weakref.ref[EndT]] = {}

    def all(self) -> list[EndT]:
        """The ends that this process has."""
        found = [ref() for ref in list(self._refs.values())]
        return [end for end in found if end is not None]

    def find(self, key: Key) -> EndT | None:
        """Return the end with that key, if this process has it."""
        ref = self._refs.get(key)
        return None if ref is None else ref()

    def enter(self, key: Key, own: weakref.ref[EndT]) -> EndT | None:
        """Enter an end and return ``None``, or return the end that is there already and stays."""
        while True:
            known = self._refs.setdefault(key, own)
            if known is own:
                return None
            end = known()
            if end is not None:
                return end
            self.leave(key, known)  # it is garbage, and its finalizer has not run yet

    def leave(self, key: Key, own: weakref.ref[EndT]) -> bool:
        """Take an end out; false if it is not there."""
        if self._refs.get(key) is not own:
            return False
        found = self._refs.pop(key, None)
        if found is not None and found is not own:  # it has been replaced just now
            self._refs.setdefault(key, found)
        return found is own
