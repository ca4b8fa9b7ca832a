"""The actors of a run: those that survive a round serve in the next."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from chaos_actors import AsyncChaos, Chaos
from chaos_tally import Tally
from chaos_watch import DeathTimes

import conveyor

#: At each place an actor with coroutines or without.
PLACES = (False, False, False, False, True, True)


@dataclass
class Member:
    handle: Any
    name: str
    pid: int
    pidfd: int
    asynchronous: bool
    dead: bool = False


class Pool:
    def __init__(self, clock: str, deaths: DeathTimes, tally: Tally) -> None:
        self._clock = clock
        self._deaths = deaths
        self._tally = tally
        self._classes = {False: conveyor.remote(Chaos), True: conveyor.remote(AsyncChaos)}
        self.members = [self._start(asynchronous) for asynchronous in PLACES]

    def replace_the_dead(self) -> None:
        for place, member in enumerate(self.members):
            if member.dead:
                os.close(member.pidfd)
                self.members[place] = self._start(member.asynchronous)

    def close(self) -> None:
        for member in self.members:
            os.close(member.pidfd)
        self.members.clear()

    def _start(self, asynchronous: bool) -> Member:
        handle = self._classes[asynchronous].remote(self._clock)
        pid = conveyor.get(handle.begin.remote({}))
        pidfd = os.pidfd_open(pid)
        self._deaths.add(pid, pidfd)
        self._tally.started_actors += 1
        return Member(handle, handle._id.name, pid, pidfd, asynchronous)
