"""The actors: their methods compute what plain Python computes too, and strike when told to."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import resource
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from chaos_forks import Children
from chaos_left import left_in_this_process
from chaos_values import Payload, arrays, digest, make, scribble

import conveyor

#: What an actor may do to itself, and how it is then said to have ended: (signal, exit code).
ENDS = {
    "null pointer": (signal.SIGSEGV, None),
    "own SIGSEGV": (signal.SIGSEGV, None),
    "own SIGKILL": (signal.SIGKILL, None),
    "abort": (signal.SIGABRT, None),
    "os._exit": (None, 3),
    "sys.exit": (None, 4),
}
RAISES = ("ValueError", "KeyError", "OwnError", "chained")
#: Inside a method, too, but nobody else may notice.
HARMLESS = ("a fork", "a fork that is waited for", "dawdles")


class OwnError(Exception):
    """Takes what pickle would not give it."""

    def __init__(self, *, where: str) -> None:
        super().__init__(f"own error at {where}")
        self.where = where


RAISED = {
    "ValueError": ValueError,
    "KeyError": KeyError,
    "OwnError": OwnError,
    "chained": ValueError,
}


@dataclass(frozen=True)
class Step:
    """What a task knows of itself.

    counted: its result also tells how often it has run in this graph.
    overwrites: it overwrites its arguments, which are its alone.
    """

    graph: str
    task: int
    payload: Payload
    counted: bool
    overwrites: bool
    pause: float
    items: int = 0  # how many a generator yields


@dataclass(frozen=True)
class Strike:
    """A fault inside a method. ``slot``: where in the clock its time goes."""

    kind: str
    slot: int
    seconds: float = 0.0  # how long it lasts, or what it makes lives
    after: int = 0  # items of a generator


#: Faults of one actor: at which run of which task of which graph.
Strikes = Mapping[tuple[str, int, int], Strike]


class Due(NamedTuple):
    """What strikes in a run, and where that is, in words."""

    run: int
    strike: Strike | None
    where: str


class Clock:
    """Times of faults, in memory that is shared with the actors; one for each slot."""

    SLOTS = 64

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, 8 * self.SLOTS)
        self._memory = mmap.mmap(descriptor, 8 * self.SLOTS)
        os.close(descriptor)

    def stamp(self, slot: int) -> None:
        struct.pack_into("q", self._memory, 8 * slot, time.monotonic_ns())

    def read(self, slot: int) -> int:
        """Nanoseconds of the monotonic clock; 0: it has not happened."""
        return int(struct.unpack_from("q", self._memory, 8 * slot)[0])

    def clear(self) -> None:
        self._memory[:] = bytes(8 * self.SLOTS)


class Exits:
    """The pids of those that have ended in good order: a file that each adds to."""

    def __init__(self, path: str) -> None:
        self._path = path

    def note(self, pid: int) -> None:
        with open(self._path, "a") as file:
            file.write(f"{pid}\n")

    def read(self) -> set[int]:
        try:
            with open(self._path) as file:
                return {int(line) for line in file}
        except FileNotFoundError:
            return set()


class Chaos:
    """One object for an actor; plain Python evaluates graphs with others of the same class."""

    def __init__(self, clock: str = "") -> None:
        self._clock = Clock(clock) if clock else None
        self._exits = Exits(clock + ".exits")
        self._children = Children()
        self._runs: Counter[tuple[str, int]] = Counter()
        self._strikes: Strikes = {}
        self._noted: dict[str, int] = {}
        self._streaming = 0

    def begin(self, strikes: Strikes) -> int:
        """A new round."""
        if wrong := self._children.reap():
            raise AssertionError(wrong)
        self._runs.clear()
        self._noted.clear()
        self._strikes = strikes
        return os.getpid()

    def __conveyor_exit__(self) -> None:
        self._exits.note(os.getpid())

    def ping(self, x: Any) -> Any:
        return x

    def limit_memory(self, more: int | None) -> None:
        """Let this process take so many bytes of addresses beyond what it has; ``None``: any."""
        with open("/proc/self/statm") as statm:
            now = mmap.PAGESIZE * int(statm.read().split()[0])
        limit = resource.RLIM_INFINITY if more is None else now + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    def out_of_band(self) -> list[str]:
        return left_in_this_process()

    def load(self, refs: list[Any]) -> Any:
        return refs[0].get()

    def mix(self, step: Step, /, *args: Any, **kwargs: Any) -> Any:
        return make(step.payload, self._run(step, args, kwargs))

    @conveyor.method(num_returns=2)
    def split2(self, step: Step, /, *args: Any, **kwargs: Any) -> Any:
        seed = self._run(step, args, kwargs)
        return make(step.payload, seed), seed

    @conveyor.method(num_returns=3)
    def split3(self, step: Step, /, *args: Any, **kwargs: Any) -> Any:
        seed = self._run(step, args, kwargs)
        return [seed, make(step.payload, seed ^ 1), None]

    def forward(self, step: Step, /, *args: Any, **kwargs: Any) -> Any:
        """The very objects it was given."""
        return self._run(step, args, kwargs), args, kwargs

    def note(self, step: Step, /, *args: Any, **kwargs: Any) -> None:
        """Has an effect."""
        seed = self._run(step, args, kwargs)
        self._noted[step.graph] = digest(seed, self._noted.get(step.graph, 0))

    def noted(self, graph: str) -> int:
        return self._noted.get(graph, 0)

    def items(self, step: Step, /, *args: Any, **kwargs: Any) -> Iterator[Any]:
        self._streaming += 1
        try:
            due, given = self._due(step), (args, kwargs)
            seed = self._seed(step, due, args, kwargs)
            for i in range(step.items):
                self._strike(due, given, i)
                yield make(step.payload, digest(i, seed))
            self._strike(due, given, step.items)
        finally:
            self._streaming -= 1

    def streaming(self) -> int:
        """How many generators have begun and have not ended."""
        return self._streaming

    def _run(self, step: Step, args: Any, kwargs: Any) -> int:
        due = self._due(step)
        self._strike(due, (args, kwargs))
        return self._seed(step, due, args, kwargs)

    def _due(self, step: Step) -> Due:
        """A run begins."""
        where = (step.graph, step.task)
        run = self._runs[where]
        self._runs[where] += 1
        return Due(run, self._strikes.get((*where, run)), f"{where} run {run}")

    def _seed(self, step: Step, due: Due, args: Any, kwargs: Any) -> int:
        run = due.run if step.counted else 0
        seed = digest((step.graph, step.task, run, args, kwargs))
        if self._clock is not None:
            if step.overwrites:
                scribble((args, kwargs))
            if step.pause:
                time.sleep(step.pause)
        return seed

    def _strike(self, due: Due, given: Any, after: int = 0) -> None:
        """Let what is ``due`` happen, if it is when there have been so many items."""
        if due.strike is not None and due.strike.after == after:
            self._do(due.strike, due.where, given)

    def _do(self, strike: Strike, where: str, given: Any) -> None:
        kind = strike.kind
        if self._clock is not None:
            self._clock.stamp(strike.slot)
        if kind == "ValueError":
            raise ValueError(where)
        if kind == "KeyError":
            raise KeyError(where)
        if kind == "OwnError":
            raise OwnError(where=where)
        if kind == "chained":
            try:
                {}[where]
            except KeyError as error:
                raise ValueError(where) from error
        if self._clock is None:
            return  # plain Python lives on
        if kind == "dawdles":
            time.sleep(strike.seconds)
            return
        if kind in HARMLESS:
            wait = kind == "a fork that is waited for"
            inherited = [(array, digest(array)) for array in arrays(given)]
            self._children.fork(inherited, strike.seconds, wait, f"at {where}")
            return
        if kind == "null pointer":
            ctypes.string_at(0)
        if kind == "own SIGSEGV":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "own SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "abort":
            os.abort()
        if kind == "os._exit":
            os._exit(3)
        if kind == "sys.exit":
            sys.exit(4)
        time.sleep(60)  # a signal to oneself may take a moment
        raise AssertionError(kind)


class HandlerChaos(Chaos):
    """The same with a signal handler: its main thread sleeps where signals can wake it."""

    def __init__(self, clock: str = "") -> None:
        super().__init__(clock)
        signal.signal(signal.SIGUSR2, lambda number, frame: None)


class AsyncChaos(Chaos):
    """The same with coroutines."""

    async def amix(self, step: Step, /, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        due = self._due(step)
        strike = due.strike
        if strike is not None and strike.kind == "dawdles":
            if self._clock is not None:
                self._clock.stamp(strike.slot)
                await asyncio.sleep(strike.seconds)  # it may be cancelled meanwhile
        else:
            self._strike(due, (args, kwargs))
        seed = self._seed(step, due, args, kwargs)
        await asyncio.sleep(0)
        return make(step.payload, seed)

    async def aitems(self, step: Step, /, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        self._streaming += 1
        try:
            await asyncio.sleep(0)
            due, given = self._due(step), (args, kwargs)
            seed = self._seed(step, due, args, kwargs)
            for i in range(step.items):
                self._strike(due, given, i)
                yield make(step.payload, digest(i, seed))
                await asyncio.sleep(0)
            self._strike(due, given, step.items)
        finally:
            self._streaming -= 1
