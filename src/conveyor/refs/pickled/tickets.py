"""Tickets: what keeps a ref while a pickle of it is on its way."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

from conveyor.codec import Reader
from conveyor.refs.pickled.exchange import ExportId
from conveyor.runtime.messages.connection import Node

#: Have a process say :class:`~conveyor.refs.pickled.exchange.Dry`, with that number, once it has
#: nothing left of what these have sent.
Ask: TypeAlias = Callable[[Reader, int, tuple[Reader, ...]], object]

#: Whether something that ``maker``, which is dead and was on that host (0: the driver's), has sent may still
#: be on its way to that reader's host. Where it may, :meth:`Orphans.look` is called when that has changed.
Arrives: TypeAlias = Callable[[int, Reader, Reader], bool]


class Orphans:
    """Tickets of dead makers, at the rendezvous: their pickles may never have come to their readers."""

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
        """Begin to ask readers."""
        self._arrives, self._ask = arrives, ask

    def look(self) -> None:
        """Ask the readers whom there is something to ask now: some process has ended."""
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
        """Use up the tickets of a question that is answered: nobody comes with them."""
        with self._lock:
            asked, tickets = self._questions.get(question, (None, ()))
            if asked != reader:
                return
            del self._questions[question]
            for ticket in tickets:
                self._tickets.use(ticket, (reader,))

    def reader_ended(self, reader: Reader) -> None:
        """Forget the questions to a dead reader, which answers nothing. Called with the lock."""
        for number in [n for n, (asked, _) in self._questions.items() if asked == reader]:
            del self._questions[number]


class Maker(Protocol):
    """Process of an actor that has made pickles."""

    #: Slot and incarnation of the process, as others know it.
    reader: Reader
    #: Node of the process, where that is not the driver's.
    node: Node | None
    #: All that it has said was heard.
    ended: bool


#: Pickles of refs that nobody has loaded yet and whose results are kept.
MAX_TICKETS = 10_000


class Tickets:
    """Collection of all tickets. The owner holds a lock while anything is called here."""

    def __init__(
        self, gone: Callable[[int, int], bool], on_used: Callable[[ExportId, int], object]
    ) -> None:
        """``gone(*reader)``: whether one is dead. ``on_used(export, ticket)``: nobody comes with it any
        more."""
        self._gone = gone
        self._on_used = on_used
        self._exports: OrderedDict[int, ExportId] = OrderedDict()
        # Readers that may still come with a ticket, for tickets whose readers are known.
        self._readers: dict[int, set[Reader]] = {}
        # Maker of each ticket whose pickle an actor has made.
        self._makers: dict[int, Maker] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._exports)

    def __iter__(self) -> Iterator[int]:
        return iter(self._exports)

    def add(
        self,
        export: ExportId,
        readers: Sequence[Reader],
        noted: set[int],
        maker: Maker | None = None,
        number: int = 0,
    ) -> int:
        """Create a ticket for these readers (empty: one unknown reader). It is one of ``noted`` first.
        ``maker``: the actor that makes the pickle, which has given it that ``number``."""
        ticket = number or next(self._numbers)
        self._exports[ticket] = export
        noted.add(ticket)
        if readers:
            self._readers[ticket] = set(readers)
            if maker is not None:
                self._makers[ticket] = maker
            # Of a death before this, ``reader_ended`` was told too early; a later one waits for the lock.
            self.use(ticket, [reader for reader in readers if self._gone(*reader)])
        while len(self._exports) > MAX_TICKETS:
            self._end(next(iter(self._exports)))
        return ticket

    def made_by_actors(self) -> Iterator[tuple[int, Maker, set[Reader]]]:
        """Iterate over the tickets of actors with known readers: number, maker, and readers that may still
        come."""
        for ticket, maker in self._makers.items():
            yield ticket, maker, self._readers[ticket]

    def reader_ended(self, reader: Reader) -> None:
        """Use up the tickets of a reader that is dead, for everybody."""
        for ticket in list(self._readers):
            if reader in self._readers.get(ticket, ()):
                self.use(ticket, (reader,))

    def use(self, ticket: int, readers: Iterable[Reader]) -> None:
        """Note that these readers have loaded the pickle, or will not. It may be called for the same reader
        again, for another reason. The same goes for a reader that the pickle was not made for, and that has
        got it from another reader."""
        awaited = self._readers.get(ticket)
        if awaited is not None:
            awaited.difference_update(readers)
            if awaited:
                return
        self._end(ticket)

    def _end(self, ticket: int) -> None:
        self._readers.pop(ticket, None)
        self._makers.pop(ticket, None)
        export = self._exports.pop(ticket, None)
        if export is not None:
            self._on_used(export, ticket)
