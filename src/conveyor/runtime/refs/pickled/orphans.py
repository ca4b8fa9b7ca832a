"""Pickles of refs whose maker is dead, and which may never have come to their readers.

A frame that a process was writing when it died, or that was on its way from a host that is lost, is nobody's:
its readers never see it, and so neither load what it claims nor give it up. Only a reader knows what has come
to it. So it is asked, once nothing new can come to it any more, and answers when it has nothing left of what
has: whatever of its tickets is there then stands for a frame that never came.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TypeAlias

from conveyor.codec import Reader
from conveyor.runtime.refs.pickled.tickets import Tickets

#: Have a process say :class:`~conveyor.runtime.refs.pickled.exchange.Dry`, with that number, once it has
#: nothing left of what these have sent.
Ask: TypeAlias = Callable[[Reader, int, tuple[Reader, ...]], object]

#: Whether something that ``maker``, which is dead and was on that host (0: the driver's), has sent may still
#: be on its way to that reader's host. Where it may, :meth:`Orphans.look` is called when that has changed.
Arrives: TypeAlias = Callable[[int, Reader, Reader], bool]


class Orphans:
    """The rendezvous's."""

    def __init__(
        self, tickets: Tickets, lock: threading.RLock, gone: Callable[[int, int], bool]
    ) -> None:
        """``lock``: of all that has to do with the tickets. ``gone(*process)``: whether one is dead."""
        self._tickets, self._lock, self._gone = tickets, lock, gone
        self._ask: Ask | None = None
        self._arrives: Arrives = lambda _host, _maker, _reader: True
        self._questions: dict[int, tuple[Reader, set[int]]] = {}
        self._numbers = itertools.count(1)

    def begin(self, arrives: Arrives, ask: Ask) -> None:
        """From now on readers are asked."""
        self._arrives, self._ask = arrives, ask

    def look(self) -> None:
        """Something has ended: ask those whom there is something to ask now."""
        if self._ask is None:
            return
        with self._lock:
            found = self._new()
        for reader, (number, makers) in found.items():
            self._ask(reader, number, tuple(makers))

    def _new(self) -> dict[Reader, tuple[int, set[Reader]]]:
        asked = {(reader, one) for reader, ones in self._questions.values() for one in ones}
        tickets: dict[Reader, set[int]] = {}
        makers: dict[Reader, set[Reader]] = {}
        for ticket, maker, readers in self._tickets.made_by_actors():
            if not (maker.ended and self._gone(*maker.reader)):
                continue
            host = 0 if maker.node is None else maker.node.number
            for reader in readers:
                if (reader, ticket) in asked or self._arrives(host, maker.reader, reader):
                    continue
                tickets.setdefault(reader, set()).add(ticket)
                makers.setdefault(reader, set()).add(maker.reader)
        found = {}
        for reader, these in tickets.items():
            number = next(self._numbers)
            self._questions[number] = reader, these
            found[reader] = number, makers[reader]
        return found

    def settle(self, question: int, reader: Reader) -> None:
        """The answer has come: nobody comes with these tickets."""
        with self._lock:
            asked, tickets = self._questions.get(question, (None, ()))
            if asked != reader:
                return
            del self._questions[question]
            for ticket in tickets:
                self._tickets.use(ticket, (reader,))

    def reader_ended(self, reader: Reader) -> None:
        """With the lock: it is dead, and answers nothing."""
        for number in [n for n, (asked, _) in self._questions.items() if asked == reader]:
            del self._questions[number]
