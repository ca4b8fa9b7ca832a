"""What somebody fetches may be held back, and fail, because a test wants it to (``conveyor.testing``).

Fetching takes no part of the keeper, so it is who fetches that waits. Words of the keeper's on the board say
whether.
"""

from __future__ import annotations

from typing import Any

from conveyor import _core
from conveyor.codec.direct import Located
from conveyor.direct.awaiting import NotThere, deferral
from conveyor.direct.under_way import UnderWay
from conveyor.exceptions import ActorDiedError, InjectedFault
from conveyor.runtime.waiting.patience import wait_until

_HELD, _FAILING = 1, 2


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

    if held() and deferral.stock is not None:
        raise NotThere(lambda: not held())
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
