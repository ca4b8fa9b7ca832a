"""What is sent to a rank in the place of a call that comes to nothing before it is sent.

A rank that would have come to a collective operation in that call comes to the next one, and has to know.
"""

from __future__ import annotations

from conveyor import _core
from conveyor.codec.errors.failed_calls import tells_of
from conveyor.runtime.calls.call import Call, missed


def instead_of(
    call: Call, board: _core.Board, slot: int, error: BaseException | None = None
) -> Call | None:
    """In the place of ``call`` of the actor in ``slot``, whose outcome is ``error``, or which was cancelled.
    ``None``: the actor is in no group, and misses nothing."""
    if not board.is_rank(slot):
        return None
    if error is None:
        return missed(call, 0, board.sights, "was cancelled")
    number = board.fail(slot)
    tells_of(error, ((board.session, slot, number),))
    return missed(call, number, 0, "could not be called with its arguments")
