"""Whether what a dead process had sent has come to other hosts: asked once, and told when it is so."""

import errno
from types import SimpleNamespace

import pytest

from conveyor import _core
from conveyor.driver.hosts import CountDue, GiveUp, TellWhenCome
from conveyor.driver.remote_processes import FarHosts
from conveyor.driver.requests import Arrivals
from conveyor.exceptions import RuntimeStateError
from conveyor.futures import Future

MAKER, READER, ANOTHER, HERE = (5, 1), (6, 1), (7, 1), (0, 1)
#: Of which host each process is, by slot.
HOMES = {5: 1, 6: 2, 7: 2}
DUE = ((9, 0, 4), (11, 1, 2))


class Host:
    """Another host, which answers when the test says so."""

    def __init__(self, number):
        self.number, self.name = number, f"host {number}"
        self.asked = []

    def tell(self, order):
        done = Future()
        self.asked.append((order, done))
        return done

    send = tell

    def answers(self, answer=None):
        """To the only question; which one that was."""
        ((order, done),) = self.asked
        self.asked.clear()
        if isinstance(answer, Exception):
            done.set_exception(answer)
        else:
            done.set_result(answer)
        return order


class Pump:
    """Of the driver's host."""

    def __init__(self):
        self.awaited = []

    def due(self):
        return [(2, 9, 0, 4), (1, 8, 0, 3), (2, 11, 1, 2)]

    def tell_when_come(self, host, frames, number):
        self.awaited.append((host, frames, number))

    def give_up(self, host, reason):
        """Nothing is awaited of it."""


class World:
    def __init__(self):
        board = SimpleNamespace(name=lambda slot: f"process {slot}")
        self.abroad = FarHosts(SimpleNamespace(slot=0, board=board), lambda: None)
        self.hosts = {number: Host(number) for number in (1, 2)}
        self.abroad._hosts.update(self.hosts)
        self.abroad._host_of = HOMES
        self.pump = self.abroad._pump = Pump()
        self.left, self.readers = [], [READER]
        self.asked = []
        self.maker = MAKER
        self.arrivals = Arrivals(
            SimpleNamespace(look=self.look), self.abroad, SimpleNamespace(soon=self.left.append)
        )
        self.abroad.on_given_up = self.arrivals.given_up

    def look(self):
        """As the rendezvous does: each reader is asked once nothing of the maker's is on its way to it."""
        host = self.abroad.host_of(self.maker[0])
        for reader in self.readers:
            if reader not in self.asked and not self.arrivals.pending(host, self.maker, reader):
                self.asked.append(reader)

    def do_chores(self):
        while self.left:
            self.left.pop()()

    @property
    def kept(self):
        return self.arrivals._asked or self.arrivals._come


@pytest.fixture
def world():
    return World()


def test_one_question_each_and_nothing_is_kept(world):
    maker, reader = world.hosts[1], world.hosts[2]
    world.readers.append(ANOTHER)
    for _ in range(3):
        world.look()
        world.do_chores()
    assert maker.answers(DUE) == CountDue(2)
    order = reader.answers()
    assert order == TellWhenCome(1, DUE, order.number)
    world.look()
    assert world.asked == []
    world.arrivals.come(order.number)
    assert world.asked == [READER, ANOTHER]
    assert not world.kept
    world.arrivals.come(order.number)  # no question of that number is open
    assert not maker.asked
    assert not reader.asked


def test_of_nothing_that_is_due_nobody_is_asked(world):
    world.look()
    world.do_chores()
    world.hosts[1].answers(())
    assert world.asked == [READER]
    assert not world.hosts[2].asked
    assert not world.kept


def test_the_drivers_host_is_asked_without_an_order(world):
    world.maker = HERE
    world.look()
    world.do_chores()
    order = world.hosts[2].answers()
    assert order == TellWhenCome(0, DUE, order.number)
    world.arrivals.come(order.number)
    assert world.asked == [READER]
    world.maker, world.readers = MAKER, [HERE]
    world.look()
    world.do_chores()
    world.hosts[1].answers(DUE)
    ((host, frames, number),) = world.pump.awaited
    assert (host, frames) == (1, DUE)
    world.arrivals.come(number)
    assert world.asked == [READER, HERE]
    assert not world.kept


@pytest.mark.parametrize("when", ["it is asked", "its frames are awaited"])
def test_the_makers_host_is_lost(world, when):
    """What did not come by then does not come to a host that has given it up."""
    world.look()
    world.do_chores()
    if when == "it is asked":
        world.hosts[1].answers(RuntimeStateError("node host 1 is lost"))
        assert not world.kept
    else:
        world.hosts[1].answers(DUE)
        world.hosts[2].answers()
    world.abroad.gone(1)
    assert world.asked == []
    assert world.hosts[2].answers() == GiveUp(1)
    assert world.asked == [READER]
    assert not world.kept


@pytest.mark.parametrize("when", ["the maker's is asked", "it is asked", "it waits"])
def test_the_readers_host_is_lost(world, when):
    """Its readers are dead: what they had not claimed is given up because of that."""
    world.look()
    world.do_chores()
    if when != "the maker's is asked":
        world.hosts[1].answers(DUE)
    if when == "it is asked":
        world.hosts[2].answers(RuntimeStateError("node host 2 is lost"))
        assert not world.kept
    elif when == "it waits":
        world.hosts[2].answers()
    world.readers.clear()
    world.abroad.gone(2)
    assert world.asked == []
    assert not world.kept


def test_at_the_end_of_the_session_no_pump_answers(world):
    world.maker = HERE

    def stopped():
        raise OSError(errno.ESHUTDOWN, "the pump was stopped")

    world.pump.due = stopped
    world.look()
    world.do_chores()
    assert not world.kept
    world.abroad._pump = None
    world.look()
    world.do_chores()
    assert not world.kept


def test_another_error_is_not_taken_for_an_answer(world):
    world.maker = HERE

    def broken():
        raise OSError(errno.ENOMEM, "no memory")

    world.pump.due = broken
    world.look()
    with pytest.raises(OSError, match="no memory"):
        world.do_chores()
    assert world.asked == []


def test_the_error_of_a_pump_that_has_stopped_is_the_one_that_is_looked_for():
    pump = _core.HostPump(_core.Board.create(4), 0, 3600.0)
    pump.stop()
    for ask in (pump.due, lambda: pump.tell_when_come(1, ((1, 0, 1),), 7)):
        with pytest.raises(BrokenPipeError):
            ask()
