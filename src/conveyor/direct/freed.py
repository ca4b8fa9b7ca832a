"""Waiting until memory is nobody's but its maker's again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conveyor.checks import check_timeout
from conveyor.direct.listing import id_of, objects
from conveyor.direct.memory import storage_of
from conveyor.direct.store import TABLE
from conveyor.direct.structure import leaves_of
from conveyor.runtime import context, ending
from conveyor.runtime.waiting import wait_until

#: Address and bytes of memory.
_Storage = tuple[int, int]


def wait_tensor_freed(tensor: Any, timeout: float | None = None) -> None:
    """Wait until nobody can fetch what lies in a tensor's memory, so that it can be written to: until all
    references to values that it is part of are gone, and all calls that take such a value have it.

    Args:
        tensor: a torch tensor, or an array; or a list or mapping with some in it, as a ``state_dict``. Each
            stands for all of the memory that it shares with others: a view, a parameter, or an entry of a
            ``state_dict`` for their whole storage.
        timeout: seconds; ``None`` or -1: as long as it takes.

    Raises:
        TypeError: there is neither.
        WaitTimeoutError: the memory is still needed; it is a ``TimeoutError``, which says who holds it.
        SessionEndedError: the session has ended meanwhile, or before.
    """
    found = [leaf for _, leaf in leaves_of(tensor)]
    storages = [storage_of(one) for one in found or [tensor]]
    timeout = check_timeout(timeout)
    if not _holding(storages):
        return
    runtime = context.running()
    if (
        runtime is None
    ):  # nobody is told of references any more, and no session begins because of them
        raise ending.ended()

    def is_free() -> bool:
        if not _holding(storages):
            return True
        if runtime.ending or runtime.process.waits_end:
            raise ending.ended()
        return False

    with TABLE.telling(runtime.process.notify):
        wait_until(
            runtime.process.inbox,
            is_free,
            timeout,
            lambda: f"memory of {sum(nbytes for _, nbytes in set(storages)):,} bytes to be freed",
            lambda: _needed(_holding(storages)),
        )


def _holding(storages: Sequence[_Storage]) -> set[int]:
    """The numbers of the values that lie there."""
    found: set[int] = set()
    for address, nbytes in storages:
        found |= TABLE.holding(address, nbytes)
    return found


def _needed(numbers: set[int]) -> str:
    several = f"{len(numbers)} values lie" if len(numbers) > 1 else "a value lies"
    ids = {id_of(number) for number in numbers}
    holders = sorted({who for kept in objects() if kept.id in ids for who in kept.holders})
    by = f" by {', '.join(holders)}" if holders else ""
    return (
        f"{several} there that others may still fetch: a reference to it is held{by}, or a call that takes "
        "it has not begun"
    )
