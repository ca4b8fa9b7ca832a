"""From which processes frames come to this one, by its reading ends of rings."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol

from conveyor import _core
from conveyor.codec import Reader


class _Awaited(NamedTuple):
    writers: tuple[Reader, ...]
    then: Callable[[], object]


class Unmet(Protocol):
    """What will read from a process of which this one does not know yet."""

    @property
    def unmet(self) -> bool:
        """Whether that is so still."""


class Sources:
    """Of one process. Takes no lock: each operation on a dictionary is one step, and finalizers come here."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._ends: dict[int, tuple[Reader, weakref.ref[_core.Reader]]] = {}
        self._unmet: dict[int, weakref.ref[Unmet]] = {}
        self._awaited: dict[int, _Awaited] = {}

    def expect(self, end: Unmet) -> None:
        """Somebody may send to ``end`` from now on, and until it is known who, anybody may have."""
        number = next(self._numbers)
        self._unmet[number] = weakref.ref(end, partial(self._met, number))

    def note(self, writer: Reader, end: _core.Reader) -> None:
        """``end`` reads what ``writer`` sends."""
        number = next(self._numbers)
        self._ends[number] = writer, weakref.ref(end, partial(self._ended, number))

    def when_dry(self, writers: Iterable[Reader], then: Callable[[], object]) -> None:
        """Have ``then()`` called, on any thread and maybe by a finalizer, once nothing that these processes
        have sent is left to be read here: now, or when the reading ends go that have something. They are
        dead, and what was to come has come."""
        self._awaited[next(self._numbers)] = _Awaited(tuple(writers), then)
        self.look()

    def look(self) -> None:
        """A reading end may have nothing any more."""
        if not self._awaited:
            return
        for number, expected in list(self._unmet.items()):
            unmet = expected()
            if unmet is not None and unmet.unmet:
                return
            self._unmet.pop(number, None)
        ends = [(writer, end()) for writer, end in list(self._ends.values())]
        full = {writer for writer, end in ends if end is not None and not end.dry}
        for number, awaited in list(self._awaited.items()):
            if full.isdisjoint(awaited.writers) and self._awaited.pop(number, None) is not None:
                awaited.then()

    def _met(self, number: int, _end: object) -> None:
        self._unmet.pop(number, None)
        self.look()

    def _ended(self, number: int, _end: object) -> None:
        self._ends.pop(number, None)
        self.look()
