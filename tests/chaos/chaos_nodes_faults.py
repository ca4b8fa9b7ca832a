"""What strikes nodes, agents, actors and the links between them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import ray
from chaos_nodes import WINDOW, Member, Node, Nodes, ask, go_on, kill, pid_of, stop
from chaos_nodes_links import DRIVER

from conveyor.runtime import context

#: Harmless ones, which nobody may be lost by.
_BREAKS = {
    "disconnected": 2,
    "disconnected between others": 2,
    "reset": 4,
    "cut for a moment": 4,
    "one way cut for a moment": 3,
    "slow link": 3,
    "actor stopped": 2,
    "agent stopped": 2,
    "raylet stopped": 1,
}
#: Those after which somebody is dead, or may be.
_ENDS = {
    "actor killed": 5,
    "agent killed": 3,
    "node lost": 2,
    "raylet killed": 1,
    "agent silent": 2,
    "cut for good": 2,
    "one way cut for good": 1,
    "cut between others for good": 1,
}


@dataclass
class Fault:
    """What happens, after so many seconds; ``seconds``: how long it lasts."""

    kind: str
    after: float
    node: Node | None
    member: Member | None
    seconds: float

    def __str__(self) -> str:
        where = self.node.resource if self.node is not None else ""
        whom = f"actor {self.member}" if self.member else ""
        return f"{self.kind} {where}{whom} after {self.after:.2f} s ({self.seconds:.2f} s)"

    @property
    def ends_somebody(self) -> bool:
        return self.kind in _ENDS


class Faults:
    """Those of one round. ``breaks``: none that somebody may be lost by."""

    def __init__(self, rng: Random, nodes: Nodes, breaks: bool) -> None:
        self._nodes, self._rng = nodes, rng
        kinds = rng.choices(list(_BREAKS), list(_BREAKS.values()), k=rng.randint(0, 4))
        if rng.random() < 0.5 and not breaks:
            kinds += rng.choices(list(_ENDS), list(_ENDS.values()), k=rng.choice([1, 1, 2]))
        self.planned = [self._plan(kind) for kind in kinds]
        self._over = threading.Event()
        self._raised: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._stopped: Counter[int] = Counter()

    def _plan(self, kind: str) -> Fault:
        rng = self._rng
        node = member = None
        if kind.startswith("actor"):
            member = rng.choice(self._nodes.members)
        else:
            node = rng.choice(self._nodes.nodes)
        return Fault(kind, rng.uniform(0.0, 0.8), node, member, rng.uniform(0.0, 0.3 * WINDOW))

    def start(self) -> None:
        """What has to be asked before is asked here. Who ends by one is taken for struck from now on."""
        strikes = [(fault, self._strikes(fault)) for fault in self.planned]
        for fault, does in strikes:
            thread = threading.Thread(target=self._strike, args=(fault, does), name=fault.kind)
            self._threads.append(thread)
            thread.start()

    def _strike(self, fault: Fault, does: Callable[[], object]) -> None:
        try:
            self._over.wait(fault.after)
            does()
        except BaseException as error:
            self._raised.append(error)

    def wait(self, patience: float) -> None:
        """Until all that lasts a moment is over."""
        for thread, fault in zip(self._threads, self.planned, strict=True):
            if not fault.ends_somebody:
                thread.join(patience)

    def end(self, patience: float) -> None:
        """The dead are dead: what has killed them need not last."""
        self._over.set()
        for thread in self._threads:
            thread.join(patience)
            if thread.is_alive():
                raise AssertionError(f"{thread.name} does not end")
        if self._raised:
            raise self._raised[0]

    # What each does

    def _strikes(self, fault: Fault) -> Callable[[], object]:
        node, member = fault.node, fault.member
        if member is not None:
            pid = member.pid
            if fault.kind == "actor stopped":
                return lambda: self._stop_for(pid, fault.seconds)
            member.struck = True
            return lambda: kill(pid)
        assert node is not None
        if fault.kind == "raylet stopped":
            return lambda: self._stop_for(node.raylet.pid, fault.seconds)
        if fault.kind in ("raylet killed", "node lost"):
            self._strike_all(node)
            node.lost = True
            return node.raylet.kill if fault.kind == "raylet killed" else node.strike
        agent = self._nodes.agent_of(node)
        if agent is None or node.lost:  # no actor was ever there, or another fault ends it
            return lambda: None
        if fault.kind.startswith("agent"):
            return self._strikes_agent(fault, node, pid_of(agent))
        return self._strikes_links(fault, node, agent)

    def _strike_all(self, node: Node) -> None:
        for one in self._nodes.at(node):
            one.struck = True

    def _strikes_agent(self, fault: Fault, node: Node, pid: int) -> Callable[[], object]:
        if fault.kind == "agent stopped":
            return lambda: self._stop_for(pid, fault.seconds)
        self._strike_all(node)
        if fault.kind == "agent silent":
            return lambda: self._stop_for(pid, 4 * WINDOW)
        return lambda: kill(pid)

    def _strikes_links(self, fault: Fault, node: Node, agent: Any) -> Callable[[], object]:
        links, number = self._nodes.links, agent.number
        others = [a.number for a in self._nodes.agents().values() if a is not agent]
        out = [(number, other) for other in (DRIVER, *others)]
        back = [(other, number) for other in (DRIVER, *others)]
        both, one_way = out + back, self._rng.choice([out, back])
        if fault.kind == "disconnected":
            pump = context.running().remote_nodes.pump
            return lambda: pump.disconnect(number, "cut by the round")
        if fault.kind == "disconnected between others":
            return lambda: self._disconnect_between(agent, others)
        if fault.kind == "reset":
            return lambda: links.reset(both)
        if fault.kind == "slow link":
            late = self._rng.choice([0.001, 0.01, 0.05])
            return lambda: self._while_over(
                fault.seconds, lambda: links.slow(both, late), lambda: links.slow(both, -late)
            )
        if fault.kind == "cut between others for good":
            for other in self._nodes.nodes:
                for one in self._nodes.at(other):
                    one.shaken = True
            among = [way for way in both if DRIVER not in way]
            return lambda: self._cut(among, 4 * WINDOW)
        if fault.kind.endswith("for good"):
            self._strike_all(node)
        ways = one_way if fault.kind.startswith("one way") else both
        seconds = fault.seconds if fault.kind.endswith("moment") else 4 * WINDOW
        return lambda: self._cut(ways, seconds)

    def _cut(self, ways: list[tuple[int, int]], seconds: float) -> None:
        links = self._nodes.links
        self._while_over(seconds, lambda: links.hold(ways, True), lambda: links.hold(ways, False))

    def _stop_for(self, pid: int, seconds: float) -> None:
        self._while_over(seconds, lambda: self._stop(pid, 1), lambda: self._stop(pid, -1))

    def _stop(self, pid: int, by: int) -> None:
        """Several may stop one: it goes on when none of them wants it stopped."""
        with self._lock:
            self._stopped[pid] += by
            (stop if self._stopped[pid] else go_on)(pid)

    def _while_over(
        self, seconds: float, begin: Callable[[], object], end: Callable[[], object]
    ) -> None:
        begin()
        try:
            self._over.wait(seconds)
        finally:
            end()

    def _disconnect_between(self, agent: Any, others: list[int]) -> None:
        def cut(its: Any) -> None:
            for number in others:
                its._node_agent.pump.disconnect(number, "cut by the round")

        try:
            ask(agent, cut)
        except ray.exceptions.ActorUnavailableError:
            pass  # Ray's own connection to it was cut by another fault
        except Exception:
            if not agent.lost:  # by another fault
                raise
