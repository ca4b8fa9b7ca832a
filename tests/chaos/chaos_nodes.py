"""Nodes of a Ray cluster on this machine that share no memory, the actors there, and what strikes them."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import psutil
import ray
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


def made_of(number: int, values: Iterable[Any], size: int) -> Any:
    """What a task makes of its arguments: a number, or an array that says which."""
    total = number + sum(int(np.sum(value)) % 1_000_003 for value in values)
    return total if size == 0 else np.full(size, total % 251, np.uint8)


@conveyor.remote
class Stage:
    """Does what the plain function does."""

    def pid(self) -> int:
        return os.getpid()

    def make(self, number: int, size: int, *values: Any) -> Any:
        return made_of(number, values, size)

    def ask(self, other: Any, number: int, size: int) -> Any:
        return conveyor.get(other.make.remote(number, size, number))

    def items(self, number: int, count: int) -> Any:
        for i in range(count):
            yield made_of(number, [i], 300 if i % 3 == 0 else 0)


@dataclass(eq=False)
class Node:
    """One of them. ``resource`` is what only it has; ``raylet`` is ``None`` of the driver's own."""

    resource: str
    made: Any
    raylet: psutil.Process | None
    lost: bool = False

    def strike(self) -> None:
        """It loses its power."""
        assert self.raylet is not None
        with suppress(psutil.NoSuchProcess):
            for process in [self.raylet, *self.raylet.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


@dataclass(eq=False)
class Member:
    """An actor. ``struck``: something has been done to it, or to its node, that ends it."""

    handle: Any
    node: Node
    pid: int
    struck: bool = False


class Nodes:
    """All of them, with their actors; a session's surroundings."""

    def __init__(self, others: int) -> None:
        self._numbers = itertools.count()
        self._others = others
        self.cluster = Cluster()
        self.own = self._add(include_dashboard=False)
        ray.init(address=self.cluster.address, log_to_driver=False)
        self.nodes = [self._add() for _ in range(others)]
        self.members: list[Member] = []

    def _add(self, **options: Any) -> Node:
        resource = f"node{next(self._numbers)}"
        before = _raylets()
        made = self.cluster.add_node(num_cpus=1, resources={resource: 1000}, **options)
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
        self.members = [member for member in self.members if not member.struck]
        while len(self.members) < count:
            node = rng.choice([self.own, *self.nodes])
            handle = Stage.options(resources={node.resource: 1}).remote()
            self.members.append(Member(handle, node, conveyor.get(handle.pid.remote())))

    def agents(self) -> dict[str, Any]:
        """Those that there are, by their node's id."""
        known = context.running()._hosts._agents._by_node
        return {name: host for name, host in list(known.items()) if not host.lost}

    def agent_of(self, node: Node) -> Any:
        return self.agents().get(node.made.node_id)

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


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
