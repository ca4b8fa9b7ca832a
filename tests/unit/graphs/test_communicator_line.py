"""Turns with a communicator, where what belongs to one edge goes wrong on another one's turn."""

import threading

import pytest

pytest.importorskip("torch")

from conveyor.exceptions import SystemLimitError
from conveyor.transport.communicator import Job, Line


class Quiet:
    """A communicator that does nothing."""

    def initialize(self, rank):
        pass

    def destroy(self):
        pass


class Sealed:
    def open(self):
        return Quiet()


class Edge:
    """What a conduit is to its line."""

    def __init__(self, line):
        self.line = line
        self.rung = threading.Event()
        self.generations = []
        self.outcomes = []
        self.fault = None
        line.join(self, self.renewed, self.rung.set)

    def raise_fault(self):
        if self.fault is not None:
            raise self.fault

    def renewed(self, generation):
        self.raise_fault()
        self.generations.append(generation)

    def ended(self, made, error):
        self.outcomes.append((made, error))
        self.raise_fault()

    def add(self, call, began=lambda: None):
        self.line.add(Job(self, (0, 1), call, None, lambda: True, began, self.ended))

    def progress(self):
        """As its program does when it is rung."""
        assert self.rung.wait(60)
        self.rung.clear()
        self.line.advance()
        self.line.check(self)


@pytest.fixture
def start():
    threads = []

    def start(target, name):
        threads.append(threading.Thread(target=target, daemon=True))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(60)


@pytest.fixture
def line(start):
    made = Line("communicator", Sealed(), 0, start)
    yield made
    for conduit in list(made._conduits):
        made.leave(conduit)


def fail(communicator):
    raise OSError("no pigeons")


def until(edge, done):
    while not done():
        edge.progress()


def test_an_edge_whose_peers_cannot_be_told_harms_no_other(line):
    one, other = Edge(line), Edge(line)
    one.fault = OSError("its wire is broken")
    other.add(fail)
    until(other, lambda: other.generations == [1])
    assert "no pigeons" in str(other.outcomes[0][1])
    assert one.generations == []
    with pytest.raises(OSError, match="its wire is broken"):
        one.progress()
    line.check(one)  # it is told once
    line.leave(one)
    other.add(lambda communicator: "moved")
    until(other, lambda: len(other.outcomes) == 2)
    assert other.outcomes[1] == ("moved", None)


def test_an_outcome_that_cannot_be_told_harms_no_other(line):
    one, other = Edge(line), Edge(line)
    one.add(lambda communicator: 1)
    one.fault = OSError("its wire is broken")
    other.add(lambda communicator: 2)
    assert one.rung.wait(60)
    line.advance()  # the other one's turn
    assert one.outcomes == [(1, None)]
    until(other, lambda: other.outcomes)
    assert other.outcomes == [(2, None)]
    with pytest.raises(OSError, match="its wire is broken"):
        line.check(one)


def test_a_beginning_that_cannot_be_told_is_that_edges_fault(line):
    one, other = Edge(line), Edge(line)
    gate = threading.Event()

    def began():
        raise OSError("its wire is broken")

    one.add(lambda communicator: gate.wait(60), began)
    with pytest.raises(OSError, match="its wire is broken"):
        line.check(one)
    other.add(lambda communicator: 2)
    line.leave(one)  # as it is taken down for that
    gate.set()
    until(other, lambda: other.outcomes)
    assert other.outcomes == [(2, None)]


def test_where_no_thread_is_to_be_had_that_transfer_fails(line, start):
    edge = Edge(line)

    def none(target, name):
        raise RuntimeError("can't start new thread")

    line._start = none
    edge.add(lambda communicator: 1)
    assert "can't start" in str(edge.outcomes[0][1])
    line._start = start
    edge.add(lambda communicator: 2)
    until(edge, lambda: len(edge.outcomes) == 2)
    assert edge.outcomes[1] == (2, None)


def test_it_is_made_anew_where_no_thread_can_wait_for_its_end(line, start, caplog):
    edge = Edge(line)
    edge.add(lambda communicator: 1)
    until(edge, lambda: edge.outcomes)

    def none(target, name):
        raise SystemLimitError(11, "can't start new thread")

    line._worker._start = none
    edge.add(fail)
    until(edge, lambda: edge.generations == [1])
    assert "destroy() of a communicator has failed" in caplog.text
    edge.add(lambda communicator: 3)
    until(edge, lambda: len(edge.outcomes) == 3)
    assert edge.outcomes[2] == (3, None)
