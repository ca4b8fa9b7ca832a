"""How readers are asked for tickets of pickles that may never have come to them: see
:mod:`conveyor.runtime.refs.orphans`."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from conveyor.codec import Reader
from conveyor.exceptions import ConveyorError
from conveyor.runtime.actor.orders import Settle
from conveyor.runtime.chores import Chores
from conveyor.runtime.driver.processes.far_hosts import FarHosts
from conveyor.runtime.driver.processes.table import Table
from conveyor.runtime.process import Process
from conveyor.runtime.refs.orphans import Orphans


def ask_readers(
    orphans: Orphans, table: Table, abroad: FarHosts, process: Process, chores: Chores
) -> None:
    """From now on they are asked. ``process``: the driver's, which is one of them."""

    def ask(reader: Reader, question: int, writers: tuple[Reader, ...]) -> None:
        if reader == process.identity:
            settle = partial(orphans.settle, question, reader)
            # A finalizer may be who finds that out.
            process.sources.when_dry(writers, lambda: chores.soon(settle))
            return
        for record in table:
            if record.reader == reader:
                with suppress(ConveyorError):  # it is dead, which is told on another way
                    record.order(Settle(question, writers))

    orphans.begin(abroad.arrives, ask)
    abroad.on_given_up = orphans.look
