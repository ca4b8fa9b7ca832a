"""The end of a session one of whose hosts cannot be reached, and is not lost by its silence yet."""

from concurrent.futures import Future
from types import SimpleNamespace

from conveyor.cluster.addresses import Listening
from conveyor.engines.ray.agents import AgentHost, Ready
from conveyor.engines.ray.bootstrap import Locality
from conveyor.engines.ray.hosts import RayHosts, Started
from conveyor.runtime.process import ArenaSize

ARENA = ArenaSize(1 << 24, 1 << 24, 0.0)


class Silent:
    """An agent that Ray cannot have do anything."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        def remote(*_):
            self.asked.append(name)
            return SimpleNamespace(future=Future)

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=remote))


def test_its_processes_have_ended_with_the_session():
    killed, given_up, exited = [], [], []
    ray = SimpleNamespace(
        is_initialized=lambda: True,
        get_runtime_context=lambda: SimpleNamespace(get_worker_id=lambda: "this program"),
        kill=killed.append,
    )
    hosts = RayHosts(ray, {}, lambda: None, "", 3600.0, None, Listening())
    agents = hosts._agents
    agents._pump = SimpleNamespace(
        give_up=lambda *args: given_up.append(args), notice_fd=-1, overslept=lambda _: 0.0
    )
    hosts.start(lambda pid, _: exited.append(pid), SimpleNamespace(gone=given_up.append))
    agent = Silent()
    ready = Ready(("192.0.2.1", 1), "courier", "door", ARENA, Locality.own())
    host = AgentHost(1, "a node", agent, ready, agents.lose, agents._depot, None)
    agents._by_node["a node"] = host
    actor = Started(number=5, name="A", asked={}, on_spawned=lambda _: None)
    actor.host, actor.place, actor.pid = host, (3, 1), 77
    hosts._abroad[actor.number] = hosts._living[actor.key] = actor
    hosts.close()
    assert "kill" in agent.asked
    assert exited == [actor.key]
    assert given_up[-1] == 1
    assert "does not end its actors" in host.lost
    assert agent in killed
