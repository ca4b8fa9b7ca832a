"""One session of a run: its actors, and what must be as before when nothing is held."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import time
from collections import Counter
from random import Random

import psutil
from chaos_actors import Clock, Exits
from chaos_around import Around, Holdings, Wrong
from chaos_elsewhere import Elsewhere
from chaos_idle import in_use, wait_until_back
from chaos_pool import Pool
from chaos_tally import MemorySizes, Tally
from chaos_watch import DeathTimes, Hand, Hiccups, Watchdog

import conveyor

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
#: s for what goes on behind a round: dropped graphs, ends of processes.
SOON = 8.0


class Session:
    """``cap``: of its memory, in bytes. ``transports``: those that its rounds may use."""

    def __init__(
        self,
        clock: str,
        cap: int | None,
        transports: tuple[str, ...],
        watchdog: Watchdog,
        hiccups: Hiccups,
        tally: Tally,
    ) -> None:
        self.cap = cap
        self._tally = tally
        conveyor.init(
            log_to_driver=False,
            preload=["torch"] if transports else None,  # which takes each actor seconds
            **({} if cap is None else {"arena_bytes": cap}),
        )
        self._deaths, self._hand, holdings = DeathTimes(), Hand(), Holdings()
        pool = Pool(clock, self._deaths, tally)
        self._elsewhere = Elsewhere(pool.server, holdings.some_arrays)
        self.around = Around(
            pool, Clock(clock), self._hand, hiccups, self._deaths, watchdog, tally, holdings,
            self._elsewhere, Exits(clock + ".exits"), transports,
        )  # fmt: skip
        self._rounds = 0
        gc.collect()  # what is left of the last session
        self._usual = _kinds_of_descriptors()
        tally.sessions += 1

    def after_round(self) -> None:
        self._rounds += 1
        self.around.pool.replace_the_dead()
        if self._rounds % 20 == 1:
            self.settle()
        else:
            self.around.holdings.let_go(Random(self._rounds))

    def settle(self, idle: bool = False) -> None:
        """Nothing is held: nothing may be left. ``idle``: wait until memory has gone back, too."""
        self.around.watchdog.doing("settling")
        self.around.holdings.let_go(Random(0), everything=True)
        children = self._elsewhere.children
        if wrong := children.reap():
            raise Wrong("; ".join(wrong))
        _check_descriptors(self._usual)
        self._check_processes()
        if idle:
            self.around.watchdog.doing("waiting for memory to go back")
            pids = [os.getpid(), *(member.pid for member in self.around.pool.members)]
            self._tally.idle.append(wait_until_back(pids))
        self._tally.memory.append(_memory())

    def close(self) -> None:
        """End it; all actors end in good order."""
        members = self.around.pool.members
        pids = {member.pid: member.name for member in members}
        self.give_up()
        if missing := pids.keys() - self.around.exits.read():
            names = [pids[pid] for pid in missing]
            raise Wrong(f"without __conveyor_exit__ have ended: {names}")

    def give_up(self) -> None:
        self._tally.forks += self._elsewhere.children.total
        conveyor.shutdown()
        self._deaths.close()
        self.around.pool.close()

    def _check_processes(self) -> None:
        """Beside the fork server there are the actors of the pool, and nobody else."""
        pids = {member.pid for member in self.around.pool.members}
        end = time.monotonic() + SOON
        while True:
            others = [p for p in psutil.Process().children(recursive=True) if p.pid not in pids]
            if len(others) <= 1:
                return
            if time.monotonic() > end:
                raise Wrong(f"processes that should have ended: {others}")
            time.sleep(0.005)


_TIMER = "anon_inode:[timerfd]"


def descriptors() -> dict[int, str]:
    """Those of this process, and what they are of."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the listing's own
            continue
    return found


def _kinds_of_descriptors() -> list[str]:
    """But for the timer of the thread that sends calls later, which is there from the first of them on."""
    kinds = sorted(re.sub(r"\d+", "", what) for what in descriptors().values())
    if _TIMER in kinds:
        kinds.remove(_TIMER)
    return kinds


def _check_descriptors(usual: list[str]) -> None:
    """With all actors there, no graph, and no values held, the driver always has the same ones."""
    end = time.monotonic() + SOON
    while (kinds := _kinds_of_descriptors()) != usual:
        if time.monotonic() > end:
            more, fewer = Counter(kinds) - Counter(usual), Counter(usual) - Counter(kinds)
            raise Wrong(f"descriptors: too many {dict(more)}, missing {dict(fewer)}")
        gc.collect()  # dropped graphs
        time.sleep(0.001)


def _memory() -> MemorySizes:
    """Of the driver. What its allocator keeps of large values that are gone is given back first, as far as
    it can be."""
    if _malloc_trim is not None:
        _malloc_trim(0)
    found = {}
    with open("/proc/self/status") as status:
        for line in status:
            name, _, rest = line.partition(":")
            if name in ("RssAnon", "RssShmem"):
                found[name] = int(rest.split()[0]) * 1024
    return MemorySizes(found["RssAnon"], found["RssShmem"], *in_use())
