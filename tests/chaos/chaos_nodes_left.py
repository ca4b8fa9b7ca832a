"""What the driver and the agents have when nothing goes on: what the living need, and nothing else."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections import Counter
from typing import Any

import psutil
from chaos_idle import shared
from chaos_nodes import Nodes, ask
from chaos_nodes_judge import WrongError

import conveyor
from conveyor import _core
from conveyor.runtime import context

#: s for what goes on behind a round.
_SOON = 30.0
#: s, and bytes for each process: the memory of values that nobody holds has gone back.
_BACK, _KEPT = 20.0, 1 << 20


def _kinds() -> Counter[str]:
    """Descriptors of this process that are not Ray's."""
    kinds: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            what = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the listing's own
            continue
        if re.search("memfd|pidfd", what):
            kinds[re.sub(r"\d+", "", what)] += 1
    return kinds


def _of_agent(its: Any) -> dict[str, Any]:
    station = its._node_agent
    kinds: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{entry}"
        if os.path.islink(path):
            kinds[os.readlink(path).partition(" ")[0]] += 1
    return {
        "expected": len(its._expected),
        "living": len(its._living),
        "locals": len(station._locals),
        "blocks": sum(proxy.arena.blocks_out for proxy in station._proxies.values()),
        "segments": len(station._segments),
        "leases": _core.live_leases(),
    }


def _state(nodes: Nodes) -> dict[str, tuple[Any, Any]]:
    """What there is, and what is due."""
    driver = context.running()
    abroad, hosts = driver.remote_nodes, driver._engine
    living = [member for member in nodes.members if not member.struck]
    elsewhere = [member for member in living if member.node is not nodes.own]
    exports = driver.exports
    exports.tidy()
    state: dict[str, tuple[Any, Any]] = {
        "processes": (len(hosts._living), len(living)),
        "proxies": (len(abroad._node_of), len(elsewhere)),
        "arenas": (len(abroad._arenas), len(elsewhere)),
        "links": (len(abroad._links), len(elsewhere)),
        "abroad": (len(hosts._remote_nodes), len(elsewhere)),
        "pidfds": (_kinds()["anon_inode:[pidfd]"], len(living) - len(elsewhere)),
        "values with references to them": (exports.entry_count, 0),
        "values that are kept": (conveyor.objects(), []),
        "leases": (_core.live_leases(), 0),
        "blocks of the driver": (driver.process.arena.blocks_out, 0),
        "blocks of proxies": (sum(arena.blocks_out for arena in abroad._arenas.values()), 0),
    }
    for node in nodes.nodes:
        agent = nodes.agent_of(node)
        if agent is None or node.lost:
            continue
        of_agent = ask(agent, _of_agent)
        there = sum(member.node is node for member in elsewhere)
        for what, due in {"living": there, "locals": there, "expected": 0, "leases": 0}.items():
            state[f"{what} of {node.resource}"] = of_agent[what], due
        state[f"blocks of proxies at {node.resource}"] = of_agent["blocks"], 0
    return state


def _processes(nodes: Nodes) -> list[str]:
    """Those that the session knows of, and who of them is a member."""
    known = {member.pid: member for member in nodes.members if not member.struck}
    living = context.running()._engine._living.values()
    return [f"{one.name} {one.pid}: {known.get(one.pid, 'nobody')}" for one in living]


def _held() -> list[str]:
    """The values with references to them: who has one, and who may come with which pickle."""
    exports = context.running().exports
    readers = exports._borrows._readers
    found = []
    for export, entry in list(exports._entries.items()):
        holders = [getattr(holder, "number", "the driver") for holder in entry.holders]
        tickets = {ticket: readers.get(ticket, "whoever") for ticket in entry.borrow_ids}
        owner = getattr(entry.owner, "number", "the driver")
        came = "has come" if entry.outcome is not None else "is to come"
        found.append(f"{export} of {owner}, {came}: held by {holders}, tickets {tickets}")
    return found


def check_round(nodes: Nodes) -> None:
    """With no graph there is what the living have, and nothing else."""
    end = time.monotonic() + _SOON
    while True:
        gc.collect()
        wrong = {what: pair for what, pair in _state(nodes).items() if pair[0] != pair[1]}
        if not wrong:
            return
        if time.monotonic() > end:
            having = f"values: {_held()}; processes: {_processes(nodes)}"
            raise WrongError(f"left (found, due): {wrong}; {having}")
        time.sleep(0.05)


class Before:
    """What there was before a session, and must be behind it."""

    def __init__(self) -> None:
        gc.collect()
        self._kinds = _kinds()
        self._threads = set(threading.enumerate())

    def check_memory(self, nodes: Nodes) -> None:
        """Idle memory has gone back, of all processes."""
        pids = [os.getpid(), *(member.pid for member in nodes.members)]
        pids += [ask(agent, lambda _: os.getpid()) for agent in nodes.agents().values()]
        end = time.monotonic() + _BACK
        while (left := shared(pids)) > _KEPT * len(pids):
            if time.monotonic() > end:
                each = {pid: shared([pid]) for pid in pids}
                raise WrongError(f"{left >> 10} KiB of shared memory are still there: {each}")
            gc.collect()
            time.sleep(0.05)

    def check_end(self, nodes: Nodes) -> None:
        """The session is over, and all of its processes; Ray's daemons are as they were."""
        end = time.monotonic() + _SOON
        while left := self._left():
            if time.monotonic() > end:
                raise WrongError(f"left of the session: {left}")
            gc.collect()
            time.sleep(0.05)
        for node in [nodes.own, *nodes.nodes]:
            if not node.lost and not node.raylet.is_running():
                raise WrongError(f"the raylet of {node.resource} has ended")

    def _left(self) -> dict[str, Any]:
        found = {
            "descriptors": dict(_kinds() - self._kinds),
            "threads": [one for one in threading.enumerate() if one not in self._threads],
            "processes": [line for line in _workers() if re.match(r"ray::(Agent|\w+\.run)", line)],
        }
        return {kind: these for kind, these in found.items() if these}


def _workers() -> list[str]:
    """What Ray's workers of this program do."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            found.append(" ".join(child.cmdline()))
        except psutil.Error:
            continue
    return found
