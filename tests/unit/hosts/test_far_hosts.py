"""Orders to other hosts that fail, or come late: nobody counts on what was not done."""

import errno
import os
import pickle
import signal
import socket
import threading
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from conveyor import _core
from conveyor.cluster.handshake import HandshakeError
from conveyor.cluster.servers import Depot
from conveyor.cluster.tls import SessionCertificate
from conveyor.driver.hosts import (
    Adopt,
    Answer,
    Bury,
    CountDue,
    Cut,
    Forget,
    Hand,
    Reach,
    Spread,
    Stand,
    TellWhenCome,
)
from conveyor.driver.remote_processes import FarHosts
from conveyor.driver.requests import RequestLine, RequestLines, Switchboard
from conveyor.engines.ray import bootstrap
from conveyor.engines.ray.agent import Agent, Ended, Secrets, Terms
from conveyor.engines.ray.agents import AgentHost, Agents, Ready
from conveyor.engines.ray.bootstrap import Elsewhere, Locality
from conveyor.engines.surroundings import surroundings
from conveyor.exceptions import ActorStartError, RuntimeStateError
from conveyor.runtime.blueprint import Blueprint, RingPlan
from conveyor.runtime.messages import receive_pickled
from conveyor.runtime.process import ArenaSize, Place
from conveyor.worker.messages import Done, Failed

ARENA = ArenaSize(1 << 24, 1 << 24, 0.0)


class Host:
    """Another host that notes its orders, and fails at those of one kind."""

    def __init__(self, number):
        self.number, self.name, self.arena = number, f"host {number}", ARENA
        self.address = ("192.0.2.1", number)
        self.orders, self.fails, self.due = [], (), ()
        self.reached = lambda other: None

    def send(self, order):
        self.orders.append(order)
        if isinstance(order, Reach) and not isinstance(order, self.fails):
            self.reached(order.host)
        done = Future()
        if isinstance(order, self.fails):
            done.set_exception(OSError("it cannot"))
        else:
            done.set_result(self.due if isinstance(order, CountDue) else None)
        return done

    tell = send

    def has_done(self):
        done, self.orders = [type(order) for order in self.orders], []
        return done


@pytest.fixture
def abroad():
    board = SimpleNamespace(name=lambda slot: f"process {slot}")
    made = FarHosts(SimpleNamespace(slot=0, board=board), lambda: None)
    made._hosts.update({1: Host(1), 2: Host(2)})
    made._host_of = {5: 1, 6: 2}
    made._hosts[2].reached = lambda other: made.reached(2, other, None)
    return made


def blueprint():
    ring = RingPlan(0, 2, 128, Place(5, 1, 3), (Place(6, 1, 3),))
    return Blueprint(4096, (ring,), ())


@pytest.mark.parametrize("kind", [Reach, Stand])
def test_what_a_host_could_not_do_is_ordered_again(abroad, kind):
    host = abroad._hosts[2]
    host.fails = kind
    with pytest.raises(RuntimeStateError, match="it cannot"):
        abroad.spread(blueprint(), None)
    assert host.has_done() == [Reach, Stand, Spread, Forget]
    host.fails = ()
    assert abroad.spread(blueprint(), None)
    assert kind in host.has_done()
    assert abroad.spread(blueprint(), None)
    assert host.has_done() == [Spread]  # the rest is done once


def test_a_host_forgets_a_segment_that_the_next_one_cannot_be_told_of(abroad):
    def disconnected(order):
        raise RuntimeError("Ray is disconnected")

    abroad._hosts[2].send = disconnected
    abroad._joins._joined[1, 2] = abroad._hosts[1].send("they are connected")
    with pytest.raises(RuntimeError, match="disconnected"):
        abroad.spread(blueprint(), None)
    assert abroad._hosts[1].has_done()[-2:] == [Spread, Forget]
    assert not abroad._segments


def test_a_segment_is_taken_from_the_pump_by_who_is_interrupted_behind_its_making(
    abroad, monkeypatch
):
    """Ctrl-C may come when the pump has it, and before the next line."""

    def interrupted(*_):
        raise KeyboardInterrupt

    taken = []
    abroad._pump = SimpleNamespace(unmirror=taken.append)
    del abroad._host_of[6]
    monkeypatch.setattr(Blueprint, "mirror", interrupted)
    with pytest.raises(KeyboardInterrupt):
        abroad.spread(blueprint(), SimpleNamespace())
    assert len(taken) == 1
    assert not abroad._segments


def test_proxies_of_a_process_of_the_drivers_host_are_buried_with_it(abroad):
    """Its slot is the next process's, which could not have a proxy there before that."""
    former, following = (7, 1), (7, 2)
    abroad._introduce(1, [former], [])
    record = SimpleNamespace(slot=7, reader=former, host=None)
    abroad.bury(record)
    abroad.bury(record)
    abroad._introduce(1, [following], [])
    assert abroad._hosts[1].has_done() == [Stand, Bury, Stand]
    assert abroad._hosts[2].has_done() == []


class TestWhatADeadProcessHasWrittenForAThirdHost:
    """Frames of it are on their way from host 1, or from the driver's, to host 2."""

    @pytest.fixture(params=[1, None])
    def dead(self, abroad, request):
        maker = abroad._hosts.get(request.param)
        slot = 5 if maker else 7
        if maker:
            maker.due = ((44, 0, 3),)
        else:
            abroad._pump = SimpleNamespace(due=lambda: [(2, 44, 0, 3), (1, 45, 0, 3)])
        abroad._introduce(2, [(slot, 1)], [])
        assert abroad._hosts[2].has_done() == [Stand]
        return SimpleNamespace(slot=slot, reader=(slot, 1), host=maker)

    def awaits(self, abroad):
        """The frames that host 2 is to tell of, and under which number."""
        *_, order = abroad._hosts[2].orders
        assert isinstance(order, TellWhenCome)
        return order.frames, order.number

    def test_comes_before_it_is_buried_there(self, abroad, dead):
        abroad.bury(dead)
        frames, number = self.awaits(abroad)
        assert frames == ((44, 0, 3),)
        assert abroad._hosts[2].has_done() == [TellWhenCome]
        abroad.looks.come(number)
        assert abroad._hosts[2].has_done() == [Bury]
        abroad.looks.come(number)
        assert abroad._hosts[2].has_done() == []

    def test_does_not_keep_the_slots_next_process_away(self, abroad, dead):
        abroad.bury(dead)
        _, number = self.awaits(abroad)
        abroad._introduce(2, [(dead.slot, 2)], [])
        abroad.looks.come(number)
        assert abroad._hosts[2].has_done() == [TellWhenCome, Bury, Stand]

    def test_does_not_come_to_a_host_that_is_lost(self, abroad, dead):
        told = []
        abroad.behind_its_last(dead, 2, lambda: told.append(1))
        _, number = self.awaits(abroad)
        assert not told
        abroad.gone(2)
        abroad.looks.come(number)
        assert told == [1]

    def test_does_not_come_from_a_host_that_is_lost(self, abroad, dead):
        if dead.host:
            dead.host.fails = CountDue
        else:
            abroad._pump = None  # the session is over
        abroad.bury(dead)
        assert abroad._hosts[2].has_done() == [Bury]


def test_nothing_is_left_of_a_process_that_cannot_have_a_proxy_here(abroad, monkeypatch):
    def stopped(*_):
        raise OSError("the pump was stopped")

    arena = Mock()
    monkeypatch.setattr(_core, "Arena", lambda *_: arena)
    abroad._process.arena_size = ARENA
    abroad._pump = SimpleNamespace(add_proxy=stopped, remove_proxy=lambda slot: None)
    name = SimpleNamespace(name="process")
    record = SimpleNamespace(slot=7, reader=(7, 1), host=None, arena_fd=-1, id=name)
    with pytest.raises(OSError, match="stopped"):
        abroad.settle(record, SimpleNamespace(links=[]), abroad._hosts[1])
    abroad.bury(record)
    assert (abroad.host_of(7), abroad._arenas) == (0, {})
    arena.close.assert_called_once_with()


@pytest.fixture
def joining(abroad):
    """What is done when hosts 1 and 2 are connected, which takes its time."""
    abroad._hosts[2].reached = lambda other: None
    done = []
    abroad._join(1, 2, done)
    return done


def test_who_counts_on_a_connection_waits_for_it(abroad, joining):
    abroad._join(1, 2, joining)
    assert abroad._hosts[2].has_done() == [Reach]
    assert not any(one.done() for one in joining)
    abroad.reached(2, 1, None)
    assert [one.result(timeout=0) for one in joining] == [None, None]


@pytest.mark.parametrize("error", [HandshakeError("not let in"), ConnectionRefusedError("nobody")])
def test_hosts_that_could_not_connect_are_to_try_again(abroad, joining, error):
    abroad.reached(2, 1, error)
    assert joining[0].exception(timeout=0) is error
    abroad._join(1, 2, joining)
    assert not joining[1].done()
    abroad.reached(2, 1, None)
    assert joining[1].result(timeout=0) is None


@pytest.mark.parametrize("lost", [1, 2])
def test_who_counts_on_a_connection_to_a_host_that_is_lost_waits_no_longer(abroad, joining, lost):
    """The one that dials it may do so for some seconds yet."""
    abroad.gone(lost)
    with pytest.raises(RuntimeStateError, match=f"node host {lost} is lost"):
        joining[0].result(timeout=0)
    abroad.reached(2, 1, HandshakeError("it has not finished in time"))  # nobody asks any more


def test_a_process_whose_host_is_lost_meanwhile_is_introduced_to_nobody(abroad):
    abroad._hosts[2].reached = lambda other: abroad.gone(1)
    assert not abroad.introduce(SimpleNamespace(slot=6), (5, 1))


def test_an_error_of_an_introduction_is_raised_where_the_host_lives(abroad):
    abroad._hosts[2].reached = lambda other: abroad.reached(2, 1, HandshakeError("not let in"))
    with pytest.raises(HandshakeError, match="not let in"):
        abroad.introduce(SimpleNamespace(slot=6), (5, 1))


def test_a_host_that_cannot_be_told_is_lost_and_whoever_tells_goes_on():
    def disconnected(*_):
        raise RuntimeError("Ray is disconnected")

    method = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=disconnected))
    lost = []
    host = AgentHost(
        1,
        "a node",
        SimpleNamespace(do=method, kill=method, leave=method),
        Ready(("192.0.2.1", 1), "", "", ARENA, Locality.own()),
        lambda host, why: lost.append(why),
        Depot(),
        None,
    )
    host.tell(Forget(1))
    host.kill(5, 1)
    assert len(lost) == 2
    assert "Ray is disconnected" in lost[0]
    assert isinstance(host.leave().exception(timeout=0), RuntimeError)


def test_who_waits_for_an_agent_that_has_ended_hears_of_it_when_its_host_is_lost():
    """Not by an error of Ray's own, and not before its processes are dead."""
    ray_exceptions = pytest.importorskip("ray.exceptions")
    answers, lost = [], []

    def does(*_):
        answers.append(Future())
        return SimpleNamespace(future=lambda: answers[-1])

    method = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=does))
    agent = SimpleNamespace(do=method, leave=method)
    ready = Ready(("192.0.2.1", 1), "", "", ARENA, Locality.own())
    host = AgentHost(1, "a node", agent, ready, lambda _, why: lost.append(why), Depot(), None)
    sent, left = host.send(Forget(1)), host.leave()
    for answer in answers:
        answer.set_exception(ray_exceptions.ActorDiedError())
    assert left.done()  # as it was to
    assert not sent.done()
    assert len(lost) == 1
    assert lost[0].startswith("its agent has ended (The actor died")
    host.forget(lost[0])
    with pytest.raises(RuntimeStateError, match="node a node is lost: its agent has ended"):
        sent.result(timeout=0)


def test_a_host_that_cannot_be_connected_to_is_lost_by_a_text_that_says_so():
    lost = []
    ready = Ready(("192.0.2.1", 4711), "", "", ARENA, Locality.own())
    host = AgentHost(1, "a node", None, ready, lambda _, why: lost.append(why), Depot(), None)
    host.carrier._supply._unreachable("timed out")
    assert len(lost) == 1
    assert "cannot connect to 192.0.2.1:4711 (timed out)" in lost[0]
    host.forget(lost[0])
    host.carrier._supply._unreachable("timed out")
    assert len(lost) == 1


def test_what_an_agent_is_told_is_printed_without_the_token():
    secrets = Secrets(b"token", SessionCertificate(b"pem"))
    assert "token" not in repr([secrets]) + str(secrets)
    assert "pem" not in repr([secrets]) + str(secrets)


@pytest.fixture
def agent():
    before = signal.getsignal(signal.SIGINT)
    try:
        made = Agent(Terms(1, bootstrap.version(), (0, 1), ("192.0.2.1", 1), ARENA, 10.0, 7))
    finally:
        signal.signal(signal.SIGINT, before)
    yield made
    # Its process would end now.
    station = made._station
    for slot, one in [*station._locals.items(), *station._proxies.items()]:
        made.do(Bury(slot, one.incarnation))
    made._station.pump.stop()
    made._events.close()


def expected(agent):
    """A process that the agent waits for in slot 5."""
    agent.do(Adopt(5, 1, "unwanted"))
    agent.expect(7, 5, bootstrap.Told("unwanted", surroundings(), b""), [])
    return agent._processes.courier._expected[7].arrived.args[0]


def test_a_late_end_of_a_process_that_nobody_wants_is_not_that_of_the_next_in_its_slot(agent):
    station, unwanted = agent._station, expected(agent)
    agent.do(Bury(5, 1))
    agent.do(Adopt(5, 2, "next"))
    agent._ended(unwanted)
    assert [type(news) for news in agent.news()] == [Ended]
    assert not station.board.gone(5, 2)
    assert len(station.local(5).passed) == 2
    agent.do(Bury(5, 2))
    assert agent.disown(7)
    unwanted.close_fds()


def test_an_agent_keeps_nothing_for_a_process_that_will_not_come(agent):
    unwanted = expected(agent)
    assert unwanted.fds
    agent.do(Bury(5, 1))
    assert agent.disown(7)
    assert not agent.disown(7)
    seen = threading.Event()
    agent._events.call(seen.set)
    assert seen.wait(60)
    assert not unwanted.fds
    assert 7 not in agent._processes.courier._expected


def test_a_proxy_that_cannot_be_had_leaves_no_descriptor(agent):
    agent.do(Stand(6, 1, 2, "one"))
    before = descriptors()
    with pytest.raises(OSError, match="proxy"):
        agent.do(Stand(6, 2, 2, "before the former one is buried"))
    # Garbage of other tests may go meanwhile.
    assert descriptors() - before == Counter()
    agent.do(Bury(6, 1))


@pytest.fixture
def asks(agent):
    """A process of the agent's host, in slot 5: what it asks over."""
    agent.do(Adopt(5, 1, "asks"))
    _control, requests = agent._station.local(5).passed
    requests.settimeout(60)
    yield requests
    agent.do(Bury(5, 1))


def test_who_cannot_be_answered_does_not_wait(agent, asks):
    with pytest.raises(ProcessLookupError, match="slot 9 has ended"):
        agent.do(Answer(5, 1, b"to be answered with a process", 0, ((9, 1),)))
    agent.do(Answer(5, 1, b"why not"))
    assert receive_pickled(asks) == (b"why not", [])
    agent.do(Cut(5, 1))
    with pytest.raises(ConnectionError, match="gone"):
        receive_pickled(asks)
    agent.do(Cut(5, 2))  # of the next one in its slot, which is not there


def test_who_has_said_what_cannot_be_read_does_not_wait(agent, asks):
    asks.send(b"+the first half")
    with pytest.raises(ConnectionError, match="gone"):
        receive_pickled(asks)


def test_what_is_for_a_former_process_is_not_handed_to_the_next_in_its_slot(agent, asks):
    with pytest.raises(ProcessLookupError, match="slot 5 has ended"):
        agent.do(Hand(5, 0, 1, 0, ()))
    with pytest.raises(ProcessLookupError, match="slot 6 has ended"):
        agent.do(Hand(6, 1, 1, 0, ()))


class FarLine:
    """A line to a process of another host, whose answers fail as they are told to."""

    def __init__(self, *errors):
        self.record = SimpleNamespace(host="another", alive=True, id=SimpleNamespace(name="asks"))
        self.errors, self.answers = list(errors), []

    def send(self, message, given, patience):
        if self.errors:
            raise self.errors.pop(0)
        self.answers.append(pickle.loads(message.content))


@pytest.fixture
def removed(monkeypatch):
    records = []
    monkeypatch.setattr(Switchboard, "remove", lambda self, record: records.append(record))
    return records


def test_an_answer_that_another_host_cannot_give_is_why_it_cannot(removed):
    line = FarLine(RuntimeStateError("slot 9 has ended"))
    Switchboard._reply(Switchboard.__new__(Switchboard), line, 1, Done(None))
    (answer,) = line.answers
    assert isinstance(answer, Failed)
    assert "slot 9 has ended" in str(answer.error)
    assert not removed


def test_a_line_to_another_host_that_takes_no_answer_is_cut(removed, abroad):
    line = FarLine(RuntimeStateError("no"), RuntimeStateError("nor that"))
    Switchboard._reply(Switchboard.__new__(Switchboard), line, 1, Done(None))
    assert removed == [line.record]
    host = abroad._hosts[1]
    record = SimpleNamespace(reader=(5, 1), host=host, alive=True)
    here, there = socket.socketpair()
    lines = RequestLines(lambda fd: None, abroad)
    lines.add(record, here)
    lines.settle(record)
    lines.remove(record)
    there.close()
    assert host.has_done() == [Cut]


def descriptors():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return Counter(found)


@pytest.mark.parametrize("at", ["pidfd_open", "dup_all", "courier"])
def test_what_an_agent_cannot_make_for_a_process_leaves_no_descriptor(agent, monkeypatch, at):
    def fails(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    agent.do(Adopt(5, 1, "unlucky"))
    before = descriptors()
    owner = {"pidfd_open": os, "dup_all": bootstrap, "courier": agent._processes.courier}[at]
    with monkeypatch.context() as patched:
        patched.setattr(owner, "expect" if at == "courier" else at, fails)
        with pytest.raises(OSError, match="Too many open files"):
            agent.expect(7, 5, bootstrap.Told("unlucky", surroundings(), b""), [])
    # Garbage of other tests may go meanwhile.
    assert descriptors() - before == Counter()
    assert agent.disown(7) is False
    agent.do(Bury(5, 1))


def test_the_thread_that_is_told_of_losses_waits_for_no_host(abroad):
    never = Future()
    host = abroad._hosts[1]
    given = []
    host.send = lambda order: given.append(order) or never
    record = SimpleNamespace(host=host, reader=(5, 1), alive=True, id=SimpleNamespace(name="asks"))
    here, there = socket.socketpair()
    line = RequestLine(record, here, abroad)
    line.sock = None  # it is elsewhere
    with here, there:
        line.send("no thread is left", [], patience=1.0)
    assert [type(order) for order in given] == [Answer]
    assert not never.done()


def test_a_process_that_takes_no_answer_which_nobody_waits_for_is_no_loss_of_its_host(
    abroad, caplog
):
    given, lost = [], []

    def does(order):
        done = Future()
        given.append(type(order))
        if isinstance(order, Answer):
            done.set_exception(TimeoutError("it takes none"))
        else:
            done.set_result(None)
        return SimpleNamespace(future=lambda: done)

    method = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=does))
    ready = Ready(("192.0.2.1", 1), "", "", ARENA, Locality.own())
    node = SimpleNamespace(do=method)
    host = AgentHost(1, "a node", node, ready, lambda _, why: lost.append(why), Depot(), None)
    record = SimpleNamespace(host=host, reader=(5, 1), alive=True, id=SimpleNamespace(name="asks"))
    abroad.answer(record, b"no thread is left", None, wait=False)
    assert given == [Answer, Cut]
    assert not lost
    assert "a request of asks cannot be answered: it takes none" in caplog.text


def test_a_host_that_is_started_while_the_session_ends_does_not_outlive_it():
    killed, started = [], []
    agents = Agents(SimpleNamespace(kill=killed.append), None, 10.0, None, None)

    def start(node):
        started.append(node)
        agents.close()  # meanwhile
        ready = Ready(("192.0.2.1", 1), "", "", ARENA, Locality.own())
        return AgentHost(1, "a node", "its agent", ready, lambda host, why: None, Depot(), None)

    agents._start = start
    for _ in range(2):
        with pytest.raises(ActorStartError, match="the session has ended"):
            agents.at(Elsewhere("0123456789", "192.0.2.1"))
    assert killed == ["its agent"]
    assert len(started) == 1


def test_news_that_cannot_be_told_keep_no_others_back(capsys):
    told = []

    def tell(_host, news):
        told.append(news)
        if news == 1:
            raise ValueError("news of another kind")

    agents = Agents(None, None, 10.0, tell, None)
    agents._hear = lambda host: None
    news = Future()
    news.set_result([1, 2])
    agents._heard(SimpleNamespace(lost=""), news)
    assert told == [1, 2]
    assert "news of another kind" in capsys.readouterr().err


def test_nobody_waits_for_an_agent_that_ray_does_not_place_when_the_session_has_ended():
    placed, killed, raised, asked = Future(), [], [], threading.Event()

    def begin(_secrets):
        asked.set()
        return SimpleNamespace(future=lambda: placed)

    method = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=begin))
    agent = SimpleNamespace(begin=method)
    made = SimpleNamespace(remote=lambda terms: agent)
    agents = Agents(
        SimpleNamespace(kill=killed.append, remote=lambda **_: lambda cls: made),
        None,
        10.0,
        None,
        None,
    )
    agents._open = lambda: ("192.0.2.1", 1)
    process = SimpleNamespace(board=SimpleNamespace(session=7))
    agents.start(SimpleNamespace(driver=(0, 1), arena=ARENA, process=process))

    def start():
        try:
            agents.at(Elsewhere("ab" * 28, "192.0.2.1"))
        except ActorStartError as error:
            raised.append(str(error))

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    assert asked.wait(60)
    agents.refuse()
    thread.join(60)
    assert len(raised) == 1
    assert "the session has ended" in raised[0]
    assert killed == [agent]
    placed.set_result(None)  # too late, and nobody minds
