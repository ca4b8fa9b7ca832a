"""What is done when a process has ended, and locks that are lent for it."""

import threading
from types import SimpleNamespace

import pytest

from conveyor.driver.supervisor import Burial, Step
from conveyor.runtime.threads import lent

RECORD = SimpleNamespace(id=SimpleNamespace(name="actor"))


def fail(text):
    def step(record):
        raise ValueError(text)

    return step


def test_steps_are_taken_in_their_order():
    taken = []
    names = "announced", "closed", "told"
    burial = Burial(*(Step(name, lambda record, name=name: taken.append(name)) for name in names))
    burial.of(RECORD)
    assert tuple(taken) == names


def test_each_step_is_taken_whatever_the_others_raise(caplog):
    taken = []
    burial = Burial(
        Step("first", fail("one")), Step("second", fail("two")), Step("third", taken.append)
    )
    with pytest.raises(ValueError, match="one"):
        burial.of(RECORD)
    assert taken == [RECORD]
    assert "actor: second has failed" in caplog.text


def test_one_that_could_not_be_started_has_fewer():
    taken = []
    burial = Burial(
        Step("known", lambda record: taken.append("known")),
        Step("made", lambda record: taken.append("made"), unborn=True),
    )
    burial.of(RECORD, unborn=True)
    assert taken == ["made"]


def test_a_lock_that_is_lent_can_be_taken_by_others_and_is_given_back():
    held, other = threading.RLock(), threading.RLock()
    taken = []

    def take():
        with held:
            taken.append(True)

    def is_free():
        """For another thread."""
        free = []

        def look():
            if held.acquire(blocking=False):
                held.release()
                free.append(True)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return bool(free)

    with held, held:
        with lent(held, other):
            thread = threading.Thread(target=take)
            thread.start()
            thread.join()
        assert taken
        assert not is_free()
    assert is_free()
