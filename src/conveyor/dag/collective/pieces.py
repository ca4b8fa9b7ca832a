"""What ranks of one host make for ranks of others.

Within a host a tensor is read where it lies, and to another one it is sent. So the ranks of each host first
make of their tensors what other hosts need of them, each rank a piece of it; the pieces are sent, and put
together there. All of it are values on ordinary edges, as everything of collectives is, so nobody waits
inside of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from conveyor.dag.collective.calls import Rank, title_of
from conveyor.dag.collective.kernels import Arrays, arrays_of, why_not
from conveyor.dag.collective.reduceop import ReduceOp
from conveyor.dag.collective.seen import Seen, check_seen, seen

T = TypeVar("T")

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of each host, in order; the hosts stand in the order of their first ranks."""


class Piece(NamedTuple):
    """What a rank makes for ranks of other hosts. What the ranks of its host have put in is told with it, so
    a rank that gets none of their tensors finds what is wrong with them as if it had them.

    ranks: what each of them has put in.
    value: an array, or a list of them; ``None``: there is none, since they do not fit.
    whole: it is a rank's own tensor.
    """

    ranks: tuple[Seen, ...]
    value: Any
    whole: bool = False


def look(
    values: Sequence[Any], op: ReduceOp | None = None
) -> tuple[tuple[Seen, ...], Arrays | None]:
    """Look at what ranks of one host put in. Return the library of their values, too, if they fit each other,
    and ``op``."""
    ranks = tuple(map(seen, values))
    arrays = arrays_of(values[0])
    if arrays is None or not all(one.fits and one.kind == ranks[0].kind for one in ranks):
        return ranks, None
    if op is not None and why_not(op, arrays, values[0].dtype) is not None:
        return ranks, None
    return ranks, arrays


def check(
    rank: Rank, ranks: Sequence[Seen], own: Any, op: ReduceOp | None, number: int | None = None
) -> Arrays:
    """Return the library of what ``ranks`` put in, all of them in order, ``own`` among it.

    Raises:
        TypeError, ValueError: as where one rank has the tensors of all.
    """
    title = title_of(rank, number)
    check_seen(title, rank.names, ranks)
    arrays = arrays_of(own)
    assert arrays is not None, "it was among what is checked"
    reason = None if op is None else why_not(op, arrays, own.dtype)
    if reason is not None:
        raise TypeError(f"{title}: {reason}")
    return arrays


def in_order(hosts: Hosts, each: Sequence[Sequence[T]]) -> list[T]:
    """Put what ``each`` host has of its ranks into the order of all ranks."""
    of = {
        rank: one
        for host, own in zip(hosts, each, strict=True)
        for rank, one in zip(host, own, strict=True)
    }
    return [of[rank] for rank in range(len(of))]
