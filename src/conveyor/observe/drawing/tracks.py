"""Lines that go through a gap between two layers get rows for their flat pieces."""

from __future__ import annotations

from collections.abc import Sequence


def tracks(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Find the row, from 0 at the top, in which each line turns from its first column to its second.

    Flat pieces in one row do not touch. A line that starts in the column where another ends turns
    above it, so the two do not meet; only where such claims go in a circle is one left unheard.
    A line that runs straight down needs no row: -1.
    """
    bent = [index for index, (x0, x1) in enumerate(spans) if x0 != x1]
    first = {spans[index][0]: index for index in bent}
    # Who must turn above: whoever starts where this line ends.
    above = {index: first.get(spans[index][1]) for index in bent}
    rows = [-1] * len(spans)
    used: list[list[tuple[int, int]]] = []

    def settle(index: int) -> None:
        x0, x1 = sorted(spans[index])
        over = above[index]
        row = 0 if over is None else rows[over] + 1
        while row < len(used) and any(x0 <= end and start <= x1 for start, end in used[row]):
            row += 1
        while len(used) <= row:
            used.append([])
        used[row].append((x0, x1))
        rows[index] = row

    for index in bent:
        chain = [index]
        while True:
            over = above[chain[-1]]
            if over is None or rows[over] >= 0 or over in chain:
                break
            chain.append(over)
        for member in reversed(chain):
            if rows[member] < 0:
                settle(member)
    return rows
