"""What the driver keeps of links between actors."""

from types import SimpleNamespace

import pytest

from conveyor import _core
from conveyor.calls import links
from conveyor.driver.actors import Introduced
from conveyor.driver.network import Network
from conveyor.exceptions import ActorDiedError, RuntimeStateError
from conveyor.runtime.process import Place


class Abroad:
    """What other hosts are told, in order."""

    def __init__(self):
        self.told = []

    def host_of(self, slot):
        return slot

    def behind_its_last(self, record, to, then):
        self.told.append(("wait for what is due", to))
        then()

    def forget(self, number):
        self.told.append(("forget", number))

    def mark_refused(self, caller, number):
        self.told.append(("mark", number))


def record(slot, host):
    return SimpleNamespace(
        slot=slot,
        host=host,
        mailboxes={},
        callers={},
        refusals={},
        introduced=[],
        control_link=None,
        control_lock=_NoLock(),
        bits=SimpleNamespace(give_back=lambda bit: None),
        alive=True,
        order=lambda order: None,
    )


class _NoLock:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


@pytest.fixture
def network():
    made = Network.__new__(Network)
    made._abroad = Abroad()
    made._board = _core.Board.create(4)
    made._board.prepare(1, "caller")
    return made


def linked(caller, callee, number, shared):
    blueprint = links.link_blueprint(Place(1, 1, 1), Place(2, 1, 1), 4)
    laid = Introduced(
        number, caller, callee, 1, blueprint.make(), SimpleNamespace(_number=7), shared
    )
    callee.introduced.append(laid)
    callee.callers[number] = caller
    caller.mailboxes[number] = callee, 1, shared
    return laid


@pytest.mark.parametrize("host", [None, "another"])
def test_no_host_keeps_a_segment_of_a_link_that_was_refused(network, host):
    caller, callee = record(1, host), record(2, None)
    laid = linked(caller, callee, 3, 44)
    network.refuse(callee, 7, RuntimeStateError("no room"))
    assert network._abroad.told == [*[("mark", 44)] * bool(host), ("forget", 44)]
    assert bool(links.Refusal(laid.segment)) is not bool(host)
    assert not callee.callers
    assert not caller.mailboxes


def test_no_host_keeps_segments_of_links_of_the_dead(network):
    dead, other = record(1, None), record(2, "another")
    linked(dead, other, 3, 44)
    linked(other, dead, 4, 55)
    network.ended(dead)
    assert network._abroad.told == [("wait for what is due", 2), ("forget", 55), ("forget", 44)]
    assert [dead.callers, dead.mailboxes, other.callers, other.mailboxes] == [{}] * 4


def test_who_is_called_on_a_node_that_is_lost_meanwhile_is_dead(network):
    """Its host says only that it is lost."""
    died, caller, callee = [], record(1, "one"), record(2, "another")

    def lose(*_):
        died.append("the actor has died")
        raise RuntimeStateError("the node is lost")

    def check_alive():
        if died:
            raise ActorDiedError(*died, "callee")

    network._abroad.spread = lose
    network._of = lambda _: []
    for one in (caller, callee):
        one.reader, one.actor = (one.slot, 1), SimpleNamespace(max_concurrency=None)
    callee.check_alive, taken = check_alive, [7]
    callee.bits = SimpleNamespace(take=taken.pop, give_back=taken.append)
    with pytest.raises(ActorDiedError, match="the actor has died"):
        network.link(caller, callee)
    assert taken == [7]
    assert network._abroad.told == [("forget", 0)]
