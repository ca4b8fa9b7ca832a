"""Quantiles, and how durations and sizes are written."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor import _core
from conveyor.observe.stats import quantile, times
from conveyor.observe.units import duration, size

LARGEST_TOLD = 2**43


def recorder() -> _core.Recorder:
    counters = _core.Recorder.bytes(1, 0, 0, 0, 1)
    segment = _core.Segment.create(8192 + 64 * _core.EVENT_BYTES)
    assert counters < 8192 - 64
    return _core.Recorder(segment, 0, 64, 8192, 64, 1, 0, 0, 0, 1, False)


def noted(values: list[int]) -> tuple[int, int, list[tuple[int, int, int]]]:
    made = recorder()
    for value in values:
        made.note_task(0, 0, 1000, 1000 + value, False)
    return made.task(0)[2]


durations = st.one_of(
    st.integers(0, 100),
    st.integers(0, 50).map(lambda e: 2**e),
    st.integers(0, LARGEST_TOLD - 1),
    st.integers(LARGEST_TOLD, 2**60),
)


@given(durations)
def test_a_value_lies_in_its_bucket(value):
    total, largest, [(low, high, count)] = noted([value])
    assert (total, largest, count) == (value, value, 1)
    assert low <= value
    assert value < high or value >= LARGEST_TOLD
    assert high - low <= max(low // 8, 1)


def test_buckets_leave_no_gap():
    edges = sorted({*range(64), *(2**e + d for e in range(3, 44) for d in (-1, 0, 1))})
    _, _, buckets = noted(edges)
    for (_, high, _), (low, _, _) in itertools.pairwise(buckets):
        assert high <= low
    assert sum(n for _, _, n in buckets) == len(edges)


@given(st.lists(st.integers(0, LARGEST_TOLD - 1), min_size=1), st.floats(0.0, 1.0))
def test_a_quantile_is_close_to_the_true_one(values, share):
    _, largest, buckets = noted(values)
    true = sorted(values)[max(math.ceil(share * len(values)), 1) - 1]
    assert abs(quantile(buckets, share, largest) - true) <= true / 16


def test_nothing_measured():
    measured = times(noted([]))
    assert measured.count == measured.p50_s == measured.p99_s == measured.max_s == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ns"),
        (25e-9, "25.0 ns"),
        (9.994e-6, "9.99 us"),
        (9.996e-6, "10.0 us"),
        (999.4e-6, "999 us"),
        (999.6e-6, "1.00 ms"),
        (0.0713, "71.3 ms"),
        (12.0, "12.0 s"),
        (86400.0, "86400 s"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 << 20, "3.00 MiB"),
        (5 << 40, "5.00 TiB"),
    ],
)
def test_sizes(count, text):
    assert size(count) == text
