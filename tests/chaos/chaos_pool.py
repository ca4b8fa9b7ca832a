"""The actors of a run: those that survive a round serve in the next."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psutil
from chaos_actors import AsyncChaos, Chaos, HandlerChaos
from chaos_tally import Tally
from chaos_watch import DeathTimes

import conveyor

CLASSES = {"plain": Chaos, "handler": HandlerChaos, "coroutines": AsyncChaos}
#: At each place an actor of this kind.
PLACES = ("plain", "plain", "plain", "handler", "coroutines", "coroutines")


@dataclass
class Member:
    """``restarts``: its ``max_restarts``."""

    handle: Any
    name: str
    kind: str
    pid: int
    pidfd: int
    restarts: int = 0
    dead: bool = False

    @property
    def asynchronous(self) -> bool:
        return self.kind == "coroutines"


class Pool:
    def __init__(self, clock: str, deaths: DeathTimes, tally: Tally) -> None:
        self._clock = clock
        self._deaths = deaths
        self._tally = tally
        self._classes = {kind: conveyor.remote(cls) for kind, cls in CLASSES.items()}
        self.members = [self.start(kind) for kind in PLACES]

    def replace_the_dead(self) -> None:
        for place, member in enumerate(self.members):
            if member.dead:
                os.close(member.pidfd)
                self.members[place] = self.start(member.kind)

    def close(self) -> None:
        for member in self.members:
            os.close(member.pidfd)
        self.members.clear()

    @property
    def server(self) -> int:
        """The pid of the fork server."""
        return psutil.Process(self.members[0].pid).ppid()

    def start(self, kind: str, restarts: int = 0) -> Member:
        handle = self._classes[kind].options(max_restarts=restarts).remote(self._clock)
        pid = conveyor.get(handle.begin.remote({}))
        # It has its connection for refs from the beginning, so that descriptors can be compared. The value is
        # too large to travel with its ref.
        if conveyor.get(handle.load.remote([conveyor.put(f"{pid:5000}")])) != f"{pid:5000}":
            raise AssertionError("a ref gives another value than was put")
        self._tally.started_actors += 1
        return Member(handle, handle._id.name, kind, pid, self.watch(pid), restarts)

    def watch(self, pid: int) -> int:
        """A pidfd of ``pid``, whose end is noted from now on."""
        pidfd = os.pidfd_open(pid)
        self._deaths.add(pid, pidfd)
        return pidfd
