"""What the driver and a node's agent do when their pumps have something to tell."""

import errno
import queue
import threading
from types import SimpleNamespace

import pytest

from conveyor import _core
from conveyor.cluster import connections
from conveyor.cluster.connections import Redials
from conveyor.engines.ray.agent import Agent, LostHost
from conveyor.engines.ray.agents import Agents
from conveyor.engines.ray.hosts import RayHosts
from conveyor.exceptions import SystemLimitError
from conveyor.runtime.events import EventLoop


def pump(*events, overslept=0.0, come=()):
    return SimpleNamespace(
        events=lambda: list(events),
        left=list,
        come=lambda: list(come),
        give_up=lambda *_: None,
        overslept=lambda _within: overslept,
    )


def test_an_agent_dials_again_though_no_thread_is_left(monkeypatch, wait_until):
    """It has had one since before its first connection."""

    def refuse(*_):
        raise SystemLimitError(errno.EAGAIN, "no thread is left")

    def dial(host):
        dialled.append(host)
        if len(dialled) < 3:
            raise ConnectionRefusedError

    others = set(threading.enumerate())  # of tests before this one
    agent, lost, dialled = Agent.__new__(Agent), [], []
    agent._redials, agent._news = Redials(dial, 1.0), queue.SimpleQueue()
    agent._redials.prepare(2)
    monkeypatch.setattr(connections.threads, "start", refuse)
    with pytest.raises(SystemLimitError):  # and so does not begin with one that it could not keep
        agent._redials.prepare(4)
    agent._fetches = SimpleNamespace(lose=lost.append)
    agent._station = SimpleNamespace(
        pump=pump((_core.HOST_DISCONNECTED, 2, "it broke"), (_core.HOST_LOST, 3, "it is silent"))
    )
    agent._on_notice()
    assert agent._news.get_nowait() == LostHost(3, "it is silent")
    assert lost == [3]
    wait_until(lambda: dialled == [2, 2, 2], 60)
    (thread,) = [
        one for one in threading.enumerate() if one.name == "conveyor-redial" and one not in others
    ]
    agent._redials.lost(2)
    thread.join(60)
    assert not thread.is_alive()
    assert dialled == [2, 2, 2]


def test_what_has_come_to_a_host_is_told_to_who_waits_for_it():
    """By the pump of the driver's host, or by a node's agent."""
    agents, told = Agents(None, None, 1.0, lambda *_: None, lambda _: None), []
    agents._home, agents._pump = SimpleNamespace(come=told.append), pump(come=(3, 4))
    agents._on_notice()
    assert told == [3, 4]
    agent = Agent.__new__(Agent)
    agent._news, agent._station = queue.SimpleQueue(), SimpleNamespace(pump=pump(come=(5,)))
    agent._on_notice()
    hosts = RayHosts.__new__(RayHosts)
    hosts._home = agents._home
    hosts._on_news(SimpleNamespace(), agent._news.get_nowait())
    assert told == [3, 4, 5]


@pytest.mark.parametrize(
    ("heard", "goes"),
    [((1, 2), 2), ((1,), 2), ((2,), 1), ((), 2)],
    ids=["both", "the first", "the second", "none"],
)
def test_of_two_nodes_without_a_connection_the_one_goes_that_the_driver_has_lost_too(heard, goes):
    """The other one has told of it before the driver's own patience was over."""
    agents, lost = Agents(None, None, 1.0, lambda *_: None, lambda _: None), []
    agents._pump = SimpleNamespace(connected=heard.__contains__)
    agents.lose = lambda host, why: lost.append((host.number, why))
    hosts = [SimpleNamespace(number=number, name=f"n{number}", lost="") for number in (1, 2)]
    agents._by_node = {host.name: host for host in hosts}
    for teller, other in (hosts, hosts[::-1]):
        agents.part(teller, other.number, "it is silent")
    said = {
        goes: f"it has no connection to node n{3 - goes}: it is silent",
        3 - goes: f"node n{3 - goes} has no connection to it: it is silent",
    }
    assert lost == [(goes, said[1]), (goes, said[2])]
    hosts[0].lost = "it was silent"
    agents.part(hosts[1], 1, "it is silent")
    assert len(lost) == 2


@pytest.mark.parametrize("tls", [True, False])
def test_a_node_that_is_lost_over_tls_may_have_been_silent_for_python(monkeypatch, tls, wait_until):
    events = EventLoop("notices-test")
    ray = SimpleNamespace(kill=lambda _: None)
    agents = Agents(ray, events, 10.0, lambda *_: None, lambda _: None)
    agents._tls = SimpleNamespace() if tls else None
    agents._home = SimpleNamespace(gone=lambda _: None)
    host = SimpleNamespace(number=1, name="a node", agent=None, lost="")
    host.forget = lambda why: setattr(host, "lost", why)
    agents._by_node["a node"] = host
    agents._pump = pump((_core.HOST_LOST, 1, "it is silent"))
    agents._on_notice()
    wait_until(lambda: host.lost, 60)
    events.close()
    assert host.lost.startswith("it is silent")
    assert ("native code" in host.lost and "node_timeout seconds (10)" in host.lost) is tls


@pytest.mark.parametrize("stopped", [0.0, 3.2])
def test_of_a_node_that_did_not_hear_of_a_stopped_program_it_is_said(stopped, wait_until):
    """It has ended, and that alone says nothing of why."""
    events = EventLoop("notices-test")
    ray = SimpleNamespace(kill=lambda _: None)
    agents = Agents(ray, events, 1.0, lambda *_: None, lambda _: None)
    agents._home = SimpleNamespace(gone=lambda _: None)
    host = SimpleNamespace(number=1, name="a node", agent=None, lost="")
    host.forget = lambda why: setattr(host, "lost", why)
    agents._pump = pump(overslept=stopped)
    agents.lose(host, "its agent has ended")
    wait_until(lambda: host.lost, 60)
    events.close()
    assert host.lost.endswith("its agent has ended")
    assert host.lost.startswith("this program did not run for 3.2 s") is bool(stopped)
