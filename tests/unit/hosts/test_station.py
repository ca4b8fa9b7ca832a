"""What a host has of a session's processes, where the system refuses something in the middle."""

import errno
import os
from types import SimpleNamespace

import pytest

from conveyor import _core
from conveyor.cluster.node_agent import Station
from conveyor.driver.hosts import Adopt, Bury, Stand
from conveyor.runtime.events import EventLoop
from conveyor.runtime.process import ArenaSize

ARENA = ArenaSize(1 << 24, 1 << 24, 0.0)


class Refuses:
    """Fails at the call of that number; all others are passed on."""

    def __init__(self, function, at):
        self.function, self.left = function, at

    def __call__(self, *args):
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return self.function(*args)


@pytest.fixture
def station():
    events = EventLoop("station-test")
    told = SimpleNamespace(headless=lambda slot: None, asked=lambda *_: None)
    made = Station(1, (0, 1), ARENA, events, told, 3600.0, 1)
    yield made
    for slot, one in list(made._locals.items()):
        made.do(Bury(slot, one.incarnation))
    made.pump.stop()
    events.close()


def test_a_process_of_another_host_can_be_introduced_again_where_that_has_failed(
    station, monkeypatch, opened_since
):
    stand = Stand(3, 1, 0, "another")
    monkeypatch.setattr(station._watches, "add", Refuses(station._watches.add, 1))
    opened = opened_since()
    with pytest.raises(OSError, match=os.strerror(errno.EAGAIN)):
        station.do(stand)
    assert station.board.gone(3, 1)
    assert not opened()
    station.do(stand)
    assert not station.board.gone(3, 1)
    station.do(Bury(3, 1))
    assert station.board.gone(3, 1)
    assert not opened()


@pytest.mark.parametrize("at", [1, 2])
def test_of_a_process_that_cannot_be_adopted_nothing_is_left(
    station, monkeypatch, at, opened_since
):
    from conveyor.cluster import node_agent as module

    pair = Refuses(module.socket.socketpair, at)
    monkeypatch.setattr(module.socket, "socketpair", pair)
    opened = opened_since()
    with pytest.raises(OSError, match=os.strerror(errno.EAGAIN)) as raised:
        station.do(Adopt(3, 1, "one"))
    # Also while somebody has the error, and with it the frames that it went through.
    assert not opened(), raised
    assert station.board.gone(3, 1)
    assert station.board.eventfd(3) == -1
    station.do(Adopt(3, 1, "one"))
    assert _core.Board.gone(station.board, 3, 1) is False
