"""Waiting until tensors of a device have their values, with a device and a process that are stand-ins."""

import threading
from types import SimpleNamespace

import pytest

from conveyor.direct import devices as filled

WHERE = SimpleNamespace(slot=1, incarnation=1, number=5)
WAIT = 60


class Board:
    def gone(self, slot, incarnation):
        return False

    def note_fetch(self, *about):
        pass


class Process:
    def __init__(self):
        self.board, self.slot = Board(), 0
        self.rung = threading.Event()

    def ring(self):
        self.rung.set()


class Event:
    def __init__(self):
        self.happened = False

    def query(self):
        if self.happened is None:
            raise RuntimeError("the device has failed")
        return self.happened


@pytest.mark.parametrize("becomes", [True, None], ids=["happens", "fails"])
def test_the_bell_rings_when_values_are_there_or_the_device_has_failed(becomes):
    event, process = Event(), Process()
    one = filled._Filling(event, WHERE, 4, process)
    assert not process.rung.is_set()
    event.happened = becomes
    assert process.rung.wait(WAIT)
    one.give_up()


def test_nobody_looks_for_what_was_given_up_by_who_is_interrupted(monkeypatch):
    def interrupt(_self):
        raise KeyboardInterrupt

    one = filled._Filling(Event(), WHERE, 4, Process())
    with monkeypatch.context() as patched:
        patched.setattr(filled.UnderWay, "end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            one.give_up()
    assert one not in filled.LOOKS._all
    one.give_up()
