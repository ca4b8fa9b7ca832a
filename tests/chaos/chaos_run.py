"""A run: rounds one after the other, and between them nothing may be left."""

from __future__ import annotations

import gc
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from random import Random

import chaos_transports
import psutil
from chaos_apart import Apart
from chaos_around import Wrong
from chaos_beside import BesideApart, BesideRestarts, BesideRound
from chaos_course import Course
from chaos_direct import DirectRound
from chaos_memory import Memory
from chaos_restarts import Restarts
from chaos_round import Round
from chaos_session import Session
from chaos_session import descriptors as find_descriptors
from chaos_tally import Tally
from chaos_watch import Hiccups, Watchdog

MB = 1 << 20
#: What the driver may have grown by at the end of a run, beyond its size after a tenth of it: what is
#: given out of memory, in bytes, and of Python's blocks. Its size as the kernel sees it goes by the worst
#: moment that each of the allocator's arenas has seen, which comes late if it is rare.
GIVEN_OUT_GROWTH = 4 * MB
BLOCKS_GROWTH = 25_000
PRIVATE_GROWTH = 96 * MB
SHARED_GROWTH = 256 * MB
#: s at least between two waits for idle memory to go back.
IDLE_EVERY = 40.0


#: With how often each is chosen.
KINDS: dict[type[Course], int] = {Round: 68, Restarts: 9, Apart: 7, Memory: 4, DirectRound: 8}
OUT_OF_BAND: dict[type[Course], int] = {BesideRound: 8, BesideRestarts: 2, BesideApart: 2}


def kind_of(rng: Random, only: str | None, transports: bool) -> type[Course]:
    """What kind of round a seed stands for. ``only``: the title of all, or how it begins."""
    kinds = {**KINDS, **(OUT_OF_BAND if transports else {})}
    if only is not None:
        kinds = {kind: often for kind, often in kinds.items() if kind.title.startswith(only)}
    return rng.choices(list(kinds), list(kinds.values()))[0]


def run(
    seed: int,
    seconds: float,
    rounds: int | None,
    hang: float,
    at_least: int = 0,
    replay: int = 0,
    only: str | None = None,
) -> int:
    """Rounds until ``seconds`` are over and there were ``at_least`` so many, or there were ``rounds``. Exit
    code of the program.

    replay: only the round with seed ``seed``, so often.
    only: only rounds of kinds that begin so.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    sys.setswitchinterval(0.001)  # the threads that measure are to run when they can
    tally = Tally()
    shared_before = set(os.listdir("/dev/shm"))
    limit = replay or rounds
    draw = Random(seed)
    seeds = iter(lambda: seed if replay else draw.randrange(1 << 48), None)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # for whatever dumps core all the same
        with chaos_transports.usable() as transports:
            before = find_descriptors()  # with the memory of a simulated device, which stays
            everything = Run(seeds, hang, os.path.join(folder, "clock"), tally, transports, only)
            good = everything.rounds(seconds, limit, at_least)
            everything.close()
        os.chdir("/")
    gc.collect()
    left = psutil.Process().children(recursive=True)
    descriptors = {fd: what for fd, what in find_descriptors().items() if before.get(fd) != what}
    shared = {n for n in os.listdir("/dev/shm") if n not in shared_before and "conveyor" in n}
    print(tally.table())
    if good and (left or descriptors or shared):
        print(f"left: processes {left}, descriptors {descriptors}, /dev/shm {shared}")
        good = False
    print(f"wrong results, hangs, leaks: {'none' if good else 'SEE ABOVE'} (seed {seed})")
    return 0 if good else 1


class Run:
    """The rounds, the sessions that they need, and who watches."""

    def __init__(
        self,
        seeds: Iterator[int],
        hang: float,
        clock: str,
        tally: Tally,
        transports: tuple[str, ...],
        only: str | None,
    ) -> None:
        self._transports = transports
        self._only = only
        self._seeds = seeds
        self._clock = clock
        self._tally = tally
        self._current: list[Course] = []
        self._session: Session | None = None
        self._idle_at = time.monotonic()
        self.hiccups = Hiccups()
        self.watchdog = Watchdog(hang, self._describe, self._pids)

    def rounds(self, seconds: float, limit: int | None, at_least: int) -> bool:
        """Whether all went well in all of them."""
        tally = self._tally
        end = time.monotonic() + seconds
        try:
            while (time.monotonic() < end or tally.rounds < at_least) and (
                limit is None or tally.rounds < limit
            ):
                self._round(next(self._seeds))
            self.watchdog.doing("the end")
            if self._session is not None:
                self._check_idle()
                _check_memory(tally)
                self._session.close()
            return True
        except BaseException:
            traceback.print_exc()
            if self._current:
                print(self._describe(), file=sys.stderr)
            self._current.clear()
            self.watchdog.doing("shutdown")
            if self._session is not None:
                self._session.give_up()
            return False

    def close(self) -> None:
        self._session = None  # with its clock
        self.watchdog.close()
        self.hiccups.close()

    def _round(self, seed: int) -> None:
        rng = Random(seed)
        kind = kind_of(rng, self._only, bool(self._transports))
        cap = Memory.session_cap(seed) if kind is Memory else None
        if self._session is not None and cap != self._session.cap:
            self.watchdog.doing("the end of a session")
            self._session.settle()
            self._session.close()
            self._session = None
        if self._session is None:
            self.watchdog.doing("the beginning of a session")
            self._session = Session(
                self._clock, cap, self._transports, self.watchdog, self.hiccups, self._tally
            )
        self._current[:] = [kind(seed, self._session.around, rng)]
        self._current[0].run()
        self._current.clear()
        self.watchdog.doing("between rounds")
        self._session.after_round()
        # Where memory was short there is much to give back.
        if kind is Memory and time.monotonic() - self._idle_at > IDLE_EVERY:
            self._check_idle()

    def _check_idle(self) -> None:
        assert self._session is not None
        self._session.settle(idle=True)
        self._idle_at = time.monotonic()

    def _describe(self) -> str:
        again = "again: python tests/chaos" + (f" --only {self._only!r}" if self._only else "")
        return "\n".join(
            f"{again} --replay {r.seed}\n{r.describe()}\n{r.state()}" for r in self._current
        )

    def _pids(self) -> list[int]:
        members = [] if self._session is None else self._session.around.pool.members
        return [member.pid for round_ in self._current for member in round_.members] or [
            member.pid for member in members
        ]


def _check_memory(tally: Tally) -> None:
    first, last = tally.memory[len(tally.memory) // 10], tally.memory[-1]
    bounds = (PRIVATE_GROWTH, SHARED_GROWTH, GIVEN_OUT_GROWTH, BLOCKS_GROWTH)
    for what, was, now, bound in zip(first._fields, first, last, bounds, strict=True):
        if now - was > bound:
            raise Wrong(f"of the driver's memory, {what} has grown from {was} to {now}")
