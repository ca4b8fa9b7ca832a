"""What the driver has found of a wait over hosts is believed by a wait that has looked in vain since."""

import threading
from types import SimpleNamespace

import pytest

from conveyor.exceptions import DeadlockError
from conveyor.runtime.deadlock import Found, Wait
from conveyor.runtime.waiting import wait_until

WAIT = 60


@pytest.fixture
def wait():
    wait_registry = SimpleNamespace(lock=threading.RLock(), end=lambda _: None)
    made = Wait(wait_registry, 7, lambda _: (), False, "waits for the b.big")
    made.blockers = ((2, 9, "waits for the b.big"),)
    made.resolve = lambda requested, now: None
    return made


def found_of(wait):
    return Found(wait.work, wait.stamp, ("the a.get waits for the b.big",), ("a",), frozenset())


def inbox():
    return SimpleNamespace(count=0, requested=0, wait=lambda seen, seconds: False)


def test_what_came_before_it_was_found_is_taken(wait):
    """A busy machine may have any time pass between a look in vain and the next line."""
    looks = []

    def ready():
        looks.append(len(looks))
        if len(looks) == 1:  # it comes right after this look; and then all hosts are asked
            wait.found = found_of(wait)
            return False
        return True

    wait_until(inbox(), ready, WAIT, str, str, wait)
    assert len(looks) == 2


def test_what_was_looked_for_in_vain_since_is_an_error(wait):
    wait.found = found_of(wait)
    with pytest.raises(DeadlockError, match=r"the a\.get waits for the b\.big"):
        wait_until(inbox(), lambda: False, WAIT, str, str, wait)


def test_what_was_found_of_another_wait_is_not(wait):
    wait.found = found_of(wait)
    wait.stamp += 1
    assert not wait._heed()
    assert wait.found is None
