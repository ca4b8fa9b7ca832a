"""What somebody fetches may be held back, and fail, because a test wants it to (``conveyor.testing``).

Fetching takes no part of the keeper, so it is who fetches that waits. Words of the keeper's on the board say
whether.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conveyor import _core
from conveyor.codec.direct import Located
from conveyor.codec.faults import NotThere
from conveyor.direct.awaiting import Stock, deferral
from conveyor.direct.under_way import UnderWay
from conveyor.exceptions import ActorDiedError, InjectedFault
from conveyor.runtime.waiting.patience import wait_until

_HELD, _FAILING = 1, 2


class _Held:
    """A value that an event loop wants, and that is held back."""

    def __init__(self, wait: UnderWay) -> None:
        self._wait = wait

    def give_up(self) -> None:
        """Nobody waits for that any more."""
        self._wait.end()


def _defer(stock: Stock, where: Located, process: Any, held: Callable[[], bool]) -> None:
    """Break decoding off as long as ``held()``."""
    key = _Held, where.number
    if held():
        if key not in stock:
            stock[key] = _Held(UnderWay(process, where.slot, where.number))
        raise NotThere(lambda: not held())
    waited = stock.pop(key, None)
    if waited is not None:
        waited.give_up()


def go_on(where: Located, runtime: Any) -> None:
    """Return when the value may be fetched, or its keeper has died.

    Raises:
        NotThere: it is held back, and this is for an await.
        ActorDiedError: its keeper has died while it was held back: its memory may still be there.
        WaitTimeoutError: the ``get`` that needs it has no longer.
        InjectedFault: it is to fail.
    """
    process = runtime.process
    board: _core.Board = process.board

    def died() -> bool:
        return board.gone(where.slot, where.incarnation)

    def held() -> bool:
        return bool(board.transfers(where.slot) & _HELD) and not died()

    if deferral.stock is not None:
        _defer(deferral.stock, where, process, held)
    if held():
        wait = UnderWay(process, where.slot, where.number)
        try:
            wait_until(
                process.inbox,
                lambda: not held(),
                _core.seconds_to_fetch(),
                lambda: f"a value that {where.keeper} keeps",
                lambda: "conveyor.testing.hold_transfers holds it back",
            )
        finally:
            wait.end()
    transfers = board.transfers(where.slot)
    if transfers & _HELD and died():
        raise ActorDiedError(
            f"{where.keeper} has died, and with it a value that it kept", where.keeper
        )
    if transfers & _FAILING and not died():
        raise InjectedFault(
            f"conveyor.testing.fail_transfers: a value that {where.keeper} keeps cannot be fetched"
        )
