"""Shared memory of one node: tensors lie in the arena of the process that has sent them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conveyor.futures import Future
from conveyor.transport.base import Capabilities, Endpoint, Sending, TensorSpec, Transport, Wire


class ShmEndpoint(Endpoint):
    """Endpoint over shared memory. Tensors are copied into the writer's arena when they are sent, and read in
    place."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        #: By transfer, tensors that have come before they were asked for.
        self._early: dict[int, list[Any]] = {}
        self._requested: dict[int, Future[list[Any]]] = {}

    def send(self, tensors: Sequence[Any], transfer: int) -> Sending:
        """Prepare to send tensors as one message on the wire."""

        def begin() -> Future[None]:
            self._wire.send((transfer, list(tensors)))
            sent: Future[None] = Future()
            sent.set_result(None)
            return sent

        return Sending(begin)

    def receive(self, specs: Sequence[TensorSpec], note: bytes, transfer: int) -> Future[list[Any]]:
        """Ask for a transfer, and forget older ones that have come and were not asked for."""
        requested = self._requested[transfer] = Future()
        # Nobody will ask for what is older: its execution has failed.
        for older in [number for number in self._early if number < transfer]:
            del self._early[older]
        self.progress()
        return requested

    def drop(self, transfer: int) -> None:
        """Forget a transfer that was asked for."""
        self._requested.pop(transfer, None)

    def progress(self) -> None:
        """Take the messages on the wire, and complete the transfers that were asked for."""
        for _, (transfer, tensors) in self._wire.receive():
            self._early[transfer] = tensors
        for transfer in self._requested.keys() & self._early.keys():
            self._requested.pop(transfer).set_result(self._early.pop(transfer))

    def abort(self, reason: BaseException) -> None:
        """Fail all transfers that were asked for."""
        while self._requested:
            _, requested = self._requested.popitem()
            requested.set_exception(reason)

    def close(self) -> None:
        """Release the tensors that nobody has asked for."""
        self._early.clear()


class ShmTransport(Transport):
    """Moves tensors of the CPU between processes of one node.

    In a graph the tensors lie in the frames themselves, so nothing is opened for an edge. The endpoint is for
    transports that build upon it.
    """

    name = "shm"
    capabilities = Capabilities(devices=frozenset({"cpu"}), in_frame=True, between_hosts=True)

    def open(self, wire: Wire) -> ShmEndpoint:
        """Open this process's end of an edge."""

        return ShmEndpoint(wire)


TRANSPORT = ShmTransport()
