"""How readers are asked for tickets of pickles that may never have come to them: see
:mod:`conveyor.runtime.refs.orphans`."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from conveyor.codec import Reader
from conveyor.exceptions import ConveyorError, SystemLimitError
from conveyor.runtime import threads
from conveyor.runtime.actor.orders import Settle
from conveyor.runtime.chores import Chores
from conveyor.runtime.driver.processes.far_hosts import FarHosts
from conveyor.runtime.driver.processes.table import Table
from conveyor.runtime.process import Process
from conveyor.runtime.refs.orphans import Orphans
from conveyor.runtime.waiting.inquiry import LookAtWaits

#: Seconds before it is asked again whether something has come: at first, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.5


class Arrivals:
    """Whether what the dead had sent has come to other hosts. From a lost host nothing comes any more to
    those that have given it up; from one that lives everything comes in the end, and the two are asked."""

    def __init__(self, orphans: Orphans, abroad: FarHosts) -> None:
        self._orphans, self._abroad = orphans, abroad
        # By the dead process and the number of a host: those that are being asked, and where all has come.
        self._asked: set[tuple[Reader, int]] = set()
        self._all_there: set[tuple[Reader, int]] = set()

    def pending(self, host: int, maker: Reader, reader: Reader) -> bool:
        """See :data:`conveyor.runtime.refs.orphans.Arrives`."""
        own = self._abroad.host_of(reader[0])
        one = maker, own
        if not self._abroad.arrives(host, reader) or one in self._all_there:
            return False
        if one not in self._asked and not self._abroad.is_lost(host):
            self._asked.add(one)
            try:
                threads.start(self._ask, "arrivals", one, host)
            except SystemLimitError:  # whoever ends next has it asked
                self._asked.discard(one)
        return True

    def _ask(self, one: tuple[Reader, int], host: int) -> None:
        try:
            there = self._is_there(host, one[1])
        except Exception:  # one of the hosts is lost, or the session over
            there = False
        if there:
            self._all_there.add(one)
        self._asked.discard(one)
        if there:
            self._orphans.look()

    def _is_there(self, host: int, own: int) -> bool:
        look = self._abroad.looks.look_at_waits
        due = look(host, LookAtWaits()).result().due.get(own, ())
        pause = _FIRST_PAUSE
        while not self._abroad.is_lost(host):  # of such a one nothing is known
            if look(own, LookAtWaits(has={host: due})).result().has:
                return True
            if self._orphans.over.wait(pause):
                break
            pause = min(2 * pause, _LONGEST_PAUSE)
        return False


def ask_readers(
    orphans: Orphans, table: Table, abroad: FarHosts, process: Process, chores: Chores
) -> None:
    """From now on they are asked. ``process``: the driver's, which is one of them."""

    def ask(reader: Reader, question: int, writers: tuple[Reader, ...]) -> None:
        if reader == process.identity:
            settle = partial(orphans.settle, question, reader)
            process.sources.when_dry(writers, lambda: chores.soon(settle), chores)
            return
        for record in table:
            if record.reader == reader:
                with suppress(ConveyorError):  # it is dead, which is told on another way
                    record.order(Settle(question, writers))

    orphans.begin(Arrivals(orphans, abroad).pending, ask)
    abroad.on_given_up = orphans.look
