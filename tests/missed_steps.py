"""What tests of ranks that may have missed an operation ask of references and of the ranks' steps."""

import pytest

import conveyor
from conveyor.exceptions import CollectiveBrokenError

#: s; a bound for what should take milliseconds.
WAIT = 60


def get(ref):
    return conveyor.get(ref, timeout=WAIT)


def settled(*refs):
    """They are done, and nobody has learned how."""
    done, _ = conveyor.wait(list(refs), num_returns=len(refs), timeout=WAIT)
    assert len(done) == len(refs)


def fail(ref, error=LookupError):
    with pytest.raises(error):
        get(ref)


def meet(ranks, number):
    count = len(ranks)
    assert get([rank.step.remote(number) for rank in ranks]) == [number * float(count)] * count


def do_not_meet(*refs, match="rank"):
    for ref in refs:
        with pytest.raises(CollectiveBrokenError, match=match):
            get(ref)
