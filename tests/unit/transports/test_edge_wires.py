"""Ends of the wire beside an edge, over rings that say what a test has them say."""

from collections import deque
from types import SimpleNamespace

import pytest

from conveyor import _core
from conveyor.graph.edges import Whereabouts
from conveyor.worker.out_of_band import EdgeWire


class Ring:
    """A reader's end. ``looked()`` is called when it has been found empty."""

    kind = _core.KIND_VALUE

    def __init__(self, looked):
        self.said, self._looked = deque(), looked

    def open(self, *_, **_options):
        return self

    def receive(self):
        if not self.said:
            self._looked()
            return _core.EMPTY
        message = self.said.popleft()
        if isinstance(message, Exception):
            raise message
        return message


def reader_of(ring, last):
    end = SimpleNamespace(
        edge=0,
        rank=1,
        members=("writer", "reader"),
        overlap=False,
        where=Whereabouts(),
        sends=Ring(lambda: None),
        receives=(ring,),
        last=last,
    )
    assignment = SimpleNamespace(sources={0: "a value"}, name="graph", graph=1)
    return EdgeWire(None, None, assignment, end, None, lambda: None)


def test_the_last_word_does_not_overtake_what_was_said_before_it():
    """The writer speaks just when its reader has looked into one of the rings, and not into the other."""
    looks = []

    def speak():
        looks.append(1)
        if len(looks) == 1:
            ring.said.append("before")
            last.said.append("last")

    ring, last = Ring(speak), Ring(speak)
    wire = reader_of(ring, last)
    heard = [word for _ in range(2) for word in wire.receive()]
    assert heard == [(0, "before"), (0, "last")]


def test_what_came_before_a_message_that_cannot_be_taken_is_kept():
    ring, last = Ring(lambda: None), Ring(lambda: None)
    wire = reader_of(ring, last)
    ring.said.extend(["before", ValueError("not to be had")])
    last.said.append("last")
    with pytest.raises(ValueError, match="not to be had"):
        wire.receive()
    assert wire.receive() == [(0, "before"), (0, "last")]
