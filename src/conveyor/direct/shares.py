"""Targets that share memory, which is right only where what they are to take shares it likewise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from conveyor.direct.leaves import Path, named
from conveyor.direct.memory import address_of, is_plain, is_tensor, nbytes_of


def sharing(targets: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Pairs of targets, by their places, that have memory in common: enough of them for each that does."""
    lying = sorted(
        (_where(one), address_of(one), nbytes_of(one), i)
        for i, one in enumerate(targets)
        if nbytes_of(one)
    )
    last = None  # of those before, the one that reaches furthest
    for where, start, size, i in lying:
        if last is not None and last[0] == where and start < last[1]:
            yield last[2], i
        if last is None or last[0] != where or start + size > last[1]:
            last = where, start + size, i


def check_shares(found: Sequence[tuple[Path, Any]], targets: Sequence[Any]) -> None:
    """Raise if memory of ``targets`` is to take two parts of the value that are not the same memory: the last
    would be in both places.

    Raises:
        ValueError: it is.
    """
    for i, j in sharing(targets):
        (one_path, one), (other_path, other) = found[i], found[j]
        if not _is_shared(one, other, address_of(targets[j]) - address_of(targets[i])):
            what = (
                "one target is to take"
                if targets[i] is targets[j]
                else "the same memory is to take"
            )
            parts = sorted([(i, one_path), (j, other_path)])
            first, second = [named([path]) for _, path in parts]
            raise ValueError(f"{what} both {first} and {second}")


def _is_shared(one: Any, other: Any, distance: int) -> bool:
    """Whether ``other`` lies ``distance`` bytes behind ``one``, element by element."""
    if one is other:
        return not distance
    if _where(one) != _where(other) or address_of(other) - address_of(one) != distance:
        return False
    return is_plain(one) and is_plain(other)


def _where(one: Any) -> str:
    return str(one.device) if is_tensor(one) else "cpu"
