"""Ranks of several hosts exchange parts of tensors: what ranks of a host get is sent to it, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conveyor.dag.collective.calls import Rank, joined, rows_of, share_of
from conveyor.dag.collective.kernels import Arrays
from conveyor.dag.collective.pieces import Hosts, Piece, check, look
from conveyor.dag.collective.seen import seen


class RowsForHosts(Rank, frozen=True, kw_only=True):
    """A rank takes its tensor apart for ranks of other hosts, along dimension 0.

    targets: of each of these hosts, the ranks.
    """

    targets: Hosts

    @property
    def only_reads(self) -> bool:
        return True

    def __call__(self, *inputs: Any) -> Any:
        ranks, arrays = look(inputs)
        (value,) = inputs
        made = [Piece(ranks, None)] * len(self.targets)
        if arrays is not None and value.shape and value.shape[0] % len(self.names) == 0:
            made = [Piece(ranks, rows_for(self, arrays, value, to)) for to in self.targets]
        return made if len(made) > 1 else made[0]


class AllToAllByHost(Rank, frozen=True, kw_only=True):
    """A rank joins its shares of all tensors.

    Its inputs are, in the order of ranks, the tensors of those of its own host, and what the others have made
    for its host.

    near: the ranks of its own host.
    place: its place among those of them who get anything.
    """

    near: tuple[int, ...]
    place: int

    @property
    def only_reads(self) -> bool:
        return True

    def __call__(self, *inputs: Any) -> Any:
        near = [rank in self.near for rank in range(len(inputs))]
        looks = [
            seen(given) if here else given.ranks[0]
            for given, here in zip(inputs, near, strict=True)
        ]
        own = inputs[self.rank]
        arrays = check(self, looks, own, None)
        share = share_of(self, own)
        return joined(
            self,
            arrays,
            [
                arrays.plain(given)[share] if here else given.value[self.place]
                for given, here in zip(inputs, near, strict=True)
            ],
        )


class ScatterRows(Rank, frozen=True, kw_only=True):
    """The actor that has a tensor takes it apart for ranks of other hosts.

    targets: of each of these hosts, the ranks.
    """

    targets: Hosts

    def __call__(self, *inputs: Any) -> Any:
        (value,) = inputs
        arrays = rows_of(self, value)
        share_of(self, value)  # says what is wrong
        made = [rows_for(self, arrays, value, to) for to in self.targets]
        return made if len(made) > 1 else made[0]


class Taken(Rank, frozen=True, kw_only=True):
    """A rank takes what is its own of what has come to its host.

    place: where that is.
    """

    place: int

    def __call__(self, *inputs: Any) -> Any:
        return inputs[0][self.place]


def rows_for(rank: Rank, arrays: Arrays, value: Any, targets: Sequence[int]) -> list[Any]:
    """Return the shares of ``targets``, which are views."""
    plain, each = arrays.plain(value), value.shape[0] // len(rank.names)
    return [plain[each * to : each * (to + 1)] for to in targets]
