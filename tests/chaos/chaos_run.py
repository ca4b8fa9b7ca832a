"""A run: rounds one after the other, and between them nothing may be left."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from random import Random

import psutil
from chaos_actors import Clock
from chaos_around import Around, Holdings, Wrong
from chaos_pool import Pool
from chaos_round import Round
from chaos_tally import Tally
from chaos_watch import DeathTimes, Hand, Hiccups, Watchdog

import conveyor

MB = 1 << 20
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
#: s for what goes on behind a round: dropped graphs, ends of processes.
SOON = 8.0
#: What the driver may have grown by at the end of a run, beyond its size after a tenth of it.
PRIVATE_GROWTH = 48 * MB
SHARED_GROWTH = 256 * MB


def run(seed: int, seconds: float, rounds: int | None, hang: float, replay: int = 0) -> int:
    """Rounds until ``seconds`` are over or there were ``rounds``. Exit code of the program.

    replay: only the round with seed ``seed``, so often.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    sys.setswitchinterval(0.001)  # the threads that measure are to run when they can
    tally = Tally()
    before = _descriptors()
    shared_before = set(os.listdir("/dev/shm"))
    limit = replay or rounds
    draw = Random(seed)
    seeds = iter(lambda: seed if replay else draw.randrange(1 << 48), None)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # for whatever dumps core all the same
        good = _session(seeds, seconds, limit, hang, tally, os.path.join(folder, "clock"))
        os.chdir("/")
    gc.collect()
    left = psutil.Process().children(recursive=True)
    descriptors = {fd: what for fd, what in _descriptors().items() if before.get(fd) != what}
    shared = {n for n in os.listdir("/dev/shm") if n not in shared_before and "conveyor" in n}
    print(tally.table())
    if good and (left or descriptors or shared):
        print(f"left: processes {left}, descriptors {descriptors}, /dev/shm {shared}")
        good = False
    print(f"wrong results, hangs, leaks: {'none' if good else 'SEE ABOVE'} (seed {seed})")
    return 0 if good else 1


def _session(
    seeds: Iterator[int], seconds: float, rounds: int | None, hang: float, tally: Tally, clock: str
) -> bool:
    """Whether all went well in all rounds of one session."""
    current: list[Round] = []
    conveyor.init(log_to_driver=False)
    deaths, hand, hiccups = DeathTimes(), Hand(), Hiccups()
    pool = Pool(clock, deaths, tally)
    watchdog = Watchdog(
        hang,
        lambda: "\n".join(f"{_how_to(r.seed)}\n{r.describe()}\n{r.state()}" for r in current),
        lambda: [member.pid for member in pool.members],
    )
    around = Around(pool, Clock(clock), hand, hiccups, deaths, watchdog, tally, Holdings())
    end = time.monotonic() + seconds
    usual = _kinds_of_descriptors()
    good = True
    try:
        while time.monotonic() < end and (rounds is None or tally.rounds < rounds):
            current[:] = [Round(next(seeds), around)]
            current[0].run()
            current.clear()
            watchdog.doing("between rounds")
            pool.replace_the_dead()
            settled = tally.rounds % 20 == 1
            around.holdings.let_go(Random(tally.rounds), everything=settled)
            if settled:
                _check_descriptors(usual)
                _check_processes(pool)
                tally.memory.append(_memory())
        watchdog.doing("the end")
        around.holdings.let_go(Random(0), everything=True)
        gc.collect()
        tally.memory.append(_memory())
        _check_memory(tally)
    except BaseException:
        good = False
        traceback.print_exc()
        for broken in current:
            print(f"\n{_how_to(broken.seed)}\n{broken.describe()}", file=sys.stderr)
            print(broken.state(), file=sys.stderr)
    current.clear()
    hand.close()
    watchdog.doing("shutdown")
    conveyor.shutdown()
    watchdog.close()
    hiccups.close()
    deaths.close()
    pool.close()
    return good


def _how_to(seed: int) -> str:
    return f"again: python tests/chaos --replay {seed}"


def _descriptors() -> dict[int, str]:
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the listing's own
            continue
    return found


def _kinds_of_descriptors() -> list[str]:
    return sorted(re.sub(r"\d+", "", what) for what in _descriptors().values())


def _check_descriptors(usual: list[str]) -> None:
    """With all actors there, no graph, and no values held, the driver always has the same ones."""
    end = time.monotonic() + SOON
    while (kinds := _kinds_of_descriptors()) != usual:
        if time.monotonic() > end:
            more, fewer = Counter(kinds) - Counter(usual), Counter(usual) - Counter(kinds)
            raise Wrong(f"descriptors: too many {dict(more)}, missing {dict(fewer)}")
        gc.collect()  # dropped graphs
        time.sleep(0.001)


def _check_processes(pool: Pool) -> None:
    """Beside the fork server there are the actors of the pool, and nobody else."""
    pids = {member.pid for member in pool.members}
    end = time.monotonic() + SOON
    while True:
        others = [p for p in psutil.Process().children(recursive=True) if p.pid not in pids]
        if len(others) <= 1:
            return
        if time.monotonic() > end:
            raise Wrong(f"processes that should have ended: {others}")
        time.sleep(0.005)


def _memory() -> tuple[int, int]:
    """Private and shared bytes of the driver that are in memory. Without what its allocator keeps of
    large values that are gone: that can be any amount, and is no leak."""
    if _malloc_trim is not None:
        _malloc_trim(0)
    found = {}
    with open("/proc/self/status") as status:
        for line in status:
            name, _, rest = line.partition(":")
            if name in ("RssAnon", "RssShmem"):
                found[name] = int(rest.split()[0]) * 1024
    return found["RssAnon"], found["RssShmem"]


def _check_memory(tally: Tally) -> None:
    first, last = tally.memory[len(tally.memory) // 10], tally.memory[-1]
    for what, was, now, bound in zip(
        ("private", "shared"), first, last, (PRIVATE_GROWTH, SHARED_GROWTH), strict=True
    ):
        if now - was > bound:
            raise Wrong(f"the driver's {what} memory has grown from {was >> 20} to {now >> 20} MiB")
