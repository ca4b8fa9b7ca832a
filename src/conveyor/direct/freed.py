"""Waiting until memory is nobody's but its maker's again."""

from __future__ import annotations

from typing import Any

from conveyor.checks import check_timeout
from conveyor.direct.memory import storage_of
from conveyor.direct.table import TABLE
from conveyor.runtime import context
from conveyor.runtime.waiting.patience import wait_until


def wait_tensor_freed(tensor: Any, timeout: float | None = None) -> None:
    """Wait until nobody can fetch what lies in a tensor's memory, so that it can be written to: until all
    references to values that it is part of are gone, and all calls that take such a value have it.

    Args:
        tensor: a torch tensor, or an array. It stands for all of the memory that it shares with others: a
            view, a parameter, or an entry of a ``state_dict`` for their whole storage.
        timeout: seconds; ``None``, or a negative number: as long as it takes.

    Raises:
        TypeError: it is neither.
        WaitTimeoutError: the memory is still needed; it is a ``TimeoutError``.
    """
    address, nbytes = storage_of(tensor)
    timeout = check_timeout(timeout)
    if not TABLE.holding(address, nbytes):
        return
    runtime = context.current()
    wait_until(
        runtime.process.inbox,
        lambda: not TABLE.holding(address, nbytes),
        None if timeout is not None and timeout < 0 else timeout,
        lambda: f"memory of {nbytes:,} bytes to be freed",
        lambda: _needed(TABLE.holding(address, nbytes)),
    )


def _needed(by: int) -> str:
    several = f"{by} values lie" if by > 1 else "a value lies"
    return (
        f"{several} there that others may still fetch: a reference to it is held, or a call that takes it "
        "has not begun"
    )
