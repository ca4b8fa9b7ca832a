"""A short soak, and that a long one would be judged rightly; ``make soak`` runs a million executions."""

from array import array

import pytest
from soak_run import Part, judge, soak

MB = 1 << 20


def test_a_short_soak(leaves_nothing):
    told = []
    with leaves_nothing():
        parts = soak(2000, seed=2, with_torch=False, tell=told.append)
    assert sum(part.executions for part in parts) == 2000
    assert all(part.resident > MB for part in parts)
    assert told
    text, _ = judge(parts)
    assert text.startswith("2000 executions")


def many(seconds):
    return array("d", [seconds] * 100)


def curve(memory, latency, floor):
    """50 parts; the arguments give each a value for the part's number."""
    return [
        Part(100, 1.0, int(memory(i) * MB), many(latency(i)), many(floor(i))) for i in range(50)
    ]


@pytest.mark.parametrize(
    ("memory", "latency", "floor", "wrong"),
    [
        (lambda i: 100, lambda i: 1e-4, lambda i: 5e-5, []),
        (lambda i: 100 + i / 15, lambda i: 1e-4, lambda i: 5e-5, []),
        (lambda i: 100 + i / 5, lambda i: 1e-4, lambda i: 5e-5, ["memory has grown"]),
        (lambda i: 100, lambda i: 1e-4 * (1 + i / 20), lambda i: 5e-5, ["latency has grown"]),
        # The machine has become slower, or faster, and so have we; or we have not.
        (lambda i: 100, lambda i: 1e-4 * (1 + i), lambda i: 5e-5 * (1 + i), []),
        (lambda i: 100, lambda i: 1e-4, lambda i: 5e-5 / (1 + i), []),
    ],
)
def test_growth_is_found(memory, latency, floor, wrong):
    assert judge(curve(memory, latency, floor))[1] == wrong
