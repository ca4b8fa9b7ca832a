"""Endpoint of an edge whose tensors a communicator moves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from conveyor.futures import Future
from conveyor.transport.base import Conduit, Sending, TensorSpec, Wire
from conveyor.transport.communicator.abstract import Communicator
from conveyor.transport.communicator.line import Job, Line

if TYPE_CHECKING:
    import torch


class CommunicatorConduit(Conduit):
    """Endpoint of an edge over a communicator. A reader asks for a transfer; then the end with the lower rank
    begins, see :class:`Line`.

    Messages on the wire: ``("ask", generation, transfer, reader)``, ``("go", ...)`` of the end that begins,
    ``("gone", ...)`` of an end that gives a transfer up, and ``("anew", generation, None, None)`` of an end
    that has made its communicator anew.
    """

    def __init__(self, wire: Wire, ranks: tuple[int, ...], line: Line) -> None:
        """``ranks``: the communicator's ranks of all ends, by their rank at the edge."""
        self._wire = wire
        self._ranks = ranks
        self._line = line
        #: By transfer, at the writer: the tensors, the readers that have not got them, and the future.
        self._sent: dict[int, tuple[list[Any], set[int], Future[None]]] = {}
        #: By transfer, at a reader: what comes, and the future.
        self._asked: dict[int, tuple[Sequence[TensorSpec], Future[list[Any]]]] = {}
        #: By rank at the edge, the generation that the other ends have.
        self._generations = [0] * len(ranks)
        line.join(self, self._renewed, wire.ring)
        if line.settled:
            self._renewed(line.generation)

    def send(self, tensors: Sequence[Any], transfer: int) -> Sending:
        """Prepare to send copies of the tensors, once the readers have asked for them."""

        def begin() -> Future[None]:
            # Copies are sent when the readers have asked, and the actor may write to the tensors before that.
            copies = [tensor.clone() for tensor in tensors]
            sent: Future[None] = Future()
            self._sent[transfer] = copies, set(range(1, len(self._ranks))), sent
            return sent

        return Sending(begin)

    def receive(self, specs: Sequence[TensorSpec], note: bytes, transfer: int) -> Future[list[Any]]:
        """Ask for a transfer: tell the writer, or begin here if this end has the lower rank."""
        asked: Future[list[Any]] = Future()
        self._asked[transfer] = specs, asked
        if self._begins(0):
            self._add(transfer, 0)
        else:
            self._tell("ask", transfer, self._wire.rank)
        return asked

    def progress(self) -> None:
        """Read the messages of the other ends, and advance the communicator's queue. Raises an error that was
        noted for this end."""
        for rank, (what, generation, transfer, told) in self._wire.receive():
            if what == "anew":
                self._generations[rank] = generation
                self._line.renew(generation, f"{self._wire.members[rank]} has made it anew")
                continue
            if rank == 0 and told != self._wire.rank:  # it is another reader's
                continue
            known = transfer in (self._asked if rank == 0 else self._sent)
            if what == "gone":
                self._gone(transfer, rank)
            elif not known:
                self._tell("gone", transfer, rank or self._wire.rank)
            elif what == "ask":
                self._add(transfer, rank)
            else:
                self._add(transfer, rank, generation)
        self._line.advance()
        self._line.check(self)

    def abort(self, reason: BaseException) -> None:
        """Fail all transfers with ``reason``, and leave the communicator's queue."""
        while self._sent:
            _, (_, _, sent) = self._sent.popitem()
            if not sent.done():
                sent.set_exception(reason)
        while self._asked:
            _, (_, asked) = self._asked.popitem()
            asked.set_exception(reason)
        self._line.leave(self)

    def close(self) -> None:
        """Leave the communicator's queue."""
        self._line.leave(self)

    def _begins(self, peer: int) -> bool:
        """Return whether this end begins its transfers with ``peer``."""
        return self._ranks[self._wire.rank] < self._ranks[peer]

    def _add(self, transfer: int, peer: int, generation: int | None = None) -> None:
        """Queue this end's part of a transfer with ``peer``. ``generation``: the one in which the peer has
        begun it; ``None``: it begins here."""
        if generation is not None and generation != self._line.generation:
            return  # who has begun it fails, since the communicator is made anew, and says so
        rank = self._ranks[peer]
        call: Callable[[Communicator], Any]
        if self._wire.rank == 0:
            call = functools.partial(_send, self._sent[transfer][0], rank)
        else:
            call = functools.partial(_receive, self._asked[transfer][0], rank)

        def may_begin() -> bool:
            return self._generations[peer] == self._line.generation

        def began() -> None:
            if generation is None:
                self._tell("go", transfer, peer or self._wire.rank)

        ended = functools.partial(self._ended, transfer, peer)
        self._line.add(Job(self, (transfer, peer), call, generation, may_begin, began, ended))

    def _ended(self, transfer: int, peer: int, made: Any, error: BaseException | None) -> None:
        """Finish a transfer with ``peer``, whose operation has returned ``made`` or failed with ``error``."""
        if error is not None:
            self._tell("gone", transfer, peer or self._wire.rank)
        if self._wire.rank == 0:
            self._served(transfer, peer, error)
        elif transfer in self._asked:
            _, asked = self._asked.pop(transfer)
            if error is None:
                asked.set_result(made)
            else:
                asked.set_exception(error)

    def _served(self, transfer: int, peer: int, error: BaseException | None) -> None:
        """Note that a reader has got the tensors, or never will."""
        if transfer not in self._sent:
            return
        _, missing, sent = self._sent[transfer]
        missing.discard(peer)
        if error is not None and not sent.done():
            sent.set_exception(error)
        if not missing:
            del self._sent[transfer]
            if not sent.done():
                sent.set_result(None)

    def _gone(self, transfer: int, peer: int) -> None:
        """Drop a transfer that the other end has given up."""
        why = f"{self._wire.members[peer]} has given up {self._wire.edge}"
        if self._wire.rank:
            self._asked.pop(transfer, None)  # why it does not come, the frames' own wire tells
        else:
            self._served(transfer, peer, None)
        self._line.forget(self, (transfer, peer), why)

    def _renewed(self, generation: int) -> None:
        self._wire.send(("anew", generation, None, None))

    def _tell(self, what: str, transfer: int, reader: int) -> None:
        self._wire.send((what, self._line.generation, transfer, reader))


def _send(tensors: Sequence[torch.Tensor], peer_rank: int, communicator: Communicator) -> None:
    for tensor in tensors:
        communicator.send(tensor, peer_rank)


def _receive(
    specs: Sequence[TensorSpec], peer_rank: int, communicator: Communicator
) -> list[torch.Tensor]:
    import torch

    made = []
    for spec in specs:
        device = spec.device.partition(":")[0]  # which one it is has no meaning in another process

        def allocate(
            shape: tuple[int, ...], dtype: torch.dtype, device: str = device
        ) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        dtype = getattr(torch, spec.dtype)
        made.append(communicator.recv(tuple(spec.shape), dtype, peer_rank, allocate))
    return made
