"""Targets that share memory: with each other, which is right only where what they are to take shares it
likewise; or with what they are to take, which then must not be written over before it is read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from conveyor.direct.memory import (
    address_of,
    is_plain,
    is_tensor,
    lies_at,
    nbytes_of,
    storage_of,
)
from conveyor.direct.structure.leaves import Path, named

#: Device, address and bytes of a target.
Place = tuple[str, int, int]


def place_of(one: Any) -> Place:
    """Where a tensor or an array lies that has memory of its own."""
    return _where(one), address_of(one), nbytes_of(one)


def sharing(places: Sequence[Place]) -> Iterator[tuple[int, int]]:
    """Pairs of targets, by their numbers, that have memory in common: enough of them for each that does."""
    lying = sorted([(*place, i) for i, place in enumerate(places) if place[2]])
    last = None  # of those before, the one that reaches furthest
    for where, start, size, i in lying:
        if last is not None and last[0] == where and start < last[1]:
            yield last[2], i
        if last is None or last[0] != where or start + size > last[1]:
            last = where, start + size, i


def check_shares(
    found: Sequence[tuple[Path, Any]], targets: Sequence[Any], places: Sequence[Place]
) -> bool:
    """Raise if memory of ``targets``, which lie at ``places``, is to take two parts of the value that are not
    the same memory: the last would be in both places. Returns whether any of it is to take two parts.

    Raises:
        ValueError: it is.
    """
    shares = False
    for i, j in sharing(places):
        shares = True
        (one_path, one), (other_path, other) = found[i], found[j]
        if not _is_shared(one, other, places[j][1] - places[i][1]):
            what = (
                "one target is to take"
                if targets[i] is targets[j]
                else "the same memory is to take"
            )
            parts = sorted([(i, one_path), (j, other_path)])
            first, second = [named([path]) for _, path in parts]
            raise ValueError(f"{what} both {first} and {second}")
    return shares


def _is_shared(one: Any, other: Any, distance: int) -> bool:
    """Whether ``other`` lies ``distance`` bytes behind ``one``, element by element."""
    if one is other:
        return not distance
    if _where(one) != _where(other) or address_of(other) - address_of(one) != distance:
        return False
    return is_plain(one) and is_plain(other)


def _where(one: Any) -> str:
    return str(one.device) if is_tensor(one) and not one.is_cpu else "cpu"


def unwritten(leaves: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
    """What each of ``targets`` is to take: its leaf; or a copy, if one of them is to be written to where that
    leaf lies."""
    written: dict[str, list[tuple[int, int]]] = {}
    for leaf, target in zip(leaves, targets, strict=True):
        if nbytes_of(target) and not is_there(leaf, target):
            start = address_of(target)
            written.setdefault(_where(target), []).append((start, start + nbytes_of(target)))
    furthest = {}
    for where, ranges in written.items():
        ranges.sort()
        furthest[where] = list(accumulate((end for _, end in ranges), max))
    taken = []
    for leaf, target in zip(leaves, targets, strict=True):
        ranges = written.get(_where(leaf), [])
        if ranges and not is_there(leaf, target) and _has_memory(leaf):
            start, size = (
                (address_of(leaf), nbytes_of(leaf)) if is_plain(leaf) else storage_of(leaf)
            )
            before = bisect_left(ranges, (start + size,))
            if before and furthest[_where(leaf)][before - 1] > start:
                leaf = leaf.detach().clone() if is_tensor(leaf) else leaf.copy()
        taken.append(leaf)
    return taken


def is_there(leaf: Any, target: Any) -> bool:
    """Whether the target has the leaf's elements already, since it is the same memory."""
    if leaf is target:
        return True
    return _where(leaf) == _where(target) and lies_at(leaf, address_of(target))


def _has_memory(leaf: Any) -> bool:
    return bool(nbytes_of(leaf)) and (not is_tensor(leaf) or str(leaf.layout) == "torch.strided")
