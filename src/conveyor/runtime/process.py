"""Endpoints of a process of a session: its slot in the process table, its doorbell, its arena, its peers."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, field

from conveyor import _core
from conveyor.checks import bytes_of_environment, check_bytes, spin_of_environment
from conveyor.codec import Reader, SentDefinitions, set_up_codec, summarize_error
from conveyor.codec.errors import constructor_failure, read_error, summary_of
from conveyor.codec.tensors import staging
from conveyor.exceptions import ConstructorError, RuntimeStateError
from conveyor.runtime import ending, threads
from conveyor.runtime.deadlock import WaitRegistry
from conveyor.runtime.shortage import Shortage
from conveyor.runtime.sources import ChannelEnd, Sources
from conveyor.runtime.status import (
    ActorStatus,
    Label,
    ProcessSnapshot,
    actor_status,
    status_of,
    with_node,
)
from conveyor.runtime.wait_graph import Blockers
from conveyor.runtime.waiting import Alarm
from conveyor.weak import WeakSet

if TYPE_CHECKING:
    import socket

    from conveyor.runtime.remote_memory import RemoteMemory


def memory_limit(root: str = "/") -> int:
    """Return the memory limit in bytes: the least of the machine's memory and the limits of the process's
    memory groups and of those around them, whichever version they are. ``root``: where ``proc`` and ``sys``
    are."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for group in memory_groups(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError):
                text = read_text(os.path.join(group, name)).strip()
                if text.isdigit():  # else "max"
                    limits.append(int(text))
    return min(limits)


def memory_groups(root: str) -> Iterator[str]:
    """The folders of this process's memory groups, from the innermost to the outermost."""
    try:
        lines = read_text(os.path.join(root, "proc/self/cgroup")).splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = os.path.join(root, "sys/fs/cgroup")
        elif "memory" in controllers.split(","):
            top = os.path.join(root, "sys/fs/cgroup/memory")
        else:
            continue
        # In a container the path may be the host's, or lead out of what can be seen from here ("/../x"):
        # what is not there has no files, and the container's own group is at the top.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for inner in range(len(parts), -1, -1):
            yield os.path.join(top, *parts[:inner])


def read_text(path: str) -> str:
    """Read a small file. (``pathlib``, which would do it, is slow to import.)"""
    with open(path, encoding="utf-8") as file:
        return file.read()


#: Lines that one process logs of errors that nobody gets.
_MOST_LINES = 20


class Sweeper:
    """Thread that lets go of dropped results, started with the first channel that brings results to this
    process. It sleeps while no result is dropped that is still to come, and wakes up once for all that are
    dropped within ``quiet`` seconds."""

    def __init__(self, inbox: _core.Inbox, quiet: float) -> None:
        self._leftovers = inbox.leftovers
        self._quiet = quiet
        self._lock = threading.RLock()  # a signal handler may lay a channel, too
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lines = 0
        #: Errors that nobody gets any more, and lines, until they are logged.
        self._unseen: deque[BaseException | str] = deque(maxlen=64)
        #: The failures of constructors that somebody knows, or that were logged; the last ones.
        self.known_failures: deque[bytes] = deque(maxlen=256)
        #: Those that have come once, with more to come.
        self._came_once: deque[bytes] = deque(maxlen=256)

    def start(self) -> None:
        """Start the thread: results will come. Not called by finalizers, which drop results: they may start
        no thread."""
        with self._lock:
            if self._thread is None and not self._closed:
                with suppress(RuntimeError):  # no thread is to be had: the next channel tries again
                    self._thread = threads.serve(self._run, "sweeper")

    def close(self) -> None:
        """End the thread, after a last sweep."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._leftovers.stop()
            thread.join()
            self._sweep()

    def log_soon(self, unseen: BaseException | str) -> None:
        """Have the thread log a line, or an error that nobody will get: the outcome of a reference that was
        dropped. Logging here would not do: finalizers call this, with any lock held, and a handler of the log
        may need that lock."""
        self._unseen.append(unseen)
        if self._thread is None:  # of the inline engine, which has no other threads either
            self._say_unseen()
        else:
            self._leftovers.note_more()

    def _say_unseen(self) -> None:
        while self._unseen:
            self._say(self._unseen.popleft())

    def _say(self, error: BaseException | str) -> None:
        if isinstance(error, str):
            threads.log("warning", "%s", error)
            return
        if isinstance(error, ConstructorError) and self._knows(constructor_failure(error)):
            return
        with suppress(Exception):  # its own code may say what it is
            self._log(summary_of(error))

    def _run(self) -> None:
        while self._leftovers.wait(self._quiet):
            self._sweep()

    def _sweep(self) -> None:
        self._leftovers.sweep()
        self._say_unseen()
        for meta, more in self._leftovers.take_unseen():
            failure = read_error(meta).constructor
            # A constructor's error comes with its own answer, and again with that of each call and of the
            # order that ends the actor: where there is more to come, the first one may be got yet.
            if failure and more and failure not in self._came_once:
                self._came_once.append(failure)
            elif not (failure and self._knows(failure)):
                self._log(summarize_error(meta))

    def _knows(self, failure: bytes) -> bool:
        """Whether that failure of a constructor needs no line any more."""
        with self._lock:
            known = failure in self.known_failures
            if not known:
                self.known_failures.append(failure)
        return known

    def _log(self, text: str) -> None:
        with self._lock:
            self._lines += 1
            lines = self._lines
        if lines > _MOST_LINES:
            return
        threads.log("warning", "an error that nobody has got: %s", text)
        if lines == _MOST_LINES:
            threads.log("warning", "further errors that nobody gets are not logged")


class Pinning:
    """Thread that gives pinned memory up, started with the first block that this process pins. It sleeps
    while nothing is pinned."""

    def __init__(
        self, process_table: _core.ProcessTable, slot: int, arena: _core.Arena, idle: float
    ) -> None:
        self._words = _core.PinWords(process_table, slot)
        self._lock = threading.RLock()  # a signal handler may get a value, too
        self._thread: threading.Thread | None = None
        self._closed = False

        def allocate(nbytes: int) -> _core.Buffer:
            return arena.allocate(nbytes, may_wait=False)

        self.pinned = staging.Pinned(self._words, allocate, self._start, idle)
        staging.set_current(self.pinned)

    def close(self) -> None:
        """Give all pinned memory up at the end of the session, except for what a device still copies."""
        self._closed = True
        if staging.current() is self.pinned:
            staging.set_current(None)
        if self.pinned.here():
            self.pinned.close()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threads.serve(self._run, "pinning")

    def _run(self) -> None:
        while True:
            requested = self._words.wait(self.pinned.pause())
            left = self.pinned.tidy(requested)
            if requested:
                self._words.answer()
            if self._closed and not left:
                return


class OthersArenas:
    """The arenas that this process has opened, until it hears that their processes are dead."""

    def __init__(self, process: Process) -> None:
        self._process = process
        # By slot and incarnation. Single steps change it, so it needs no lock.
        self._opened: dict[tuple[int, int], _core.ArenaView] = {}

    def of(
        self, slot: int, incarnation: int, pid: int, descriptor: int, inode: int
    ) -> _core.ArenaView | None:
        """The arena of a process, which has that file open under that number. ``None``: it cannot be opened.

        By a file of ``/proc``, so neither that process nor the driver is asked."""
        identity = slot, incarnation
        known = self._opened.get(identity) or self._process.known_arena(slot, incarnation)
        if known is not None:
            return known
        try:
            fd = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except (
            OSError
        ):  # it is dead, or the system has no such directory or does not let us: it is copied
            return None
        try:
            # Its number may be another process's by now, and the descriptor's another file's.
            if os.fstat(fd).st_ino != inode:
                return None
            size, process_table = self._process.arena_size.file, self._process.process_table
            view = self._opened[identity] = _core.ArenaView(fd, size, process_table, slot)
        finally:
            os.close(fd)
        if process_table.gone(
            slot, incarnation
        ):  # meanwhile, and this process may have heard of it already
            self._opened.pop(identity, None)
        return view

    def forget_gone(self) -> None:
        """Forget the arenas of dead processes. Values in them stay as long as they are held."""
        for identity in list(self._opened):
            if self._process.process_table.gone(*identity):
                self._opened.pop(identity, None)

    def clear(self) -> None:
        """Forget all arenas: the session is over."""
        self._opened.clear()


class Releasing:
    """Thread that lets go of values kept for others, started with the first frame that keeps one. It sleeps
    until a process that had such a frame has let go of it."""

    def __init__(self, ring: Callable[[], object]) -> None:
        """``ring`` wakes those who wait in this process for something to be let go of."""
        self._notify = ring
        self._wait = _core.ReleaseWait()
        self._lock = threading.RLock()  # a signal handler may send something, too
        self._thread: threading.Thread | None = None
        self._closed = False
        #: Something has been kept, and may be.
        self.started = False

    def start(self) -> None:
        """Start the thread: something is about to be kept.

        Raises:
            SystemLimitError: no thread is to be had, and nobody would let go of it.
        """
        if self.started:
            return
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threads.serve(self._run, "releasing")
            self.started = True

    def close(self) -> None:
        """Stop the thread at the end of the session. Refs may outlive it: the thread ends with the last
        value that is kept."""
        with self._lock:
            self._closed = True
            thread = self._thread
        # What it drops may run any code, also such that ends the session.
        if (
            not self._wait.stop()
            and thread is not None
            and thread is not threading.current_thread()
        ):
            thread.join()

    def _run(self) -> None:
        while self._wait.wait():
            _core.release_held()
            if not self._closed:
                self._notify()


#: The doorbell bit of replies, of results and of channels. Nobody is called for it: who waits looks itself.
RESULT_BIT = 1

#: Rings for calls: outstanding calls of one caller to one actor (the second: if the actor says that it
#: runs so many at the same time), and what a slot holds in place.
CALL_SLOTS = 64
MOST_CALL_SLOTS = 1024
CALL_STRIDE = 2048


#: Default for the sessions that begin from now on.
IDLE_SECONDS = 3.0


def slots_of(depth: int) -> int:
    """How many slots a ring of this depth has: a power of two."""
    return 1 << (depth - 1).bit_length()


class ArenaSize(Struct, frozen=True):
    """``file``: addresses of each arena; ``cap``: bytes with memory behind all of a session's;
    ``idle``: seconds after which memory that is free goes back."""

    file: int
    cap: int
    idle: float = field(default_factory=lambda: IDLE_SECONDS)


def arena_size(arena_bytes: int | None = None) -> ArenaSize:
    """The size of arenas for that cap; ``None``: what ``CONVEYOR_ARENA_BYTES`` says, else half of what this
    process may use, by the machine and its memory groups. ``TypeError`` and ``ValueError`` for what is
    none."""
    if arena_bytes is not None:
        cap = check_bytes(arena_bytes, "arena_bytes")
    else:
        chosen = bytes_of_environment("CONVEYOR_ARENA_BYTES")
        cap = max(memory_limit() // 2 if chosen is None else chosen, 1 << 20)
    return ArenaSize(file=max(16 * cap, 1 << 30), cap=cap)


class RingEnd(Struct, frozen=True):
    """End of a ring: a process, and the bit of its doorbell that is set there. A slot of the process table
    has one process after the other, so ``incarnation`` is part of it."""

    slot: int
    incarnation: int
    bit: int

    @property
    def process(self) -> Reader:
        """The process alone."""
        return self.slot, self.incarnation

    @property
    def doorbell(self) -> tuple[int, int]:
        """Slot and bit to ring."""
        return self.slot, self.bit


#: The driver's slot.
_DRIVER = 0


class Reading(Protocol):
    """Something with reading ends of channels that users may hold for as long as they like."""

    def leave(self) -> None:
        """Keep what has come, for who still asks, and take no more. Does nothing the second time."""

    def under_way(self) -> Blockers:
        """The actors that have work to do of which results come over these channels."""


def _is_remote(
    process_table: _core.ProcessTable, unplaced: Set[int], targets: Sequence[RingEnd]
) -> str:
    """Names of those of ``targets`` that are on other nodes, or may come to be.

    Not a method: a writer holds it, and the collector does not see what a writer holds.
    """
    return ", ".join(
        [
            process_table.name(t.slot)
            for t in targets
            if process_table.is_remote(t.slot) or t.slot in unplaced
        ]
    )


class Process:
    """This process's endpoints. Made once, by the driver's start or by an actor's ``main``."""

    def __init__(
        self,
        process_table: _core.ProcessTable,
        slot: int,
        eventfd: int,
        arena_fd: int,
        arena: ArenaSize,
    ) -> None:
        set_up_codec()
        _core.show_decoding_on(process_table, slot)
        self.process_table = process_table
        self.slot = slot
        #: This process among those that have had its slot, as others know it.
        self.identity: Reader = slot, process_table.incarnation(slot)
        process_table.publish_directory(slot)
        self.arena_size = arena
        self.inbox = _core.Inbox(process_table, slot, eventfd, threading.main_thread().ident or 0)
        spin = spin_of_environment()
        if spin is not None:
            self.inbox.spin_ns = int(spin * 1000)
        self._spin_ns = self.inbox.spin_ns
        self._spin_limits: dict[int, int] = {}
        # Threads of this process ring it too.
        process_table.set_eventfd(slot, eventfd, process_table.incarnation(slot))
        #: The session is over for this process's threads, though its processes may still be ending.
        self.ended = False
        #: This is an actor's process, and its loop is over: it begins no more calls.
        self.loop_over = False
        #: Hears of what a step of a graph has raised here, before anybody else does.
        self.on_failure: Callable[[BaseException], object] = lambda _: None
        self.alarm = Alarm(lambda: process_table.notify(slot, _core.ATTENTION_BIT))
        self.wait_registry = WaitRegistry(self.inbox, process_table, slot)
        # As long as the arena's thread waits for more leases to end.
        self.sweeper = Sweeper(self.inbox, arena.idle / 3)
        #: Lets go of what is kept for others.
        self.releasing = Releasing(self.notify)
        self.arena = _core.Arena(arena_fd, arena.file, arena.cap, process_table, slot, arena.idle)
        #: Values that wait for memory at a cap.
        self.shortage = Shortage(
            process_table, self.inbox, self.arena, self.alarm, self.wait_registry, self.under_way
        )
        #: Gives up what devices have pinned of arenas.
        self.pinning = Pinning(process_table, slot, self.arena, arena.idle)
        #: Incarnation and arena of each peer, by slot.
        self._peers: dict[int, tuple[int, _core.ArenaView]] = {}
        self._peers_lock = threading.Lock()
        #: Arenas of the processes whose values this one reads where they lie.
        self.arenas = OthersArenas(self)
        #: Registry of the processes that send frames to this one.
        self.sources = Sources()
        self._reading: WeakSet[Reading] = WeakSet()
        self._hanging_up: WeakSet[ChannelEnd] = WeakSet()
        self._reading_lock = threading.RLock()  # a signal handler may lay a channel
        #: Asks the nodes of the processes in these slots, which are other ones, for snapshots; a text says
        #: why there is none. Only the driver's process has it.
        self.look_at_remote: Callable[[Sequence[int]], list[ProcessSnapshot | str]] | None = None
        #: Names the node of the process in a slot. Only the driver's process has it, where there are
        #: several nodes.
        self.name_node: Callable[[int], str] | None = None
        #: Fetches memory of processes of other nodes; ``None`` where there is no other node.
        self.remote_memory: RemoteMemory | None = None
        #: Fetches what a process of this node asks for over a socket, which is this process's from then on;
        #: ``None`` where this process does not do that for others.
        self.serve_memory: Callable[[socket.socket], object] | None = None
        #: Slots of processes that have no place yet: they may come to be on another node.
        self.unplaced: set[int] = set()
        self._closed = False

    @property
    def waits_end(self) -> bool:
        """Whether the session's actors have no more time for what they wait for: the driver leaves."""
        return self.process_table.is_exiting(_DRIVER)

    def describe(self, slot: int, label: Label | None = None) -> str:
        """Describe what the process in ``slot`` is doing, for an error. ``label`` names a (graph, node)."""
        return self.statuses([(slot, None)], label)[0].describe()

    def statuses(
        self, processes: Sequence[tuple[int, int | None]], label: Label | None = None
    ) -> list[ActorStatus]:
        """Return the status of these processes, given by slot and incarnation. The driver asks other nodes,
        all of them together, and not for long."""
        found = [actor_status(self.process_table, *process, label) for process in processes]
        remote = [index for index, status in enumerate(found) if status.state == "elsewhere"]
        # A forked child has no connection to other nodes.
        if remote and self.look_at_remote is not None and not self.inbox.inherited:
            seen = self.look_at_remote([processes[index][0] for index in remote])
            for index, snapshot in zip(remote, seen, strict=True):
                found[index] = (
                    replace(found[index], unknown=snapshot)
                    if isinstance(snapshot, str)
                    else status_of(snapshot, label)
                )
        name = self.name_node
        return found if name is None else [with_node(one, name) for one in found]

    def notify(self) -> None:
        """Have whoever waits in this process look again."""
        self.process_table.notify(self.slot, _core.ATTENTION_BIT)

    def reads(self, part: Reading) -> None:
        """Have ``part`` leave its channels when the session ends: what is mapped of its writers' arenas
        is not to last as long as somebody holds a graph, or a ref."""
        with self._reading_lock:
            self._reading.add(part)
            closed = self._closed
        if closed:  # meanwhile, in another thread
            part.leave()

    def under_way(self) -> list[tuple[int, int, str]]:
        """The works that this process has given to actors."""
        with self._reading_lock:
            reading = list(self._reading)
        return [blocker for part in reading for blocker in part.under_way()]

    def hangs_up(self, end: ChannelEnd) -> None:
        """Have ``end`` hang up when the session ends, if this is the driver's process."""
        with self._reading_lock:
            self._hanging_up.add(end)

    def hang_up(self) -> None:
        """End all sending and receiving in this process: the session ends."""
        with self._reading_lock:
            ends = list(self._hanging_up)
        for end in ends:
            end.hang_up()

    def adopt(self, slot: int, incarnation: int, arena_fd: int, eventfd: int) -> _core.ArenaView:
        """Make the ``incarnation``-th process of ``slot`` a peer; its arena. The descriptors stay the
        caller's.

        One that has replaced it stays the slot's: introductions that come on two ways may overtake each
        other. So whoever was introduced to a process takes its arena from here. By the slot alone it would
        be the successor's, or nobody's once the process has died.
        """
        view = _core.ArenaView(arena_fd, self.arena_size.file, self.process_table, slot)
        with self._peers_lock:
            known = self._peers.get(slot)
            if known is None or known[0] <= incarnation:
                self._peers[slot] = incarnation, view
                self.process_table.set_eventfd(slot, eventfd, incarnation)
        return view

    def own_view(self, arena_fd: int) -> _core.ArenaView:
        """This process's own arena, as its peers see it. The descriptor stays the caller's."""
        return _core.ArenaView(arena_fd, self.arena_size.file, self.process_table, self.slot)

    def descriptors(self, slot: int) -> tuple[int, int]:
        """Arena and eventfd of a peer, to be passed on; they stay this process's until it is forgotten."""
        return self._peers[slot][1].fd, self.process_table.eventfd(slot)

    def forget_gone(self) -> None:
        """Let go of what is kept of processes that are dead and will not be heard of again."""
        self.arenas.forget_gone()
        for slot, (incarnation, _) in list(self._peers.items()):
            if self.process_table.gone(slot, incarnation):
                with self._peers_lock:
                    if self._peers.get(slot, (0,))[0] == incarnation:
                        del self._peers[slot]
                        self.process_table.forget_eventfd(slot)

    def limit_spin(self, graph: int, microseconds: float | None) -> None:
        """Limit how long this process spins while it has a part in ``graph``. ``None``: the part is over, or
        sets no limit."""
        before = self._spin_limits.pop(graph, None)
        if microseconds is not None:
            self._spin_limits[graph] = int(microseconds * 1000)
        if self._spin_limits.get(graph) != before:
            self.inbox.spin_ns = min([self._spin_ns, *self._spin_limits.values()])

    def close(self) -> None:
        """Close the endpoints at the end of the session: values that are held stay, nothing new can come or
        go. An exception that is raised meanwhile (Ctrl-C, say) keeps nothing else from being closed."""
        with self._reading_lock:
            self._closed = True
            reading = list(self._reading)
        self.alarm.close()
        with ExitStack() as last:
            last.callback(_core.show_decoding_on, None, 0)
            last.callback(_core.release_held)  # last of all: what the arena has let go of
            for close in (self.inbox.close_fds, self.arena.close, self.process_table.close_fds):
                last.callback(close)
            last.callback(self._peers.clear)
            last.callback(self.arenas.clear)
            if not ending.begun_here():  # else all of its memory goes at once
                for part in reading:
                    last.callback(part.leave)
                last.callback(_close_opened)
            last.callback(self.pinning.close)  # first: while what it has pinned is mapped

    def forget(self, slot: int) -> None:
        """Forget ``slot``, which is no peer any more; values received from it stay as long as they are
        held."""
        self.arenas.forget_gone()
        with self._peers_lock:
            self._peers.pop(slot, None)
            self.process_table.forget_eventfd(slot)

    def writer(
        self,
        segment: _core.Segment,
        offset: int,
        targets: Sequence[RingEnd],
        carries: str,
        graph: int = 0,
        edge: int = 0,
        *,
        budget: _core.MemoryBudget | None = None,
    ) -> _core.Writer:
        """The writing end of a ring; ``targets`` are its readers. ``carries`` says in words, and ``graph``
        and ``edge`` say by number, what goes over it. ``budget``: what its values, and others', may take of
        the arena."""
        return _core.Writer(
            segment,
            offset,
            self.process_table,
            [target.doorbell for target in targets],
            self.arena,
            SentDefinitions(
                tuple([target.process for target in targets]),
                partial(_is_remote, self.process_table, self.unplaced, targets),
            ),
            graph,
            edge,
            carries,
            budget,
        )

    def may_be_remote(self, slot: int) -> bool:
        """Whether the process there is on another node, or may come to be."""
        return self.process_table.is_remote(slot) or slot in self.unplaced

    def ring_end(self, bit: int) -> RingEnd:
        """Return this process's own end, for rings that ring ``bit``."""
        return RingEnd(*self.identity, bit)

    def reader(
        self,
        segment: _core.Segment,
        offset: int,
        index: int,
        writer: RingEnd,
        arena: _core.ArenaView,
        carries: str,
        *,
        shared: bool,
    ) -> _core.Reader:
        """Reading end ``index`` of a ring that ``writer`` writes, whose ``arena`` that is. ``carries`` says
        what goes over it. Somebody else reads the same memory as who reads a ``shared`` ring, so what is
        written to large values goes to private pages."""
        end = _core.Reader(
            segment, offset, index, self.process_table, writer.doorbell, arena, shared, carries
        )
        self.sources.note(writer.process, end)
        return end

    def known_arena(self, slot: int, incarnation: int) -> _core.ArenaView | None:
        """Return the arena of a peer; ``None`` if that process is none."""
        known, arena = self._peers.get(slot, (None, None))
        return arena if known == incarnation else None

    def arena_of(self, slot: int, incarnation: int) -> _core.ArenaView:
        """The arena of a peer that is alive. ``RuntimeStateError`` if it is none any more."""
        arena = self.known_arena(slot, incarnation)
        # Whoever lays a channel introduces its ends first: so it has died, and may have a successor.
        if arena is None:
            raise RuntimeStateError(
                f"a process of slot {slot} has died before the channel was open: nothing comes from it"
            )
        return arena


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def dup_all(fds: Sequence[int]) -> list[int]:
    """Duplicate all of them, or none. They are the caller's to close."""
    return _core.Duplicates(fds).taken()


def _close_opened() -> None:
    """Close the memory of other processes' devices, if any was opened here."""
    opened = sys.modules.get("conveyor.direct.devices")
    if opened is not None:
        opened.OPENED.close()


class DoorbellBits:
    """Allocator of the bits of one process's doorbell. Belongs to the driver, which sets up all channels."""

    def __init__(self, reserved: int) -> None:
        """``reserved``: the highest bit that has a fixed meaning."""
        # Not a list of all that are free: a session may have had very many actors.
        self._next = max(reserved, _core.ATTENTION_BIT) + 1
        self._returned: list[int] = []

    def take(self) -> int:
        if self._returned:
            return self._returned.pop()
        if self._next == _core.DOORBELL_BITS:
            raise RuntimeStateError(
                f"an actor can be in at most {_core.DOORBELL_BITS - 1} compiled graphs and links to actors "
                f"that call it, together, and this one is: tear down graphs that are not needed, or "
                f"spread the work over more actors"
            )
        self._next += 1
        return self._next - 1

    def give_back(self, bit: int) -> None:
        self._returned.append(bit)
