"""How limits of time are told."""

import pytest

from conveyor import _core
from conveyor.checks import in_seconds
from conveyor.exceptions import WaitTimeoutError
from conveyor.runtime.waiting import TimeLimit


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (2.0000001, "2 s"),
        (1.99987, "2 s"),
        (0.25, "0.25 s"),
        (0.0312499, "0.0312 s"),
        (1500.4, "1500 s"),
    ],
)
def test_three_digits(seconds, told):
    assert in_seconds(seconds) == told


def test_what_is_left_of_a_limit_is_told_so():
    time_limit = TimeLimit(0.0312499)
    while not time_limit.over():
        _core.monotonic_ns()
    with pytest.raises(WaitTimeoutError, match=r"after 0\.0312 s waiting for it; nobody"):
        time_limit.check(lambda: "it", lambda: "nobody")
