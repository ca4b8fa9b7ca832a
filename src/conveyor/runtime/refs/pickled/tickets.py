"""Tickets: what keeps a ref while a pickle of it is on its way."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from conveyor.codec import Reader
from conveyor.runtime.messages.connection import Node
from conveyor.runtime.refs.pickled.exchange import ExportId


class Maker(Protocol):
    """An actor's process that has made pickles."""

    #: As others know it.
    reader: Reader
    #: Its host, where that is not the driver's.
    node: Node | None
    #: All that it has said was heard.
    ended: bool


#: Pickles of refs that nobody has loaded yet and whose results are kept.
MAX_TICKETS = 10_000


class Tickets:
    """All that there are. Whoever has them holds a lock while anything is called here."""

    def __init__(
        self, gone: Callable[[int, int], bool], on_used: Callable[[ExportId, int], object]
    ) -> None:
        """``gone(*reader)``: whether one is dead. ``on_used(export, ticket)``: nobody comes with it any
        more."""
        self._gone = gone
        self._on_used = on_used
        self._exports: OrderedDict[int, ExportId] = OrderedDict()
        # Of tickets whose readers are known: those that may still come with it.
        self._readers: dict[int, set[Reader]] = {}
        # Of those whose pickle an actor has made: which one.
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
        """A new one, for these; none: for one that is not known. It is one of ``noted`` first. ``maker``: the
        actor that makes the pickle, which has given it that ``number``."""
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
        """Those with known readers, of actors: with who may still come."""
        for ticket, maker in self._makers.items():
            yield ticket, maker, self._readers[ticket]

    def reader_ended(self, reader: Reader) -> None:
        """It is dead, for everybody."""
        for ticket in list(self._readers):
            if reader in self._readers.get(ticket, ()):
                self.use(ticket, (reader,))

    def use(self, ticket: int, readers: Iterable[Reader]) -> None:
        """These have loaded it, or will not. May be said of the same reader again, for another reason, and
        of one that it was not made for, which has got the pickle from another reader."""
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
