"""Groups in the driver that end while something else is done with them."""

import os
from types import SimpleNamespace

import pytest

from conveyor import _core
from conveyor.driver.groups import DriverCollectives
from conveyor.driver.remote_processes import FarHosts
from conveyor.exceptions import RuntimeStateError
from conveyor.runtime.process import close_all, dup_all
from conveyor.runtime.protocol import ActorId


class Record:
    """What a process of an actor is to groups."""

    def __init__(self, board, slot):
        board.prepare(slot, f"rank {slot}")
        self.id = ActorId(slot, f"rank {slot}")
        self.reader = (slot, board.incarnation(slot))
        self.alive, self.host = True, None

    def check_alive(self):
        assert self.alive


class Network:
    """Gives descriptors of pipes; ``meanwhile`` is done before."""

    def __init__(self, meanwhile=lambda: None):
        self.meanwhile = meanwhile
        self.pipe = os.pipe()

    def duplicates(self, records):
        self.meanwhile()
        return dup_all([fd for _ in records for fd in self.pipe])


@pytest.fixture
def world():
    board = _core.Board.create(8)
    records = [Record(board, slot) for slot in (1, 2, 3)]
    by_actor = {record.id: record for record in records}
    table = SimpleNamespace(board=board, check_open=lambda: None, closed=False)
    network = Network()
    groups = DriverCollectives(
        table,
        SimpleNamespace(current=by_actor.__getitem__),
        network,
        FarHosts(table, None),
        None,
        None,
    )
    yield SimpleNamespace(groups=groups, records=records, network=network)
    groups.end()
    close_all(network.pipe)


def opened(world, creator=None):
    return world.groups.open([record.id for record in world.records[:2]], creator=creator)


def test_one_that_is_destroyed_while_it_is_joined_gives_no_descriptor(world, opened_since):
    number, more = opened(world), opened_since()
    segment = world.groups._groups[number].segment.fd
    world.network.meanwhile = lambda: world.groups.close(number)
    with pytest.raises(RuntimeStateError, match="has been destroyed"):
        world.groups.joined_by(world.records[0], number)
    assert not more()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(segment)


def test_it_is_there_for_who_joins_until_then(world):
    number = opened(world)
    membership, fds = world.groups.joined_by(world.records[1], number)
    assert (membership.rank, len(fds)) == (1, 5)
    close_all(fds)


@pytest.mark.parametrize("dead", [(2,), (0, 1)])
def test_a_burial_closes_what_is_nobodys(world, dead, opened_since):
    more = opened_since()
    number = opened(world, creator=world.records[2])
    assert more()
    for index in dead:
        assert number in world.groups._groups
        world.records[index].alive = False
        world.groups.actor_ended(world.records[index])
    assert number not in world.groups._groups
    assert not more()


def test_one_whose_creator_has_died_meanwhile_is_closed_at_once(world):
    world.records[2].alive = False  # and buried: nobody looks again
    number = opened(world, creator=world.records[2])
    with pytest.raises(RuntimeStateError, match="has been destroyed"):
        world.groups.joined_by(world.records[0], number)
