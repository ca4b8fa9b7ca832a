"""What graphs are called, for who looks from outside: it is whole, however little is taken at a time."""

import errno
import os

import pytest

from conveyor.driver import deployments as module
from conveyor.driver.deployments import Roster, read_roster


def read(roster):
    with open(os.dup(roster._file.fileno()), "rb") as file:
        file.seek(0)
        return {number: graph.name for number, graph in read_roster(file).items()}


@pytest.fixture
def taken(monkeypatch):
    """How many bytes the kernel takes at a time, and in all; changed by a test."""
    limits = {"once": 1 << 20, "left": 1 << 20}

    class File(module.FileIO):
        def write(self, data):
            if not limits["left"]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            took = super().write(bytes(data)[: min(limits["once"], limits["left"])])
            limits["left"] -= took
            return took

    monkeypatch.setattr(module, "FileIO", File)
    return limits


def test_what_the_kernel_takes_in_parts_is_whole(taken):
    taken["once"] = 5
    roster = Roster()
    for number in (1, 2, 3):
        roster.note(number, f"graph {number}", {1: "A.run"})
    roster.forget(2)
    assert read(roster) == {1: "graph 1", 3: "graph 3"}
    roster.close()


def test_a_line_that_is_broken_off_spoils_no_other(taken):
    roster = Roster()
    roster.note(1, "first", {})
    taken["left"] = 7
    with pytest.raises(OSError, match="No space"):
        roster.note(2, "second", {})
    taken["left"] = 1 << 20
    roster.forget(2)  # as a compile does that has failed
    roster.note(3, "third", {})
    assert read(roster) == {1: "first", 3: "third"}
    roster.close()
