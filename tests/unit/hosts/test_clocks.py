"""Clocks of other hosts: what is known of them, and how well."""

from hypothesis import example, given
from hypothesis import strategies as st

from conveyor.graph.telemetry import Alignment, Offset, estimate

TIMES = st.integers(0, 10**15)
AHEAD = st.integers(-(10**15), 10**15)
WAYS = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=20)


def requested(ahead, ways, start):
    """Questions one after the other, to a clock that is ahead by ``ahead(now)``."""
    now, samples = start, []
    for there, back in ways:
        samples.append((now, now + there + ahead(now + there), now + there + back))
        now += there + back
    return samples


@given(start=TIMES, ahead=AHEAD, ways=WAYS)
@example(start=0, ahead=0, ways=[(1, 0)])
@example(start=1, ahead=0, ways=[(0, 1)])
def test_an_offset_is_wrong_by_no_more_than_it_says(start, ahead, ways):
    found = estimate(requested(lambda now: ahead, ways, start))
    assert abs(found.ahead - ahead) <= found.error
    assert found.error <= (min(there + back for there, back in ways) + 1) // 2


@given(
    start=TIMES,
    ahead=AHEAD,
    drift=st.integers(-500, 500),  # millionths: no clock runs worse
    before=WAYS,
    after=WAYS,
    lasts=st.integers(1, 10**13),
    share=st.floats(0, 1),
)
def test_times_between_two_looks_are_wrong_by_no_more_than_that(
    start, ahead, drift, before, after, lasts, share
):
    def true(now):
        return ahead + (now - start) * drift // 10**6

    first = estimate(requested(true, before, start))
    later = start + sum(map(sum, before)) + lasts
    second = estimate(requested(true, after, later))
    clock = Alignment(first, second)
    event = first.at + int(share * (second.at - first.at))
    # While a question is on its way the clock drifts, too: by a two-thousandth of that time at most.
    slack = 2 + max(first.error, second.error) // 500
    assert abs(clock.here(event + true(event)) - event) <= clock.error + slack


@given(start=TIMES, lasts=st.integers(0, 10**12), ahead=AHEAD, times=st.lists(TIMES, min_size=2))
def test_what_comes_later_there_comes_later_here(start, lasts, ahead, times):
    clock = Alignment(Offset(start, ahead, 50), Offset(start + lasts, ahead + lasts // 3000, 50))
    here = [clock.here(there) for there in sorted(times)]
    assert here == sorted(here)


@given(start=TIMES, mine=AHEAD, other=AHEAD, ways=WAYS)
def test_two_hosts_that_a_third_knows(start, mine, other, ways):
    """All clocks are known by the driver's; who executes may be on another host than that."""
    base = estimate(requested(lambda now: mine, ways, start))
    seen = estimate(requested(lambda now: other, ways[::-1], start)).seen_from(base)
    assert abs(seen.ahead - (other - mine)) <= seen.error
    own = Offset(start, 0, 0).seen_from(base)
    assert abs(own.ahead + mine) <= own.error
