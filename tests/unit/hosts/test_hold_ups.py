"""What other hosts are asked about a graph's executions, for who asks whether a wait would end."""

from types import SimpleNamespace

import pytest

from conveyor.graph import result_source as holdups
from conveyor.graph.result_source import HoldUps
from conveyor.graph.telemetry import Afar
from conveyor.plan.model import EXECUTOR


class Epoch:
    def __init__(self):
        self.gate = SimpleNamespace(completed=0)
        self.hosts = {EXECUTOR: "here", 0: "there"}


class Progress:
    """Of one edge, on which nothing has come."""

    first = 0
    rings = ((0, ()),)
    plan = SimpleNamespace(edges=())


@pytest.fixture
def looks():
    """Those that are under way: each is ended by a call of what is there."""
    return []


@pytest.fixture
def hold_ups(looks, monkeypatch):
    monkeypatch.setattr(holdups, "OLD", 0.0)
    executor = SimpleNamespace(
        process=SimpleNamespace(ring=lambda: None),
        afar_later=lambda number, then: looks.append(then),
    )
    return HoldUps(executor, 1)


def asks(hold_ups, epoch, question, again=None):
    """Whether the answer is there."""
    _, known = hold_ups.holder(epoch, Progress, 0, [0], question, again)
    return known


def test_one_look_serves_all_who_asked_before_it(hold_ups, looks):
    epoch = Epoch()
    assert not asks(hold_ups, epoch, 1)
    assert not asks(hold_ups, epoch, 2)
    assert not asks(hold_ups, epoch, 3)
    looks.pop()(Afar())
    # Those who asked when it was under way have another one, which has begun now.
    assert asks(hold_ups, epoch, 1)
    assert not asks(hold_ups, epoch, 2)
    assert len(looks) == 1
    looks.pop()(Afar())
    assert asks(hold_ups, epoch, 2)
    assert asks(hold_ups, epoch, 3)
    assert not looks


def test_who_asks_for_another_process_is_told_once(hold_ups, looks):
    epoch, told = Epoch(), []
    assert not asks(hold_ups, epoch, 1, lambda: told.append(1))
    assert not asks(hold_ups, epoch, 2, lambda: told.append(2))
    looks.pop()(Afar())
    assert told == [1]
    looks.pop()(OSError("the session ends"))
    assert told == [1, 2]
    assert asks(hold_ups, epoch, 2)


def test_a_look_that_cannot_begin_tells_who_has_asked(hold_ups, monkeypatch):
    def refuse(number, then):
        raise OSError("no thread")

    monkeypatch.setattr(hold_ups._executor, "afar_later", refuse)
    told = []
    assert not asks(hold_ups, Epoch(), 1, lambda: told.append(1))
    assert told == [1]


def test_a_question_is_asked_anew_of_a_graph_that_was_restarted(hold_ups, looks):
    """Else a wait whose question it is would look no more."""
    epoch, told = Epoch(), []
    assert not asks(hold_ups, epoch, 1)
    restarted = Epoch()
    looks.pop()(Afar())
    assert not asks(hold_ups, restarted, 1, lambda: told.append(1))
    assert told == []
    looks.pop()(Afar())
    assert told == [1]
    assert asks(hold_ups, restarted, 1)
