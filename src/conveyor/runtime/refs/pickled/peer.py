"""The rendezvous of pickled refs, as one actor speaks to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from conveyor.codec import Reader
from conveyor.exceptions import ConveyorError, RuntimeStateError, SystemLimitError
from conveyor.runtime import threads
from conveyor.runtime.messages.connection import Connection, Node
from conveyor.runtime.refs.pickled.exchange import (
    Answer,
    Arrived,
    Ask,
    Confirm,
    Confirmed,
    Drop,
    Dry,
    Export,
    ExportId,
    GiveUp,
    Load,
    Made,
    Refused,
    Tell,
    ToRendezvous,
)
from conveyor.runtime.refs.pickled.exports import Exports
from conveyor.runtime.refs.pickled.imports import Outcome
from conveyor.runtime.waiting.works import Blockers


class Peer:
    """The driver's end of one actor's connection."""

    def __init__(
        self,
        exports: Exports,
        number: int,
        reader: Reader,
        sock: Any,
        death: Callable[[str], ConveyorError],
        node: Node | None = None,
    ) -> None:
        """``number``: the actor's; ``reader``: its process that has connected. ``death(why)``: what has
        become of the actor; ``why`` says it if the connection has broken here. ``node``: its host, where
        that is another one."""
        self.number = number
        self.reader = reader
        self._exports = exports
        self._death = death
        self.node = node
        #: All that it has said was heard.
        self.ended = False
        self.connection = Connection(sock, "refs", self._on_message, self._on_end)

    def push(self, export: ExportId, outcome: Outcome) -> None:
        if self.node is None:
            outcome.send(self.connection, Arrived, export)
        elif not outcome.stays_afar:  # it is fetched, which may take long
            try:
                threads.start(self._push_whole, "export", export, outcome)
            except SystemLimitError:
                # The lock is held here, which everybody needs: what goes to this actor waits for it instead.
                self.connection.soon(lambda: self._push_whole(export, outcome))
        else:
            if outcome.snapshot.fd >= 0:
                self.node.hold(outcome.snapshot.fd)
            outcome.send(self.connection, Arrived, export)

    def _push_whole(self, export: ExportId, outcome: Outcome) -> None:
        outcome.whole((self.reader,)).send(self.connection, Arrived, export)

    def answer(self, export: ExportId, question: int, said: Blockers) -> None:
        self.connection.send(Answer(export, question, said))

    def _on_message(self, message: ToRendezvous, fds: list[int]) -> None:
        self.handlers[type(message)](self, message, fds)

    def _export(self, message: Export, _fds: list[int]) -> None:
        try:
            self._exports.peer_exports(self, message.export, message.ticket, message.readers)
        except RuntimeStateError as error:
            self.connection.send(Refused(message.ticket, error))

    def _confirm(self, message: Confirm, _fds: list[int]) -> None:
        self.connection.send(Confirmed(message.number))

    def _load(self, message: Load, _fds: list[int]) -> None:
        self._exports.peer_loads(self, message.export, message.ticket, message.original)

    def _drop(self, message: Drop, _fds: list[int]) -> None:
        self._exports.peer_drops(self, message.export)

    def _give_up(self, message: GiveUp, _fds: list[int]) -> None:
        self._exports.peer_gives_up(self, message.ticket, message.readers)

    def _ask(self, message: Ask, _fds: list[int]) -> None:
        self._exports.peer_asks(self, message.export, message.question)

    def _tell(self, message: Tell, _fds: list[int]) -> None:
        asked = message.export, message.question, message.asker
        self._exports.peer_answers(*asked, message.blockers)

    def _made(self, message: Made, fds: list[int]) -> None:
        self._exports.settled(message.export, Outcome.received(message, fds))

    def _dry(self, message: Dry, _fds: list[int]) -> None:
        self._exports.orphans.settle(message.question, self.reader)

    def _on_end(self) -> None:
        self.ended = True
        self._exports.peer_ended(self, lambda: self._death(self.connection.broken))

    #: What is done for each kind of message.
    handlers: ClassVar[Mapping[type[ToRendezvous], Callable[[Peer, Any, list[int]], None]]] = {
        Export: _export,
        Confirm: _confirm,
        Load: _load,
        Drop: _drop,
        GiveUp: _give_up,
        Ask: _ask,
        Tell: _tell,
        Made: _made,
        Dry: _dry,
    }
