"""What the driver and a node's agent do when their pumps have something to tell."""

import errno
import queue
from types import SimpleNamespace

import pytest

from conveyor import _core
from conveyor.engine.events import EventLoop
from conveyor.engine.ray import agent as module
from conveyor.engine.ray.agent import Agent
from conveyor.engine.ray.agents import Agents
from conveyor.engine.ray.news import LostHost
from conveyor.exceptions import SystemLimitError


def pump(*events):
    return SimpleNamespace(events=lambda: list(events), left=list, give_up=lambda *_: None)


def test_an_agent_without_a_thread_to_dial_hears_of_the_next_host(monkeypatch, capsys):
    def refuse(*_):
        raise SystemLimitError(errno.EAGAIN, "no thread is left")

    monkeypatch.setattr(module.threads, "start", refuse)
    agent, lost = Agent.__new__(Agent), []
    agent._addresses, agent._lost, agent._news = {2: ("192.0.2.1", 1)}, {}, queue.SimpleQueue()
    agent._fetches = SimpleNamespace(lose=lost.append)
    agent._station = SimpleNamespace(
        pump=pump((_core.HOST_DISCONNECTED, 2, "it broke"), (_core.HOST_LOST, 3, "it is silent"))
    )
    agent._on_notice()
    assert agent._news.get_nowait() == LostHost(3, "it is silent")
    assert lost == [3]
    assert "no thread is left" in capsys.readouterr().err


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
