"""Nodes of a Ray cluster on this machine that share no memory, the actors there, and who is in danger."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import psutil
import ray
from chaos_nodes_actors import Ours, Rays
from chaos_nodes_links import Links
from ray.cluster_utils import Cluster

import conveyor
from conveyor.runtime import context

#: s without a connection after which a node is lost.
WINDOW = 3.0
#: Of Ray, before it is started: what a node's end takes it to notice.
RAYS_SETTINGS = {
    "RAY_worker_niceness": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "20",
}
#: What all nodes have: who asks for that alone may come back on another one.
_ANYWHERE = "anywhere"


@dataclass(eq=False)
class Node:
    """One of them."""

    resource: str
    made: Any
    raylet: psutil.Process
    lost: bool = False

    @property
    def id(self) -> str:
        return str(self.made.node_id)

    def strike(self) -> None:
        """It loses its power."""
        with suppress(psutil.NoSuchProcess):
            for process in [self.raylet, *self.raylet.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


@dataclass(eq=False)
class Member:
    """An actor.

    returns: it is started again when it has died, on whatever node. guest: the handle that Ray has of it, if
    it is Ray's own. struck: something is done that ends this process, or its part in the session. shaken:
    something is done that may. revived: it was started again with its graph.
    """

    handle: Any
    node: Node
    pid: int
    returns: bool
    guest: Any = None
    struck: bool = False
    shaken: bool = False
    revived: bool = False

    def __str__(self) -> str:
        kind = "Ray's" if self.guest is not None else "returning" if self.returns else "plain"
        return f"{self.pid} ({kind}) on {self.node.resource}"


class Nodes:
    """All of them, with their actors; a session's surroundings."""

    def __init__(self, others: int) -> None:
        self._numbers = itertools.count()
        self._others = others
        self.links = Links()
        self.links.divert()
        self.cluster = Cluster()
        self.own = self._add(include_dashboard=False)
        ray.init(address=self.cluster.address, log_to_driver=False)
        self.nodes = [self._add() for _ in range(others)]
        self.members: list[Member] = []

    def _add(self, **options: Any) -> Node:
        resource = f"node{next(self._numbers)}"
        resources = {resource: 1000, _ANYWHERE: 1000}
        before = _raylets()
        made = self.cluster.add_node(num_cpus=1, resources=resources, **options)
        (raylet,) = _raylets() - before
        return Node(resource, made, psutil.Process(raylet))

    def fill(self, rng: Random, count: int) -> None:
        """Have so many actors, and as many nodes as at the beginning."""
        for node in [node for node in self.nodes if node.lost]:
            self.nodes.remove(node)
            with suppress(Exception):  # Ray finds processes of its missing
                self.cluster.remove_node(node.made, allow_graceful=False)
        while len(self.nodes) < self._others:
            self.nodes.append(self._add())
        for member in [member for member in self.members if member.struck]:
            self._end(member)
        if rng.random() < 0.2:
            for member in rng.sample(self.members, len(self.members) // 2):
                self._end(member)
        while len(self.members) < count:
            self._start(rng)

    def _start(self, rng: Random) -> None:
        node = rng.choice([self.own, *self.nodes, *self.nodes])
        kind = rng.choices(["plain", "returns", "guest"], [3, 3, 1])[0]
        guest = None
        if kind == "guest":
            guest = Rays.options(resources={node.resource: 1}).remote()
            handle = conveyor.attach(guest)
        elif kind == "returns":
            resources = {_ANYWHERE: 1}
            handle = Ours.options(
                max_restarts=-1, resources=resources, scheduling_strategy="SPREAD"
            ).remote()
        else:
            handle = Ours.options(resources={node.resource: 1}).remote()
        member = Member(handle, node, 0, kind == "returns", guest)
        self.look(member)
        self.members.append(member)

    def look(self, member: Member) -> None:
        """Note which process it is now, and where."""
        member.pid, there = conveyor.get(member.handle.where.remote(), timeout=60)
        (member.node,) = [node for node in [self.own, *self.nodes] if node.id == there]

    def _end(self, member: Member) -> None:
        self.members.remove(member)
        with suppress(Exception):  # it is dead, or the session is over
            if member.guest is not None:
                ray.kill(member.guest)
            else:  # its handle was passed on, so it would live as long as the session
                conveyor.kill(member.handle)

    def forget(self) -> None:
        """The session is over."""
        for member in list(self.members):
            self._end(member)
        self.links.forget()

    def agents(self) -> dict[str, Any]:
        """Those that there are, by their node's id."""
        known = context.running()._engine._agents._by_node
        return {name: host for name, host in list(known.items()) if not host.lost}

    def agent_of(self, node: Node) -> Any:
        return self.agents().get(node.id)

    def at(self, node: Node) -> list[Member]:
        """Those that are there."""
        return [member for member in self.members if member.node is node]

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()
        self.links.close()


def _raylets() -> set[int]:
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if child.name() == "raylet":
                found.add(child.pid)
    return found


def ask(agent: Any, what: Callable[[Any], Any]) -> Any:
    """What an agent says of itself."""
    return ray.get(agent.agent.__ray_call__.remote(what), timeout=60)


def pid_of(agent: Any) -> int:
    return int(ask(agent, lambda _: os.getpid()))


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def stop(pid: int) -> None:
    send(pid, signal.SIGSTOP)


def go_on(pid: int) -> None:
    send(pid, signal.SIGCONT)


def kill(pid: int) -> None:
    send(pid, signal.SIGKILL)
