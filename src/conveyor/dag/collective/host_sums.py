"""Ranks of several hosts reduce tensors: within each host first, then what the hosts have come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conveyor.dag.collective.calls import Reducing, bounds, reduce_inputs, share_of
from conveyor.dag.collective.kernels import Arrays, reduced, widens
from conveyor.dag.collective.partial import combine, partial
from conveyor.dag.collective.pieces import Hosts, Piece, check, in_order, look
from conveyor.dag.collective.seen import seen

#: Up to so many bytes a tensor is sent to other hosts as it is. It costs a frame, as a part of it would, and
#: is reduced in the order of ranks.
SMALL = 32 << 10


class HostPart(Reducing, frozen=True, kw_only=True):
    """A rank reduces its part of the tensors of its host's ranks, which are its inputs.

    place: its place among these ranks.
    several: each of them puts in a tuple of tensors.
    """

    place: int
    several: bool = False

    def __call__(self, *inputs: Any) -> Any:
        """Return a ``Piece`` of each tensor in a list; or, which is much less to be packed, the rank's own
        tensor, if that is all that is to be told."""
        if self.several:
            return [self._piece(values) for values in zip(*inputs, strict=True)]
        piece = self._piece(inputs)
        return piece.value if piece.whole else [piece]

    def _piece(self, inputs: Sequence[Any]) -> Piece:
        ranks, arrays = look(inputs, self.op)
        if arrays is None:
            return Piece(ranks, None)
        values = [arrays.plain(value) for value in inputs]
        # Of two, the sum in 32 bits has as many bytes as both.
        halves = len(values) == 2 and widens(self.op, arrays, values[0].dtype)
        if halves or values[0].nbytes <= SMALL:
            return Piece(ranks, values[self.place], True)
        begin, end = bounds(arrays.size(values[0]), self.place, len(values))
        sources = [arrays.flat(value)[begin:end] for value in values]
        return Piece(ranks, partial(self.op, arrays, sources))


class AllReduceByHost(Reducing, frozen=True, kw_only=True):
    """A rank reduces what the hosts have come to.

    Its inputs are its own tensor, and of each host the ``HostPart`` of each rank, or, where there is one rank
    on the host, that one's tensor.

    hosts: the ranks of each.
    several: each rank puts in a tuple of tensors.
    """

    hosts: Hosts
    several: bool = False

    def __call__(self, *inputs: Any) -> Any:
        own, *given = inputs
        if not any(isinstance(one, list) for one in given) and not self.several:
            return reduce_inputs(self, self.op, in_order(self.hosts, self._of_hosts(given)))
        of_hosts = self._of_hosts(given)
        tensors = [
            self._checked(value, number, [self._pieces(host, number) for host in of_hosts])
            for number, value in enumerate(own if self.several else (own,))
        ]
        made = [self._reduced(*tensor) for tensor in tensors]  # none before all are checked
        return made if self.several else made[0]

    def _of_hosts(self, given: Sequence[Any]) -> list[list[Any]]:
        each = iter(given)
        return [[next(each) for _ in host] for host in self.hosts]

    def _pieces(self, given: Sequence[Any], number: int) -> list[Piece]:
        """Find what a host has made of tensor ``number``."""
        if len(given) > 1 and isinstance(given[0], list):
            return [parts[number] for parts in given]
        values = [one[number] for one in given] if self.several else given
        looks = tuple(map(seen, values))
        return [Piece(looks, value, True) for value in values]

    def _checked(
        self, own: Any, number: int, of_hosts: Sequence[Sequence[Piece]]
    ) -> tuple[Any, Arrays, Sequence[Sequence[Piece]]]:
        """Return what is reduced: ``own``, its library, and what the hosts have come to."""
        ranks = in_order(self.hosts, [pieces[0].ranks for pieces in of_hosts])
        arrays = check(self, ranks, own, self.op, number if self.several else None)
        return own, arrays, of_hosts

    def _reduced(self, own: Any, arrays: Arrays, of_hosts: Sequence[Sequence[Piece]]) -> Any:
        if all(pieces[0].whole for pieces in of_hosts):
            values = [[arrays.plain(piece.value) for piece in pieces] for pieces in of_hosts]
            return reduced(self.op, arrays, in_order(self.hosts, values))
        size = arrays.size(own)
        out = arrays.empty(own.shape, own)
        flat = arrays.flat(out)
        hosts = [_Parts(arrays, size, pieces) for pieces in of_hosts]
        begin = 0
        for end in sorted({end for host in hosts for end in host.ends}):
            sources = [source for host in hosts for source in host.between(begin, end)]
            combine(self.op, len(self.names), arrays, sources, flat[begin:end])
            begin = end
        return out


class _Parts:
    """What a host has come to: its parts, each of which ends where another begins, or whole tensors."""

    def __init__(self, arrays: Arrays, size: int, pieces: Sequence[Piece]) -> None:
        values = [arrays.flat(arrays.plain(piece.value)) for piece in pieces]
        #: What is reduced of each stretch, and where that ends.
        self.sources = [values] if pieces[0].whole else [[value] for value in values]
        self.ends = [bounds(size, i, len(self.sources))[1] for i in range(len(self.sources))]

    def between(self, begin: int, end: int) -> list[Any]:
        """Return the elements from ``begin`` to ``end``, which lie in one stretch."""
        first = 0
        for sources, last in zip(self.sources, self.ends, strict=True):
            if end <= last:
                return [source[begin - first : end - first] for source in sources]
            first = last
        raise AssertionError("no stretch goes so far")


class HostShares(Reducing, frozen=True, kw_only=True):
    """A rank reduces what some ranks of other hosts get, of the tensors of its host's ranks, which are its
    inputs.

    targets: these ranks.
    rows: a share is of dimension 0; else of all elements in a row.
    """

    targets: tuple[int, ...]
    rows: bool

    def __call__(self, *inputs: Any) -> Any:
        ranks, arrays = look(inputs, self.op)
        made = [Piece(ranks, None)] * len(self.targets)
        if arrays is not None and (not self.rows or can_be_shared(self, inputs[0])):
            values = [arrays.plain(value) for value in inputs]
            made = [
                Piece(
                    ranks, partial(self.op, arrays, [_share(self, arrays, v, to) for v in values])
                )
                for to in self.targets
            ]
        return made if len(made) > 1 else made[0]


class ShareByHost(Reducing, frozen=True, kw_only=True):
    """A rank reduces its share.

    Its inputs are the tensors of its own host's ranks, and of each other host what one of its ``HostShares``
    has made for this rank; all in the order of hosts.

    hosts: the ranks of each.
    rows: as above.
    """

    hosts: Hosts
    rows: bool

    def __call__(self, *inputs: Any) -> Any:
        here = next(i for i, host in enumerate(self.hosts) if self.rank in host)
        behind = here + len(self.hosts[here])
        values, pieces = inputs[here:behind], [*inputs[:here], *inputs[behind:]]
        own = values[self.hosts[here].index(self.rank)]
        ranks: list[Any] = [piece.ranks for piece in pieces]
        ranks.insert(here, tuple(map(seen, values)))
        arrays = check(self, in_order(self.hosts, ranks), own, self.op)
        share = share_of(self, own) if self.rows else slice(*self._bounds(arrays, own))
        shape = (share.stop - share.start, *(own.shape[1:] if self.rows else ()))
        shares = [_share(self, arrays, arrays.plain(value), self.rank) for value in values]
        sources = [arrays.flat(piece.value) for piece in pieces]
        sources.insert(here, shares[0] if len(shares) == 1 else partial(self.op, arrays, shares))
        out = arrays.empty(shape, own)
        combine(self.op, len(self.names), arrays, sources, arrays.flat(out))
        return out

    def _bounds(self, arrays: Arrays, own: Any) -> tuple[int, int]:
        return bounds(arrays.size(own), self.rank, len(self.names))


def _share(rank: HostShares | ShareByHost, arrays: Arrays, value: Any, target: int) -> Any:
    """Return the elements of the share of rank ``target`` in a row."""
    ranks = len(rank.names)
    if not rank.rows:
        begin, end = bounds(arrays.size(value), target, ranks)
        return arrays.flat(value)[begin:end]
    each = value.shape[0] // ranks
    return arrays.flat(value[each * target : each * (target + 1)])


def can_be_shared(rank: Reducing, value: Any) -> bool:
    """Say whether dimension 0 of ``value`` can be divided among the ranks."""
    return bool(value.shape) and value.shape[0] % len(rank.names) == 0
