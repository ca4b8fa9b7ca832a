"""Duplicates of descriptors: none is lost, whatever a signal handler breaks off."""

import os
import sys
from contextlib import suppress

import pytest

from conveyor._core import Duplicates
from conveyor.runtime.process import dup_all


@pytest.fixture
def pair():
    made = os.pipe()
    yield made
    for fd in made:
        os.close(fd)


def open_of(pair):
    """How many descriptors there are of that pipe.

    Threads of earlier tests may close others at any time, whose numbers are had again."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            found += os.path.sameopenfile(pair[0], int(fd))
    return found


class Interrupted(BaseException):
    pass


def interrupted_at(number, work):
    """Do ``work()``, and raise an error at its opcode of that number. Return whether there was one."""
    left = [number]

    def trace(frame, event, arg):
        if frame.f_code is not work.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left[0] -= 1
            if left[0] == 0:
                raise Interrupted
        return trace

    # Python 3.12 tells of opcodes only if some frame had asked for them before the tracing began.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        work()
    except Interrupted:
        return True
    finally:
        sys.settrace(None)
    return left[0] <= 0


def used(pair):
    """Work that duplicates, and closes again."""

    def work():
        fds = Duplicates(pair)
        try:
            os.fstat(fds.numbers()[1])
        finally:
            fds.close()

    return work


def test_they_are_closed_with_what_holds_them(pair):
    fds = Duplicates(pair)
    assert len(fds.numbers()) == 2
    assert open_of(pair) == 4
    del fds
    assert open_of(pair) == 2


def test_who_takes_them_closes_them(pair):
    fds = dup_all(pair)
    assert open_of(pair) == 4
    for fd in fds:
        os.close(fd)
    assert open_of(pair) == 2


def test_all_or_none(pair):
    with pytest.raises(OSError, match="Bad file descriptor"):
        Duplicates([*pair, -1])
    with pytest.raises(OSError, match="Bad file descriptor"):
        dup_all([*pair, -1])
    assert open_of(pair) == 2


def test_an_interrupt_between_any_two_opcodes_loses_none(pair):
    number = 1
    while interrupted_at(number, used(pair)):
        assert open_of(pair) == 2, f"after opcode {number}"
        number += 1
    assert number > 15  # Python 3.12 has fewer, larger opcodes
    assert open_of(pair) == 2
