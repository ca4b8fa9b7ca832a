"""Operations that return the values of the ranks, which lie in shared memory and are read in place.

Nothing is copied to a reader, whatever the size. A rank's own value is copied once, unless it was made with
``conveyor.empty`` or ``conveyor.empty_tensor`` and its maker keeps no reference to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conveyor.collective.group import ALL_TO_ALL, ALLGATHER, BROADCAST, GATHER, SCATTER, Group
from conveyor.collective.membership import DEFAULT, find


def allgather(value: Any, group_name: str = DEFAULT, *, timeout: float | None = None) -> list[Any]:
    """Return the values of all ranks, in their order. Any argument of a call can be a value, and they may
    differ.

    What comes is as at the time of the call: what is written to becomes the writer's own, and who writes to
    ``value`` later changes nobody's. Memory is kept as long as somebody has a value that lies in it, also if
    its rank has died. Raises as the call does.
    """
    given = [value]
    del value
    with find(group_name) as group:
        return group.exchange(ALLGATHER, given, timeout)


def broadcast(
    value: Any = None,
    src_rank: int = 0,
    group_name: str = DEFAULT,
    *,
    timeout: float | None = None,
) -> Any:
    """Return the value of ``src_rank``; the values that other ranks pass are ignored. See
    ``allgather.shared``."""
    with find(group_name) as group:
        root = group.root(src_rank, "src_rank")
        given = [value]
        del value
        gives = group.rank == root
        return group.exchange(BROADCAST, given, timeout, root, gives=gives, takes=(root,))[0]


def gather(
    value: Any, dst_rank: int = 0, group_name: str = DEFAULT, *, timeout: float | None = None
) -> list[Any] | None:
    """Return the values of all ranks, at ``dst_rank``; ``None`` at the others. See ``allgather.shared``."""
    with find(group_name) as group:
        root = group.root(dst_rank, "dst_rank")
        given = [value]
        del value
        if group.rank != root:
            group.exchange(GATHER, given, timeout, root, takes=())
            return None
        return group.exchange(GATHER, given, timeout, root)


def scatter(
    values: Sequence[Any] | None = None,
    src_rank: int = 0,
    group_name: str = DEFAULT,
    *,
    timeout: float | None = None,
) -> Any:
    """Return this rank's value from the list of ``src_rank``, which has a value for each rank; other ranks
    have no list. A part keeps the memory of the whole list. See ``allgather.shared``."""
    with find(group_name) as group:
        root = group.root(src_rank, "src_rank")
        if group.rank == root:
            _check_list(group, values)
        elif values is not None:
            raise ValueError(
                f"only rank {root} of this operation has a list of values, and this is {group.rank}"
            )
        gives = group.rank == root
        (got,) = group.exchange(SCATTER, [values], timeout, root, gives=gives, takes=(root,))
        return got[group.rank]


def all_to_all(
    values: Sequence[Any], group_name: str = DEFAULT, *, timeout: float | None = None
) -> list[Any]:
    """Return each rank's value for this rank, from lists that have a value for each rank. A part keeps the
    memory of the whole list. See ``allgather.shared``."""
    with find(group_name) as group:
        _check_list(group, values)
        return [got[group.rank] for got in group.exchange(ALL_TO_ALL, [values], timeout)]


def _check_list(group: Group, values: Any) -> None:
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"a list of values is needed, not a {type(values).__name__}")
    if len(values) != group.size:
        raise ValueError(
            f"a value for each of the group's {group.size} ranks is needed, and the list has {len(values)}"
        )
