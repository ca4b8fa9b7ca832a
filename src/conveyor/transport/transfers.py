"""Transfers that the reader of an edge has asked for, for transports whose writer announces each transfer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import Any

from conveyor.futures import Future
from conveyor.transport.base import TensorSpec
from conveyor.transport.packing import Layout


class PendingTransfers:
    """Transfers that a reader waits for and that have not begun to come."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Layout, Future[list[Any]]]] = {}
        self._last = -1
        self._over: BaseException | None = None

    def ask(self, specs: Sequence[TensorSpec], transfer: int) -> Future[list[Any]]:
        """Wait for a transfer. Its future has failed already if this end was ended."""
        future: Future[list[Any]] = Future()
        if self._over is not None:
            future.set_exception(self._over)
        else:
            self._waiting[transfer] = Layout.of(specs), future
            self._last = transfer
        return future

    def drop(self, transfer: int) -> None:
        """Forget a transfer that nobody wants any more."""
        self._waiting.pop(transfer, None)

    def decided(self, announced: Iterable[int]) -> list[int]:
        """Return the announced transfers whose fate is known: they are wanted, or it is certain that they are
        not."""
        return [transfer for transfer in announced if transfer <= self._last]

    def take(self, transfer: int) -> tuple[Layout, Future[list[Any]]] | tuple[None, None]:
        """Remove a transfer that comes, and return its layout and its future; twice ``None`` if nobody wants
        it."""
        return self._waiting.pop(transfer, (None, None))

    def end(self, reason: BaseException) -> None:
        """Fail all transfers that are waited for, and all that are asked for from now on."""
        self._over = reason
        while self._waiting:
            _, (_, future) = self._waiting.popitem()
            with suppress(InvalidStateError):  # it is done
                future.set_exception(reason)
