"""Ways from waits to waits, through what processes have noted of theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

#: A work, by the slot of the process that has to do it.
Node: TypeAlias = "tuple[int, int]"


class Noted(Protocol):
    """What keeps a work from being done."""

    @property
    def waits(self) -> Sequence[tuple[int, int, str]]:
        """Whom it waits for (slot, work), and what that is in words."""
        ...


def way_back(
    notes: Mapping[Node, Noted], start: Node, is_mine: Callable[[Node], bool]
) -> list[tuple[int, str]] | None:
    """The shortest way from ``start`` to a work of the one that asks: each process with what it waits for."""
    ways: dict[Node, list[tuple[int, str]]] = {start: []}
    ahead = [start]
    for node in ahead:
        if is_mine(node):
            return ways[node]
        for slot, work, text in notes[node].waits:
            if (slot, work) not in ways:
                ways[slot, work] = [*ways[node], (node[0], text)]
                ahead.append((slot, work))
    return None
