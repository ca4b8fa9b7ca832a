"""Rounds of values that stay with their actors: makers, owners and consumers are killed and stopped
meanwhile."""

from __future__ import annotations

import functools
import os
import signal
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from chaos_around import SOON, Around, Wrong
from chaos_course import Course

import conveyor
from conveyor.exceptions import ActorDiedError, ObjectLostError

#: Elements of a value: of one block, of a few, and of many; the last is read in pieces.
SIZES = (1, 100, 5_000, 70_000, 900_000)
#: s for what does not wait for anybody that is stopped.
WAIT = 60.0


def numbers(seed: int, size: int) -> np.ndarray[Any, Any]:
    """What a maker makes."""
    return np.random.default_rng(seed).integers(0, 1 << 60, size)


def checksum(value: Any) -> int:
    """Of an array, or of several in containers."""
    if isinstance(value, dict):
        return sum(checksum(one) for one in value.values())
    if isinstance(value, (list, tuple)):
        return sum(checksum(one) for one in value)
    return zlib.crc32(np.ascontiguousarray(value))


class Keeper:
    """Any of the actors: all make, own and consume."""

    def __init__(self) -> None:
        self.refs: dict[int, Any] = {}
        self.reused = np.empty(SIZES[-1], np.int64)

    @conveyor.method(tensor_transport="auto")
    def make(self, seed: int, size: int) -> Any:
        return numbers(seed, size)

    @conveyor.method(tensor_transport="auto")
    def make_several(self, seed: int, size: int, count: int) -> Any:
        return {"several": [numbers(seed + i, size) for i in range(count)], "size": size}

    @conveyor.method(tensor_transport="auto")
    def make_items(self, seed: int, size: int, count: int) -> Any:
        for i in range(count):
            yield numbers(seed + i, size)

    def look(self, value: Any, pause: float = 0.0) -> int:
        time.sleep(pause)
        if isinstance(value, dict):
            value = value["several"]
        return checksum(value)

    def look_inside(self, refs: list[Any]) -> int:
        return sum(self.look(conveyor.get(ref)) for ref in refs)

    def look_into(self, refs: list[Any], size: int) -> int:
        return checksum(conveyor.get(refs[0], into=self.reused[:size]))

    def own(self, key: int, maker: Any, seed: int, size: int) -> list[Any]:
        """Call the maker, and own the ref, which others get a copy of."""
        self.refs[key] = maker.make.remote(seed, size)
        return [self.refs[key]]

    def put(self, key: int, seed: int, size: int) -> list[Any]:
        self.refs[key] = conveyor.put(numbers(seed, size), tensor_transport="auto")
        return [self.refs[key]]

    def disown(self, key: int) -> None:
        self.refs.pop(key, None)

    def disown_all(self) -> None:
        self.refs.clear()

    def stored(self) -> int:
        from conveyor.direct.store import TABLE

        return len(TABLE.all())

    def pid(self) -> int:
        return os.getpid()


@functools.cache
def actor_class() -> Any:
    """Made once: the driver knows the methods of each that there is."""
    return conveyor.remote(Keeper)


@dataclass
class Peer:
    """An actor, until it is killed."""

    handle: Any
    name: str
    pid: int
    dead: bool = False


@dataclass
class Kept:
    """A value that stays somewhere. ``needs``: whose death may be the end of it."""

    ref: Any
    sums: int
    needs: list[Peer]
    size: int | None = None  # of a single array
    key: int = -1
    seed: int = 0


@dataclass
class Requested:
    """What was asked of a consumer."""

    ref: Any
    sums: int
    needs: list[Peer] = field(default_factory=list)


class DirectRound(Course):
    """Values are made, passed on, fetched in every way and dropped, in any order."""

    title = "direct"

    def __init__(self, seed: int, around: Around, rng: Random) -> None:
        super().__init__(seed, around, rng)
        self._count_of_peers = rng.randint(2, 4)
        self._steps = rng.randint(20, 120)
        self._peers: list[Peer] = []
        self._kept: list[Kept] = []
        self._requested: list[Requested] = []
        self._stopped: list[tuple[float, Peer]] = []
        self._kills = 0
        self._keys = 0

    def describe(self) -> str:
        return f"{self._count_of_peers} actors, {self._steps} steps, {super().describe()}"

    def run(self) -> None:
        self.around.hiccups.forget()
        self._doing("begin")
        self._peers = [self._start() for _ in range(self._count_of_peers)]
        ways = (
            (6, self._make), (3, self._own), (5, self._ask), (3, self._get), (2, self._part),
            (2, self._items), (4, self._drop), (3, self._settle), (1, self._kill), (1, self._stop),
        )  # fmt: skip
        try:
            for _ in range(self._steps):
                self._go_on()
                self.rng.choices([way for _, way in ways], [often for often, _ in ways])[0]()
            self._go_on(everybody=True)
            while self._requested:
                self._settle()
            self._check_nothing_is_kept()
        finally:
            self._go_on(everybody=True)
            for peer in self._peers:
                if not peer.dead:
                    conveyor.kill(peer.handle)
        self.tally.faults["SIGKILL of a keeper"] += self._kills
        self._count()

    # What happens

    def _start(self) -> Peer:
        handle = actor_class().remote()
        pid = handle.pid.remote().get(WAIT)
        self.tally.started_actors += 1
        return Peer(handle, handle._id.name, pid)

    def _alive(self) -> list[Peer]:
        return [peer for peer in self._peers if not peer.dead]

    def _some_peer(self) -> Peer:
        return self.rng.choice(self._alive())

    def _make(self) -> None:
        peer = self._some_peer()
        seed, size = self.rng.randrange(1 << 30), self.rng.choice(SIZES)
        self._doing(f"{peer.name}.make")
        with suppress(ActorDiedError):
            if self.rng.random() < 0.3:
                count = self.rng.randint(0, 5)
                sums = sum(checksum(numbers(seed + i, size)) for i in range(count))
                ref = peer.handle.make_several.remote(seed, size, count)
                self._kept.append(Kept(ref, sums, [peer]))
            else:
                sums = checksum(numbers(seed, size))
                ref = peer.handle.make.remote(seed, size)
                self._kept.append(Kept(ref, sums, [peer], size, seed=seed))

    def _own(self) -> None:
        """Another actor owns the ref; here is a copy."""
        owner, maker = self._some_peer(), self._some_peer()
        seed, size = self.rng.randrange(1 << 30), self.rng.choice(SIZES)
        self._keys += 1
        self._doing(f"{owner.name} owns what {maker.name} makes")
        try:
            if self.rng.random() < 0.5 and maker is not owner:
                made = owner.handle.own.remote(self._keys, maker.handle, seed, size)
                needs = [owner, maker]
            else:
                made = owner.handle.put.remote(self._keys, seed, size)
                needs = [owner]
            [ref] = self._result(made, needs)
            # Its maker must not be asked to get it before it has made it: the owner's call may come later.
            conveyor.wait([ref], timeout=WAIT)
        except (ActorDiedError, ObjectLostError):
            return
        sums = checksum(numbers(seed, size))
        self._kept.append(Kept(ref, sums, needs, size, self._keys, seed))

    def _ask(self) -> None:
        """A consumer gets some of them as arguments."""
        if not self._kept:
            return
        peer, kept = self._some_peer(), self.rng.choice(self._kept)
        needs = [peer, *kept.needs]
        self._doing(f"{peer.name} gets a value")
        pause = self.rng.choice([0.0, 0.0, 0.002])
        with suppress(ActorDiedError, ObjectLostError):
            how = self.rng.randrange(4)
            if how == 0:
                ref = peer.handle.look.remote(value=kept.ref, pause=pause)
            elif how == 1:
                ref = peer.handle.look_inside.remote([kept.ref])
            elif how == 2 and kept.size is not None:
                ref = peer.handle.look_into.remote([kept.ref], kept.size)
            else:
                ref = peer.handle.look.remote(kept.ref, pause)
            self._requested.append(Requested(ref, kept.sums, needs))

    def _get(self) -> None:
        if not self._kept:
            return
        kept = self.rng.choice(self._kept)
        self._doing("get")
        with suppress(ActorDiedError, ObjectLostError):
            value = self._result(kept.ref, kept.needs)
            self._compare(
                checksum(value["several"] if isinstance(value, dict) else value), kept.sums
            )

    def _part(self) -> None:
        single = [kept for kept in self._kept if kept.size is not None]
        if not single:
            return
        kept = self.rng.choice(single)
        assert kept.size is not None
        start = self.rng.randrange(kept.size)
        part = slice(start, self.rng.randint(start, kept.size))
        self._doing("a part")
        with suppress(ActorDiedError, ObjectLostError):
            expected = checksum(numbers(kept.seed, kept.size)[part])
            if self.rng.random() < 0.5:
                self._compare(checksum(self._result(kept.ref[part], kept.needs)), expected)
            else:
                peer = self._some_peer()
                ref = peer.handle.look.remote(kept.ref[part])
                self._requested.append(Requested(ref, expected, [peer, *kept.needs]))

    def _items(self) -> None:
        peer = self._some_peer()
        seed, size = self.rng.randrange(1 << 30), self.rng.choice(SIZES[:4])
        self._doing(f"items of {peer.name}")
        with suppress(ActorDiedError):
            try:
                stream = peer.handle.make_items.remote(seed, size, 4)
                for i in range(self.rng.randint(0, 4)):
                    self._compare(checksum(stream.next(WAIT)), checksum(numbers(seed + i, size)))
            except ActorDiedError:
                self._expect_a_death([peer])
                raise

    def _drop(self) -> None:
        if not self._kept:
            return
        kept = self._kept.pop(self.rng.randrange(len(self._kept)))
        if kept.key >= 0 and not kept.needs[0].dead:
            with suppress(ActorDiedError):
                kept.needs[0].handle.disown.remote(kept.key)
        self.tally.dropped += 1

    def _settle(self) -> None:
        """Look at some of what was asked."""
        for _ in range(min(len(self._requested), self.rng.randint(1, 6))):
            requested = self._requested.pop(self.rng.randrange(len(self._requested)))
            self._doing("a consumer's answer")
            with suppress(ActorDiedError, ObjectLostError):
                self._compare(self._result(requested.ref, requested.needs), requested.sums)

    def _kill(self) -> None:
        peer = self._some_peer()
        self._doing(f"SIGKILL of {peer.name}")
        time.sleep(self.rng.choice([0.0, self.rng.uniform(0, 0.003)]))
        peer.dead = True
        with suppress(ProcessLookupError):
            os.kill(peer.pid, signal.SIGKILL)
        self._kills += 1
        self._stopped = [(until, one) for until, one in self._stopped if one is not peer]
        self._peers.append(self._start())

    def _stop(self) -> None:
        """One is stopped for a moment. Its memory can be read meanwhile."""
        peer = self._some_peer()
        os.kill(peer.pid, signal.SIGSTOP)
        self._stopped.append((time.monotonic() + self.rng.uniform(0, 0.05), peer))
        readable = [
            kept for kept in self._kept if kept.needs == [peer] and kept.key < 0 and kept.ref.done()
        ]
        if readable:
            self._doing(f"get from {peer.name}, which is stopped")
            value = readable[0].ref.get(WAIT)
            value = value["several"] if isinstance(value, dict) else value
            self._compare(checksum(value), readable[0].sums)
        self._go_on(everybody=True)
        self.tally.faults["SIGSTOP of a keeper"] += 1

    def _go_on(self, everybody: bool = False) -> None:
        now = time.monotonic()
        for until, peer in self._stopped:
            if everybody or until < now:
                with suppress(ProcessLookupError):
                    os.kill(peer.pid, signal.SIGCONT)
        self._stopped = [] if everybody else [one for one in self._stopped if one[0] >= now]

    # What must be

    def _result(self, ref: Any, needs: list[Peer]) -> Any:
        """What ``ref`` gives; an error only if one of those is dead that it needs."""
        try:
            value = ref.get(WAIT)
        except (ActorDiedError, ObjectLostError):
            self._expect_a_death(needs)
            self.tally.errors += 1
            raise
        self.tally.results += 1
        return value

    def _expect_a_death(self, needs: list[Peer]) -> None:
        if not any(peer.dead for peer in needs):
            raise Wrong(f"none of {[peer.name for peer in needs]} is dead, and there is an error")

    def _compare(self, found: int, expected: int) -> None:
        if found != expected:
            raise Wrong(f"a value has the checksum {found}, and not {expected}")

    def _check_nothing_is_kept(self) -> None:
        self._doing("waiting for values to be let go of")
        self._kept.clear()
        for peer in self._alive():
            peer.handle.disown_all.remote().get(WAIT)
        end = time.monotonic() + SOON
        for peer in self._alive():
            while left := peer.handle.stored.remote().get(WAIT):
                if time.monotonic() > end:
                    raise Wrong(f"{peer.name} still keeps {left} values that nobody can fetch")
                time.sleep(0.002)
