"""The table of a session's actors and their processes. It starts nothing and tells nobody anything."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from conveyor import _core
from conveyor.driver.processes.record import Actor, ActorRecord, Label
from conveyor.exceptions import (
    ActorDiedError,
    ActorRestartedError,
    ActorStartError,
    RuntimeStateError,
)
from conveyor.runtime import ending
from conveyor.runtime.protocol import ActorId, MethodInfo, NameTakenError
from conveyor.runtime.waiting.patience import wait_for_flag

#: Liveness futexes for one death watch: the limit of futex_waitv, less the watch's own alarm.
MAX_WATCHED = 120


class DeathWatches:
    """The death watches of a session, as many as are needed: each can watch a limited number of liveness
    futexes."""

    def __init__(self, board: _core.Board, told: int) -> None:
        """``told``: an eventfd that the watches write to whenever a liveness futex has fired."""
        self._board = board
        self._told = told
        self._lock = threading.Lock()
        self._watches: list[tuple[_core.DeathWatch, set[int]]] = []

    def add(self, slot: int) -> None:
        with self._lock:
            found = next((w for w in self._watches if len(w[1]) < MAX_WATCHED), None)
            if found is None:
                found = (_core.DeathWatch(self._board, self._told), set())
                self._watches.append(found)
            found[1].add(slot)
            found[0].add(slot)

    def remove(self, slot: int) -> None:
        with self._lock:
            for watch, slots in self._watches:
                if slot in slots:
                    slots.discard(slot)
                    watch.remove(slot)

    def stop(self) -> None:
        for watch, _ in self._watches:
            watch.stop()


#: The driver's own slot in the process table.
DRIVER_SLOT = 0
#: Processes that one session may have at the same time.
BOARD_SLOTS = 2048
#: Number of dead actors without a handle in the driver that are remembered: some process may still ask how
#: they have ended.
DEAD_REMEMBERED = 256


class Table:
    """Registry of the actors, by number, by name and by the pid of their processes. Iteration gives the
    process that each has or had last."""

    def __init__(self, board: _core.Board, label: Label, tells: Callable[[], bool]) -> None:
        """``label`` names a (graph, node), for errors about the dead. ``tells()`` returns whether the calling
        thread is the one that is told of ends, which must not wait for one."""
        self.board = board
        self.label = label
        self._tells = tells
        #: Guards this table, and sees to it that no descriptor of a process is closed while another thread
        #: duplicates it. Reentrant: a signal handler may call us.
        self.lock = threading.RLock()
        #: The session ends: nobody is entered any more.
        self.closed = False
        self._waiting: list[Callable[[], object]] = []
        self._free_slots = deque(range(DRIVER_SLOT + 1, BOARD_SLOTS))
        self._numbers = itertools.count(1)
        self._records: dict[int, ActorRecord] = {}
        self._by_pid: dict[int, ActorRecord] = {}
        self._names: dict[str, ActorId] = {}
        self._of_class: Counter[str] = Counter()
        #: By number, the one that died last at the end.
        self._remembered: dict[int, ActorRecord] = {}
        self._forgotten = 0  # the highest number of one that was remembered, and is no more

    def __iter__(self) -> Iterator[ActorRecord]:
        return iter(list(self._records.values()))

    @property
    def free_slots(self) -> int:
        """Number of processes for which there is room."""
        return len(self._free_slots)

    def on_hosts_thread(self) -> bool:
        """Return whether the calling thread is the one that hears from the engine, and so must not wait for
        the engine."""
        return self._tells()

    def close(self) -> None:
        """Enter no more actors, and tell those who wait for that: the session ends."""
        with self.lock:
            self.closed = True
            waiting = list(self._waiting)
        for tell in waiting:
            tell()

    @contextmanager
    def until_closed(self, tell: Callable[[], object]) -> Iterator[None]:
        """Have ``tell()`` called in the body, on any thread, when the session ends, and at once if it has."""
        with self.lock:
            self._waiting.append(tell)
            closed = self.closed
        try:
            if closed:
                tell()
            yield
        finally:
            with self.lock:
                self._waiting.remove(tell)

    def check_open(self) -> None:
        """Raise if the session has ended."""
        if self.closed:
            raise ending.ended()

    # Entering

    def enter(self, actor: Actor, replaces: ActorRecord | None) -> ActorRecord:
        """Take a name and a slot for the actor's new process. ``replaces``: its process that is dead."""
        with self.lock:
            if replaces is None:
                identity = ActorId(next(self._numbers), self._new_label(actor))
            else:
                identity = replaces.id
            if actor.name is not None and self._named(actor.name) not in (None, identity):
                raise NameTakenError(actor.name)
            if replaces is not None and replaces.keeps_slot:
                slot = replaces.slot
                replaces.keeps_slot = False
            elif self._free_slots:
                slot = self._free_slots.popleft()
            else:
                raise ActorStartError(f"more than {BOARD_SLOTS - 1} actors at the same time")
            self.board.prepare(slot, identity.name)
            record = ActorRecord(self.board, identity, slot, actor, self.label, self._tells)
            if actor.name is not None:
                self._names[actor.name] = identity
            if replaces is None:
                self._records[identity.index] = record
            else:
                record.previous = replaces
                replaces.previous = None
            return record

    def _new_label(self, actor: Actor) -> str:
        # Unnamed actors of one class are told apart, so that every message names exactly one.
        self._of_class[actor.class_name] += 1
        count = self._of_class[actor.class_name]
        return actor.name or (actor.class_name if count == 1 else f"{actor.class_name}#{count}")

    def install(self, record: ActorRecord) -> None:
        """Make ``record`` the actor's current process."""
        with self.lock:
            self._records[record.id.index] = record

    def spawned(self, record: ActorRecord, pid: int) -> None:
        """Note the pid that the process has until it has ended."""
        with self.lock:
            self._by_pid[pid] = record

    # Looking up

    def record(self, actor: ActorId) -> ActorRecord:
        """Return the process that the actor has or had last."""
        record = self._records.get(actor.index)
        if record is None:
            if actor.index <= self._forgotten:
                raise ActorDiedError(
                    f"actor {actor.name} ended long ago: only of the last {DEAD_REMEMBERED} dead actors "
                    "without handles it is known how they ended",
                    actor.name,
                )
            raise RuntimeStateError(f"actor {actor.name} belongs to another session")
        return record

    def known(self, actor: ActorId) -> ActorRecord | None:
        """Return the same as :meth:`record`, or ``None`` if nothing is known of the actor, or nothing any
        more."""
        return self._records.get(actor.index)

    def by_pid(self, pid: int) -> ActorRecord | None:
        """Return the process that has this pid; ``None`` once it has ended."""
        return self._by_pid.get(pid)

    def pids(self) -> list[tuple[int, ActorRecord]]:
        """Return the processes that are not known to have ended."""
        return list(self._by_pid.items())

    def find(self, name: str) -> tuple[ActorId, str, Mapping[str, MethodInfo]]:
        """Return the actor with this name, its class and its methods; raise ``ValueError`` if there is none.
        Waits for an actor that another thread is starting."""
        while True:
            identity = self._named(name)
            record = None if identity is None else self.known(identity)
            if record is None:
                known = ", ".join(sorted(filter(self._named, list(self._names)))) or "none"
                raise ValueError(f"there is no actor named {name!r}; named actors: {known}")
            if record.usable.is_set():
                return record.id, record.class_name, record.methods
            what, doing = f"the start of {name}", "another thread starts it"
            wait_for_flag(record.usable, what, doing)

    def _named(self, name: str) -> ActorId | None:
        """Return the actor that has this name, unless it is dead for good: its end may not be reported
        yet."""
        identity = self._names.get(name)
        record = None if identity is None else self.known(identity)
        there = record is not None and (record.alive or record.may_restart() or record.under_way)
        return identity if there else None

    def death_of(
        self,
        actor: ActorId,
        slot: int,
        incarnation: int,
        label: Callable[[int, int], str | None] | None = None,
    ) -> ActorDiedError:
        """Return the error for users of the actor's process that was the slot's ``incarnation``-th. ``label``
        names a (graph, node); default: as the driver knows it."""
        record: ActorRecord | None = self.record(actor)
        assert record is not None
        # One that could not be started has been called all the same.
        record = record.successor or record
        while record is not None and (record.slot, record.incarnation) != (slot, incarnation):
            record = record.previous
        if record is None:
            text = f"actor {actor.name} died and has been started again since"
            return ActorRestartedError(text, actor.name)
        return record.death(label)

    # Who needs them

    def retain(self, actor: ActorId) -> None:
        """Count one handle more of the actor."""
        record = self.known(actor)
        if record is not None:
            record.actor.handles += 1
            record.actor.held = True

    def retain_for(self, actor: ActorId, graph: int) -> None:
        """Note that graph ``graph`` needs the actor. This is no count: a caller that is interrupted here
        gives back what may have been taken."""
        record = self.known(actor)
        if record is not None:
            record.actor.graphs.add(graph)
            record.actor.held = True

    def share(self, actor: ActorId) -> None:
        """Note that a handle of the actor leaves this process."""
        record = self.known(actor)
        if record is not None:
            record.actor.shared = True

    # Leaving

    def forget_pid(self, pid: int) -> None:
        """Forget a pid, whose process has ended."""
        with self.lock:
            self._by_pid.pop(pid, None)

    def forget_process(self, record: ActorRecord) -> None:
        """Free the name and the slot of a process that is gone, unless they are kept for its successor."""
        with self.lock:
            if not record.restarting:
                self._forget_name(record)
            if not record.keeps_slot:
                self._free_slots.append(record.slot)

    def forget_start(self, record: ActorRecord) -> None:
        """Forget an actor that could not be started, and that had no process before."""
        with self.lock:
            self._records.pop(record.id.index, None)

    def forget_actor(self, record: ActorRecord) -> None:
        """Keep little of an actor that is dead and has no handle here, and only of the last of them: other
        processes, ends of channels and references may ask how it has ended."""
        with self.lock:
            if not self._can_be_forgotten(record):
                return
            if not record.actor.shared:
                record.actor.kept = None  # nobody can have it started again
            self._remembered.pop(record.id.index, None)
            self._remembered[record.id.index] = record
            if len(self._remembered) <= DEAD_REMEMBERED:
                return
            record = self._remembered.pop(next(iter(self._remembered)))
            if not self._can_be_forgotten(record):
                return  # since then: it comes here again
            self._forgotten = max(self._forgotten, record.id.index)
            if self._records.get(record.id.index) is record:
                del self._records[record.id.index]

    @staticmethod
    def _can_be_forgotten(record: ActorRecord) -> bool:
        """Return whether the actor is dead, and nothing in this process asks for it."""
        actor = record.actor
        asked_for = actor.handles > 0 or actor.graphs or not actor.held
        return not asked_for and record.exited.is_set() and not record.under_way

    def reserve(self, record: ActorRecord) -> None:
        """Give the actor's next process the same slot, if it is free: processes that knew the old one then
        let go of what was the old one's."""
        with self.lock, suppress(ValueError):
            self._free_slots.remove(record.slot)
            record.keeps_slot = True

    def give_up(self, record: ActorRecord) -> None:
        """Let go of the slot and name that were kept for a process that should replace this one, if there is
        none."""
        with self.lock:
            if record.keeps_slot:
                record.keeps_slot = False
                self._free_slots.append(record.slot)
            if self._records.get(record.id.index) is record:
                self._forget_name(record)

    def _forget_name(self, record: ActorRecord) -> None:
        name = record.actor.name
        if name is not None and self._names.get(name) == record.id:
            del self._names[name]
