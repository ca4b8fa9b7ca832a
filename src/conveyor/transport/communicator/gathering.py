"""Endpoints by which the ranks of a user's communicator agree on when to enter a collective operation.

An operation blocks until all ranks have called it, and each process calls one at a time. So the ranks enter
it one after the other: the first when its thread is free, each other one when all before it have entered. A
rank in an operation waits only for higher ranks, so no waits form a cycle, whichever graphs use the
communicator and in whatever order they are executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from conveyor.exceptions import TransportError
from conveyor.transport.base import Conduit, Wire
from conveyor.transport.communicator.line import Line


class Gathering(Conduit):
    """Endpoint of the edge on which one rank, the writer, tells the others how far it is.

    Messages on the wire: ``("anew", generation, None, why)`` of a rank whose communicator is of that
    generation, ``("begun", generation, transfer, None)`` of a rank that has entered an operation, and
    ``("gone", generation, transfer, why)`` of a rank that has failed in it, or never enters it.

    rank: the writer's in the communicator. member: its actor's name.
    line: this process's queue for the communicator.
    generation: the writer's; ``None``: it has not said.
    begun: the last transfer whose operation the writer has entered, and in which generation.
    gone: by transfer, why the writer has left it.
    broken: why nothing can be told any more.
    """

    def __init__(self, wire: Wire, rank: int, line: Line) -> None:
        self._wire = wire
        self.rank = rank
        self.member = wire.members[0]
        self.line = line
        self.generation: int | None = None
        self.begun: tuple[int, int] | None = None
        self.gone: dict[int, str] = {}
        self.broken: BaseException | None = None
        line.join(self, self._renewed, wire.ring)
        if line.settled:
            self._renewed(line.generation)

    def tell(self, what: str, transfer: int | None, why: str | None = None) -> None:
        """Tell all other ranks, as the writer."""
        self._wire.send((what, self.line.generation, transfer, why))

    def ring(self) -> None:
        """Have the program look again."""
        self._wire.ring()

    def progress(self) -> None:
        """Note the writer's messages, and advance the communicator's queue. Raises an error that was noted
        for this end."""
        for _, (what, generation, transfer, why) in self._wire.receive():
            if what == "anew":
                self.generation = generation
                self.line.renew(generation, f"{self.member} has made it anew{why and ': '}{why}")
            elif what == "begun":
                self.begun = transfer, generation
            else:
                self.gone[transfer] = why
        self.line.advance()
        self.line.check(self)

    def send(self, tensors: Sequence[Any], transfer: int) -> NoReturn:
        """Refuse to send: messages between the ranks have no tensors."""
        raise TransportError("no tensor goes by the collectives of a communicator")

    def receive(self, specs: Sequence[Any], note: bytes, transfer: int) -> NoReturn:
        """Refuse to receive: messages between the ranks have no tensors."""
        raise TransportError("no tensor goes by the collectives of a communicator")

    def abort(self, reason: BaseException) -> None:
        """Keep ``reason`` as ``broken``, and leave the communicator's queue."""
        self.broken = reason
        self.line.leave(self)

    def close(self) -> None:
        """Leave the communicator's queue."""
        self.line.leave(self)

    def _renewed(self, generation: int) -> None:
        if self._wire.rank == 0:
            self._wire.send(("anew", generation, None, self.line.why))
