"""What an actor tells the driver of its own refs, over connections that may break."""

import errno
import socket
import threading
from types import SimpleNamespace

import pytest

from conveyor import _core
from conveyor.codec import set_up_codec
from conveyor.exceptions import RuntimeStateError, SystemLimitError
from conveyor.refs import actor_exports, exports
from conveyor.refs.actor_exports import ActorExports
from conveyor.refs.exports import Exported, Exports, Peer
from conveyor.refs.imports import Outcome
from conveyor.refs.ref import Ref
from conveyor.runtime import threads
from conveyor.runtime.cleanup import Chores
from conveyor.runtime.messages import receive_message
from conveyor.runtime.sources import Sources

set_up_codec()

WAIT = 60
SOURCE = SimpleNamespace(gate=None, describe=lambda ref: "a ref", is_ready=lambda ref: False)
AT_ONCE = SimpleNamespace(watch=lambda ref, then: then())
CHORES = Chores(_core.Waker(), lambda: None)


class Both:
    """An actor, the driver, and the connections that the actor has opened."""

    def __init__(self, watcher):
        self.rang = threading.Event()
        self.peers = []
        ring = self.rang.set
        self.driver = Exports(
            "session", None, lambda: None, AT_ONCE, (0, 1), lambda *_: False, CHORES
        )
        self.actor = ActorExports(
            "session", 1, None, ring, lambda: watcher, self.connect, lambda: False, Sources()
        )

    def connect(self):
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        died = lambda why: RuntimeError("it has died")  # noqa: E731
        self.peers.append(Peer(self.driver, 1, (1, 1), here, died))
        return there

    def export(self, ref, readers):
        export, ticket = self.actor.export(ref, readers)
        self.actor.confirm([ticket])
        return export

    def wait_until(self, _inbox, ready, *_):
        while not ready():
            assert self.rang.wait(WAIT)
            self.rang.clear()


@pytest.fixture
def watched():
    """Refs that are watched, with what is called when they are done."""
    return []


@pytest.fixture
def both(monkeypatch, watched):
    watcher = SimpleNamespace(watch=lambda ref, then: watched.append((ref, then)))
    made = Both(watcher)
    monkeypatch.setattr(actor_exports, "wait_until", made.wait_until)
    yield made
    made.actor.close()
    for peer in made.peers:
        peer.connection.close()


def test_what_a_ref_comes_to_is_told_again_where_the_connection_has_broken(
    both, watched, wait_until
):
    """The driver has forgotten it with the connection: whoever loads it anew would wait for ever."""
    ref = Ref(SOURCE, -1)
    export = both.export(ref, [(2, 1)])
    both.export(ref, [(2, 1)])
    assert len(watched) == 1, "it is told once over one connection"
    watched.pop()[1]()
    wait_until(lambda: both.driver._entries[export].outcome is not None, WAIT)
    both.driver.actor_ended((2, 1))
    first = both.actor._connection
    both.peers[0].connection.close()
    wait_until(lambda: first.ended and not both.driver.kept, WAIT)
    again = both.export(ref, [(3, 1)])
    assert again == export
    assert both.driver._entries[export].outcome is None
    watched.pop()[1]()
    wait_until(lambda: both.driver._entries[export].outcome is not None, WAIT)


def test_a_value_that_is_fetched_for_one_actor_keeps_no_other_waiting(monkeypatch):
    """Where no thread is left for it, what else goes to that actor waits."""

    def refuse(target, name, *args):
        raise SystemLimitError(errno.EAGAIN, "no thread is left")

    fetching, fetched = threading.Event(), threading.Event()

    def whole(readers):
        fetching.set()
        assert fetched.wait(WAIT)
        return Outcome.failed(ValueError(f"fetched for {readers}"))

    kept = SimpleNamespace(keeps=True, fd=-1)
    stays = SimpleNamespace(ok=True, snapshot=kept, stays_afar=False, whole=whole)
    driver = Exports("session", None, lambda: None, AT_ONCE, (0, 1), lambda *_: False, CHORES)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer = Peer(driver, 1, (1, 1), here, lambda why: RuntimeError("it has died"), SimpleNamespace())
    entry = driver._entries[1, 1] = Exported(None, None)
    entry.outcome = stays
    entry.holders.add(None)
    monkeypatch.setattr(exports.threads, "start", refuse)
    loads = threading.Thread(target=driver.peer_loads, args=(peer, (1, 1), 1, False))
    loads.start()
    assert fetching.wait(WAIT)
    loads.join(WAIT)
    assert not loads.is_alive()
    assert driver.lock.acquire(timeout=WAIT)
    driver.lock.release()
    fetched.set()
    there.settimeout(WAIT)
    (arrived,), _ = receive_message(there)
    assert arrived.export == (1, 1)
    assert not arrived.ok
    there.close()
    peer.connection.close()


def test_what_is_given_up_where_nobody_can_tell_it_is_told_over_the_next_connection(
    both, monkeypatch, wait_until
):
    """A process that has loaded no ref yet has no connection, and maybe no thread to open one with."""
    told, start = [], threads.start

    def refuse(target, name, *args):
        if name == "refs-given-up":
            raise SystemLimitError(errno.EAGAIN, "no thread is left")
        return start(target, name, *args)

    monkeypatch.setattr(both.driver, "peer_gives_up", lambda *given: told.append(given))
    monkeypatch.setattr(actor_exports.threads, "start", refuse)
    both.actor.give_up([((0, 1), 5), ((0, 2), 6)])
    assert not both.peers
    both.export(Ref(SOURCE, -1), [(2, 1)])
    wait_until(lambda: len(told) == 2, WAIT)


def test_what_is_given_up_behind_a_connection_that_has_broken_is_told(
    both, monkeypatch, wait_until
):
    """The driver would keep the value as long as the actor lives."""
    told = []
    monkeypatch.setattr(both.driver, "peer_gives_up", lambda *given: told.append(given[1]))
    both.export(Ref(SOURCE, -1), [(2, 1)])
    both.actor.give_up([((0, 1), 5)])
    wait_until(lambda: told == [5], WAIT)
    first = both.actor._connection
    both.peers[0].connection.close()
    wait_until(lambda: first.ended, WAIT)
    both.actor.give_up([((0, 2), 6)])
    wait_until(lambda: told == [5, 6], WAIT)


def test_what_cannot_be_loaded_is_told_to_who_pickles_it(both):
    """After what can, and once; a connection that has ended meanwhile is an error as well."""
    good, first = both.actor.export(Ref(SOURCE, -1), [(2, 1)])
    copy = both.actor.copy((7, 1))
    _, second = both.actor.export(copy, [(2, 1)])
    with pytest.raises(RuntimeStateError, match="cannot be loaded any more"):
        both.actor.confirm([first, second])
    both.actor.confirm([first, second])
    assert good in both.driver._entries
    _, third = both.actor.export(Ref(SOURCE, -1), [(2, 1)])
    both.peers[0].connection.close()
    with pytest.raises(RuntimeStateError, match="a ref cannot be pickled"):
        both.actor.confirm([third])
