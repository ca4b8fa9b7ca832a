"""Questions to readers about tickets of pickles that may never have come to them: see
:mod:`conveyor.refs.pickled.tickets`."""

from __future__ import annotations

import itertools
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from conveyor.codec import Reader
from conveyor.driver.processes.far_hosts import FarHosts
from conveyor.driver.processes.table import Table
from conveyor.exceptions import ConveyorError
from conveyor.futures import Future
from conveyor.refs.pickled.tickets import Orphans
from conveyor.runtime.chores import Chores
from conveyor.runtime.process import Process
from conveyor.runtime.waiting.inquiry import Frames
from conveyor.worker.orders import Settle

#: The process that is dead, its host, and the number of that of readers.
_Way: TypeAlias = "tuple[Reader, int, int]"


class Arrivals:
    """Knowledge of whether the last frames of dead processes have come to other nodes. From a lost node
    nothing comes any more to those that have given it up. From a living node everything comes in the end: it
    counts the frames that are due, once, and the other node tells when they are there.

    All tickets of a maker are known when that is asked, since everything that it had said was heard. So its
    readers are asked for all of them when the answer is there, and nothing has to be kept after that.
    """

    def __init__(self, orphans: Orphans, abroad: FarHosts, chores: Chores) -> None:
        self._orphans, self._abroad, self._chores = orphans, abroad, chores
        #: Ways that are being asked about, with the number of the question.
        self._asked: dict[_Way, int] = {}
        #: Ways on which everything has come, while readers are asked because of that.
        self._come: set[_Way] = set()
        self._numbers = itertools.count(1)

    def pending(self, host: int, maker: Reader, reader: Reader) -> bool:
        """Return whether frames may still come; see :data:`conveyor.refs.pickled.tickets.Arrives`."""
        to = self._abroad.host_of(reader[0])
        way = maker, host, to
        if not self._abroad.comes(host, to) or way in self._come:
            return False
        # If the node is lost, the other one tells when it has given it up.
        if way not in self._asked and not self._abroad.is_lost(host):
            self._asked[way] = number = next(self._numbers)
            self._chores.soon(partial(self._ask, way, number))  # the tickets' lock is held here
        return True

    def _ask(self, way: _Way, number: int) -> None:
        _, host, to = way
        due = self._abroad.looks.due(host, to)
        due.add_done_callback(partial(self._counted, way, number))

    def _counted(self, way: _Way, number: int, due: Future[Frames]) -> None:
        _, host, to = way
        if due.exception() is not None:
            self._end(number)  # the maker's host is being given up, or the session over
        elif not due.result():
            self.come(number)
        else:
            # `end` is called if the readers' node is being given up, or the session is over.
            come, end = partial(self.come, number), partial(self._end, number)
            self._abroad.looks.when_come(to, host, due.result(), come, end)

    def _ways(self, number: int) -> list[_Way]:
        """Return the way that a question is about; empty if it was given up meanwhile."""
        return [way for way, asked in list(self._asked.items()) if asked == number]

    def _end(self, number: int) -> None:
        for way in self._ways(number):
            self._asked.pop(way, None)

    def come(self, number: int) -> None:
        """Have the readers asked: all frames of question ``number`` are there, or do not come any more."""
        for way in self._ways(number):
            self._come.add(way)  # first: else another thread might ask again
            try:
                self._end(number)
                self._orphans.look()
            finally:
                self._come.discard(way)

    def given_up(self) -> None:
        """Give up the questions that nobody answers any more: a node is lost, or another node has given it
        up."""
        for way, number in list(self._asked.items()):
            _, host, to = way
            if self._abroad.is_lost(to) or not self._abroad.comes(host, to):
                self._end(number)
        self._orphans.look()


def ask_readers(
    orphans: Orphans, table: Table, abroad: FarHosts, process: Process, chores: Chores
) -> None:
    """Have readers asked from now on. ``process``: the driver's, which is one of them."""

    def ask(reader: Reader, question: int, writers: tuple[Reader, ...]) -> None:
        if reader == process.identity:
            settle = partial(orphans.settle, question, reader)
            process.sources.when_dry(writers, lambda: chores.soon(settle), chores)
            return
        for record in table:
            if record.reader == reader:
                with suppress(ConveyorError):  # it is dead, which is told on another way
                    record.order(Settle(question, writers))

    arrivals = Arrivals(orphans, abroad, chores)
    orphans.begin(arrivals.pending, ask)
    abroad.on_given_up = arrivals.given_up
