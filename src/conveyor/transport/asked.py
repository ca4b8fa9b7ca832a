"""What the reader of an edge has asked for, of a transport whose writer says what comes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import Any

from conveyor.futures import Future
from conveyor.transport.base import TensorSpec
from conveyor.transport.packing import Layout


class Asked:
    """The transfers that somebody waits for, and that have not begun to come."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Layout, Future[list[Any]]]] = {}
        self._last = -1
        self._over: BaseException | None = None

    def ask(self, specs: Sequence[TensorSpec], transfer: int) -> Future[list[Any]]:
        """Wait for a transfer; its future has failed already if nothing comes any more."""
        future: Future[list[Any]] = Future()
        if self._over is not None:
            future.set_exception(self._over)
        else:
            self._waiting[transfer] = Layout.of(specs), future
            self._last = transfer
        return future

    def drop(self, transfer: int) -> None:
        """Nobody wants it any more."""
        self._waiting.pop(transfer, None)

    def due(self, announced: Iterable[int]) -> list[int]:
        """Those of the announced transfers that are wanted, or of which it is known that they are not."""
        return [transfer for transfer in announced if transfer <= self._last]

    def take(self, transfer: int) -> tuple[Layout, Future[list[Any]]] | tuple[None, None]:
        """What is to become of a transfer that comes; twice ``None`` if it is not wanted."""
        return self._waiting.pop(transfer, (None, None))

    def end(self, reason: BaseException) -> None:
        """Have all that is waited for fail, and all that is asked for from now on."""
        self._over = reason
        while self._waiting:
            _, (_, future) = self._waiting.popitem()
            with suppress(InvalidStateError):  # it is done
                future.set_exception(reason)
