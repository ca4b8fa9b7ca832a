"""Pauses between tries of what nothing tells of."""

import pytest

from conveyor.pauses import Pauses


@pytest.mark.parametrize(("first", "most"), [(0.01, 0.5), (0.001, 0.1), (2.0, 0.5)])
def test_they_grow_up_to_the_longest_and_begin_anew(first, most):
    pauses = Pauses(first, most)
    for _ in range(2):
        could_be = [min(first * 1.5**n, most) for n in range(30)]
        taken = [pauses.next() for _ in range(30)]
        assert all(0.75 * p <= one <= p for one, p in zip(taken, could_be, strict=True))
        assert len(set(taken)) == 30  # by chance, so that not all come back at one moment
        pauses.begin_anew()
