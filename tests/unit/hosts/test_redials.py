"""When a host that cannot be reached is tried again."""

import threading

import pytest

from conveyor.cluster import connections
from conveyor.cluster.connections import Redials
from conveyor.cluster.handshake import HandshakeError
from conveyor.flag import Flag


class Dialled:
    """A host that is reached at the tries that the test says, and what was waited for in between."""

    def __init__(self):
        self.tries, self.pauses = 0, []
        self.fails, self.error = 0, ConnectionRefusedError()

    def dial(self, _host):
        self.tries += 1
        if self.fails:
            self.fails -= 1
            raise self.error


@pytest.fixture
def dialled(monkeypatch):
    """Nothing waits but for the flag."""

    class Passes(Flag):
        def wait(self, timeout=None):
            made.pauses.append(timeout)
            return self.is_set()

    made = Dialled()
    monkeypatch.setattr(connections, "Flag", Passes)
    return made


@pytest.fixture
def connected(dialled):
    """Redials of a host that was reached once."""

    def of(window):
        one = Redials(dialled.dial, window)
        one.prepare(1)
        one.greeted(1)
        made.append(one)
        return one

    made = []
    yield of
    threads = [one for one in threading.enumerate() if one.name == "conveyor-redial"]
    for one in made:
        one.lost(1)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize(("window", "longest"), [(1.0, 0.125), (3.0, 0.375), (60.0, 0.5)])
@pytest.mark.parametrize("error", [ConnectionRefusedError(), HandshakeError("not now")])
def test_the_longer_it_is_away_the_longer_are_the_pauses(
    dialled, connected, window, longest, error, wait_until
):
    dialled.fails, dialled.error = 40, error
    connected(window).broken(1)
    wait_until(lambda: dialled.tries == 41, 60)
    # At once first; then soon, and then ever more seldom.
    could_be = [min(0.01 * 1.5**n, longest) for n in range(40)]
    assert len(dialled.pauses) == 40
    assert all(0.75 * most <= p <= most for p, most in zip(dialled.pauses, could_be, strict=True))
    assert len(set(dialled.pauses)) == 40  # by chance, so that not all come back at one moment


def test_one_that_was_back_is_tried_at_once_when_it_is_away_again(dialled, connected, wait_until):
    one = connected(1.0)
    for _ in range(3):
        dialled.fails, dialled.tries, dialled.pauses[:] = 6, 0, []
        one.broken(1)
        wait_until(lambda: dialled.tries == 7, 60)
        assert len(dialled.pauses) == 6
        assert dialled.pauses[0] <= 0.01
        one.greeted(1)


def test_one_that_ends_each_connection_is_not_dialled_without_a_pause(
    dialled, connected, wait_until
):
    """It has given this host up, which does not know it yet."""
    one = connected(1.0)
    for n in range(1, 11):
        one.broken(1)
        wait_until(lambda n=n: dialled.tries == n, 60)
    assert len(dialled.pauses) == 9
    assert all(0.09 <= pause <= 0.125 for pause in dialled.pauses[-2:])


@pytest.fixture
def prepared(dialled):
    """Redials of a host that is still to be reached."""
    one = Redials(dialled.dial, 1.0)
    one.prepare(1)
    (thread,) = [one for one in threading.enumerate() if one.name == "conveyor-redial"][-1:]
    yield one
    one.lost(1)
    thread.join(60)
    assert not thread.is_alive()


def test_the_first_connection_holds_up_nobody(prepared, dialled, wait_until):
    goes_on, told = threading.Event(), []
    prepared.begin(1, lambda: goes_on.wait(60), told.append)
    assert told == []
    goes_on.set()
    wait_until(lambda: told == [None], 60)
    prepared.broken(1)
    wait_until(lambda: dialled.tries == 1, 60)


@pytest.mark.parametrize("error", [ConnectionRefusedError("nobody"), HandshakeError("not let in")])
def test_who_has_ordered_the_first_one_is_told_why_there_is_none(prepared, wait_until, error):
    def refuse():
        raise error

    told = []
    for n in range(1, 3):
        prepared.begin(1, refuse, told.append)
        wait_until(lambda n=n: len(told) == n, 60)
    assert told == [error, error]
    prepared.begin(1, lambda: None, told.append)
    wait_until(lambda: told[2:] == [None], 60)


def test_a_host_that_is_lost_while_it_is_dialled_ends_the_thread(prepared, wait_until):
    goes_on, told = threading.Event(), []
    prepared.begin(1, lambda: goes_on.wait(60), told.append)
    prepared.lost(1)
    goes_on.set()
    wait_until(lambda: told == [None], 60)
