"""Actors that somebody else has started take part in the session, each once, whoever asks for it."""

from __future__ import annotations

import threading

from conveyor.runtime.calls.call import start
from conveyor.runtime.driver.processes.record import Actor
from conveyor.runtime.driver.processes.supervisor import Supervisor
from conveyor.runtime.driver.processes.table import Table
from conveyor.runtime.protocol import ActorId, Attached, ProcessOptions

#: Seconds that one may take to leave that is to be back.
_LEAVES_WITHIN = 10.0


class _Foreign:
    """One of them."""

    def __init__(self) -> None:
        # Held while it is let in: several threads may ask for it, and it would refuse all but the first.
        # Reentrant, since a signal handler may ask, too.
        self.turn = threading.RLock()


class Attachments:
    """All of them."""

    def __init__(self, table: Table, supervisor: Supervisor) -> None:
        self._table, self._supervisor = table, supervisor
        #: By what tells each from all others.
        self._foreign: dict[str, _Foreign] = {}

    def attach(self, attached: Attached) -> ActorId:
        """Have that actor take part in the session, until it ends or is killed."""
        with self._foreign.setdefault(attached.key, _Foreign()).turn:
            for record in self._table:
                known = record.actor.options.attached
                if known is not None and known.key == attached.key:
                    if record.alive:
                        return record.id
                    record.exited.wait(_LEAVES_WITHIN)  # it was killed, or has died
            options = ProcessOptions(None, 0, {}, attached=attached)
            # Nobody counts its handles: it was there before them, and is when they are gone.
            actor = Actor(attached.name, attached.methods, None, options, None, shared=True)
            return self._supervisor.start(actor, lambda link: link.call(start((object,)))).id
