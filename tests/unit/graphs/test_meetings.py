"""Ranks meet in the operations of a communicator: who begins when, and what becomes of those that are left.

Each process is played by its line, and its graphs by programs that only note what they are told.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import pytest

from conveyor.exceptions import TransportError
from conveyor.transport.communicator import Gathering, Line
from conveyor.worker.graphs.meetings import Meeting

RANKS = 3


class Wire:
    """From one rank to the others; in each process it has an end."""

    edge, overlap, laid = "edge #0", False, 1

    def __init__(self, writer: int, process: int, boxes: list[deque[Any]]) -> None:
        self.rank = 0 if writer == process else 1
        self.members = (f"r{writer}", "others")
        self._process = process
        self._boxes = boxes

    def send(self, message: Any) -> None:
        for process, box in enumerate(self._boxes):
            if process != self._process:
                box.append((0, message))

    def receive(self) -> list[Any]:
        box = self._boxes[self._process]
        return [box.popleft() for _ in range(len(box))]

    def ring(self) -> None:
        """Everybody is looked at all the time."""


class Place:
    """Where operations meet: whoever comes waits for the others, who must have come for the same."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.here: dict[int, str] = {}
        self.met: list[str] = []
        self.mixed: list[dict[int, str]] = []


class Copy:
    """A communicator in one process."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.over = False

    def open(self) -> Copy:  # as what is sealed does
        return Copy(self.place)

    def initialize(self, rank: int) -> None:
        self.rank = rank

    def meet(self, name: str) -> str:
        place = self.place
        with place.changed:
            place.here[self.rank] = name
            if len(place.here) == RANKS:
                if len(set(place.here.values())) > 1:
                    place.mixed.append(dict(place.here))
                place.met.append(name)
                place.here.clear()
                place.changed.notify_all()
                return name
            seen = len(place.met)
            while len(place.met) == seen:
                if self.over:
                    place.here.pop(self.rank, None)
                    raise OSError("destroyed")
                place.changed.wait(0.01)
            return name

    def destroy(self) -> None:
        self.over = True


class Function:
    """A rank's part of a collective of one graph."""

    operation, communicator = "allreduce", "communicator c"
    names = tuple(f"r{rank}" for rank in range(RANKS))

    def __init__(self, rank: int, graph: str) -> None:
        self.rank = rank
        self.graph = graph

    def begin(self, inputs: Any) -> Any:
        return lambda communicator: communicator.meet(self.graph)


class Program:
    execution = 0

    def __init__(self) -> None:
        self.outcomes: list[Any] = []

    def resume(self, value: Any, error: Any) -> None:
        self.outcomes.append(value if error is None else error)
        self.execution += 1


class Limits:
    def cancelled(self, execution: int) -> bool:
        return False

    failed = cancelled

    def deadline(self, execution: int) -> int:
        return 0


class Session:
    """Three processes with two graphs, ``"A"`` and ``"B"``, of one communicator."""

    def __init__(self, generations: tuple[int, ...] = (1, 2, 3)) -> None:
        self.place = Place()
        sealed: Any = Copy(self.place)

        def start(target: Any, name: str) -> None:
            threading.Thread(target=target, daemon=True).start()

        self.lines = [
            Line("communicator c", sealed, rank, start, generations[rank]) for rank in range(RANKS)
        ]
        self.ends: dict[str, list[list[Gathering]]] = {}
        self.meetings: dict[tuple[str, int], Meeting] = {}
        self.programs: dict[tuple[str, int], Program] = {}
        for graph in "AB":
            boxes: list[list[deque[Any]]] = [[deque() for _ in range(RANKS)] for _ in range(RANKS)]
            self.ends[graph] = []
            for rank, line in enumerate(self.lines):
                wires: list[Any] = [Wire(writer, rank, boxes[writer]) for writer in range(RANKS)]
                ends = [Gathering(wire, writer, line) for writer, wire in enumerate(wires)]
                program: Any = Program()
                function: Any = Function(rank, graph)
                others: Any = Limits(), None, []
                self.ends[graph].append(ends)
                self.programs[graph, rank] = program
                self.meetings[graph, rank] = Meeting(function, [], ends, program, *others)

    def start(self, graph: str, rank: int) -> None:
        self.meetings[graph, rank].start([])

    def pump(self) -> None:
        for graph, processes in self.ends.items():
            for rank, ends in enumerate(processes):
                for end in ends:
                    end.progress()
                self.meetings[graph, rank].progress()

    def until(self, done: Any) -> None:
        limit = time.monotonic() + 60
        while not done():
            assert time.monotonic() < limit, "nothing comes of it"
            self.pump()
            time.sleep(0.001)

    def outcomes(self, graph: str) -> list[list[Any]]:
        return [self.programs[graph, rank].outcomes for rank in range(RANKS)]

    def close(self) -> None:
        for processes in self.ends.values():
            for ends in processes:
                for end in ends:
                    end.close()


@pytest.fixture
def three():
    session = Session()
    yield session
    session.close()


def test_graphs_that_come_in_opposite_orders_meet_in_one(three):
    for rank, order in enumerate(("AB", "BA", "BA")):
        for graph in order:
            three.start(graph, rank)
    three.until(lambda: three.outcomes("A") == [["A"]] * 3 and three.outcomes("B") == [["B"]] * 3)
    assert not three.place.mixed
    assert sorted(three.place.met) == ["A", "B"]


def test_whoever_is_not_coming_frees_the_others(three):
    three.start("A", 0)
    three.start("A", 1)
    three.until(lambda: sorted(three.place.here) == [0, 1])
    # The last one has come to it, and is given up before it has its turn.
    three.lines[2].add = lambda job: None
    three.start("A", 2)
    three.meetings["A", 2].cancel()
    del three.lines[2].add
    three.until(lambda: all(three.outcomes("A")))
    for (error,) in three.outcomes("A")[:2]:
        assert isinstance(error, TransportError)
        assert "r2: Unwanted: allreduce was given up" in str(error) or "made anew" in str(error)
    for rank in range(RANKS):
        three.start("B", rank)
    three.until(lambda: three.outcomes("B") == [["B"]] * 3)


def test_an_end_that_is_broken_fails_what_waits_there(three):
    three.start("A", 0)
    three.until(lambda: 0 in three.place.here)
    three.ends["A"][0][1].abort(RuntimeError("no more"))
    three.until(lambda: three.outcomes("A")[0])
    assert "RuntimeError: no more" in str(three.outcomes("A")[0][0])


def test_a_process_that_begins_anew_has_all_make_theirs_anew(three):
    three.until(lambda: all(line.generation == 3 for line in three.lines))
    three.start("A", 0)
    three.start("A", 1)
    three.until(lambda: sorted(three.place.here) == [0, 1])
    three.ends["B"][2][2].tell("anew", None)  # of its own generation, which they have
    three.pump()
    assert not any(three.outcomes("A"))
    three.lines[2].renew(9, "it has died")
    three.until(lambda: all(three.outcomes("A")[:2]))
    assert all("it has died" in str(outcome[0]) for outcome in three.outcomes("A")[:2])
    three.until(lambda: {line.generation for line in three.lines} == {9})
