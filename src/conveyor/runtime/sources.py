"""From which processes frames come to this one, by its reading ends of rings."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from conveyor import _core
from conveyor.codec import Reader

if TYPE_CHECKING:
    from conveyor.runtime.cleanup import Cleanup


class _Awaited(NamedTuple):
    writers: tuple[Reader, ...]
    then: Callable[[], object]


class ChannelEnd(Protocol):
    """End of a user's channel."""

    @property
    def pending(self) -> bool:
        """Whether this end reads the frames of a process that is still unknown."""

    def hang_up(self) -> None:
        """Tell the process at the other end that nothing more is done at this one."""


class Sources:
    """Registry of the processes that send frames to one process. It takes no lock: each operation on a
    dictionary is one step.

    Native code removes the traces of an end that is gone, and the work that follows is left to the cleanup
    (``Cleanup.finalizer``): a finalizer in Python would swallow a Ctrl-C that comes in it.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._ends: dict[int, tuple[Reader, weakref.ref[_core.Reader], _core.Finalizer | None]] = {}
        self._pending: dict[int, tuple[weakref.ref[ChannelEnd], _core.Finalizer | None]] = {}
        self._awaited: dict[int, _Awaited] = {}

    def expect(self, end: ChannelEnd) -> None:
        """Note that a process may send to ``end`` from now on. Until it is known which, it may be any."""
        number = next(self._numbers)
        self._pending[number] = weakref.ref(end, partial(self._pending.pop, number)), None

    def note(self, writer: Reader, end: _core.Reader) -> None:
        """Note that ``end`` reads the frames of ``writer``."""
        number = next(self._numbers)
        self._ends[number] = writer, weakref.ref(end, partial(self._ends.pop, number)), None

    def when_dry(
        self, writers: Iterable[Reader], then: Callable[[], object], cleanup: Cleanup
    ) -> None:
        """Have ``then()`` called, on any thread, once nothing that these processes have sent is left to be
        read here. That is now, or as one of ``cleanup`` when the reading ends that have something go. The
        processes are dead, and all frames that were to come have come."""
        self._awaited[next(self._numbers)] = _Awaited(tuple(writers), then)
        self.look()
        if not self._awaited:
            return
        look = partial(_look, weakref.ref(self))
        for number, (writer, end, finalizer) in list(self._ends.items()):
            if finalizer is None and any(
                writer in awaited.writers for awaited in self._awaited.values()
            ):
                self._ends[number] = writer, end, cleanup.finalizer(look)
        for number, (pending, finalizer) in list(self._pending.items()):
            if finalizer is None:
                self._pending[number] = pending, cleanup.finalizer(look)
        self.look()  # one of them may have gone meanwhile

    def look(self) -> None:
        """Look again whether reading ends are empty now, and call whoever waits for that."""
        if not self._awaited:
            return
        for number, (expected, _) in list(self._pending.items()):
            pending = expected()
            if pending is not None and pending.pending:
                return
            self._pending.pop(number, None)
        full = set()
        for number, (writer, reading, _) in list(self._ends.items()):
            end = reading()
            if end is None:
                self._ends.pop(number, None)
            elif not end.dry:
                full.add(writer)
        for number, awaited in list(self._awaited.items()):
            if full.isdisjoint(awaited.writers) and self._awaited.pop(number, None) is not None:
                awaited.then()


def _look(sources: weakref.ref[Sources]) -> None:
    there = sources()
    if there is not None:
        there.look()
