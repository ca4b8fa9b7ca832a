"""The driver's records of actors and of their processes, and the table of all of them. It starts nothing and
tells nobody anything."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct, field

from conveyor import _core, descriptors
from conveyor.calls.call import ORDER
from conveyor.codec import Reader, set_later
from conveyor.driver.process_engine import UNKNOWN_END, ProcessSnapshot, Spawned
from conveyor.exceptions import (
    ActorDiedError,
    ActorRestartedError,
    ActorStartError,
    ConveyorError,
    RuntimeStateError,
)
from conveyor.flag import Flag
from conveyor.runtime import ending
from conveyor.runtime.messages import send_with_id
from conveyor.runtime.process import RESULT_BIT, DoorbellBits
from conveyor.runtime.protocol import PID_MASK, ActorId, MethodInfo, NameTakenError, ProcessOptions
from conveyor.runtime.waiting import wait_for_flag
from conveyor.system_limits import CLOSED

if TYPE_CHECKING:
    from conveyor.calls.constructor import StoredConstructor
    from conveyor.calls.links import Link
    from conveyor.calls.pending import CallRef
    from conveyor.driver.process_engine import RemoteNode, Spawning
    from conveyor.refs.ref import Ref
    from conveyor.worker.messages import Order


Label: TypeAlias = "Callable[[int, int], str | None]"

#: Seconds that an error waits for the exit code that the fork server is about to report: usually a
#: millisecond. On a busy machine it may come later, but errors are not to be late for it.
_EXIT_CODE_WAIT = 0.05
#: Seconds for the report of another node's agent, which comes by way of Ray.
_REPORT_WAIT = 0.25


class Actor(Struct, eq=False):
    """The lasting part of an actor, whatever process it has.

    constructor: its constructor's call; ``None``: that was too large to keep.
    over: set once nobody wants it any more, so it is not started again.
    graphs: numbers of the graphs that need it.
    failures: processes in a row that died before the constructor had run.
    """

    class_name: str
    methods: Mapping[str, MethodInfo]
    name: str | None
    options: ProcessOptions
    max_concurrency: int | None
    max_restarts: int = 0
    constructor: StoredConstructor | None = None
    restarts: int = 0
    failures: int = 0
    handles: int = 0
    graphs: set[int] = field(default_factory=set)
    shared: bool = False  # a handle has left this process: it is not known when the last is gone
    stopping: bool = False
    over: Flag = field(default_factory=Flag)

    @property
    def ended(self) -> bool:
        return self.over.is_set()

    @property
    def has_async(self) -> bool:
        return any(method.is_async for method in self.methods.values())

    @property
    def one_at_a_time(self) -> bool:
        """Whether its methods run one after the other."""
        return not self.has_async and (self.max_concurrency or 1) == 1

    @property
    def restarts_left(self) -> bool:
        return self.max_restarts < 0 or self.restarts < self.max_restarts


class Introduced(Struct, eq=False):
    """A link that has been set up, and that the callee may not have accepted yet."""

    number: int
    caller: ActorRecord
    callee: ActorRecord
    #: The bit of the callee's doorbell that the caller's calls ring.
    bit: int
    segment: _core.Segment
    #: Acknowledgement of the order to accept the caller.
    ack: Ref
    #: The segment's number on other nodes; 0: it is on none.
    shared: int = 0


class Liveness:
    """A process as a :class:`Companion` of refs that are waited for: it fails by its death."""

    __slots__ = ("_record",)

    def __init__(self, record: ActorRecord) -> None:
        self._record = record

    def has_failed(self) -> bool:
        """Return whether the process is dead."""
        return not self._record.alive

    def get(self, timeout: float | None) -> None:
        """Raise the death of the process if it is dead."""
        self._record.check_alive()

    def parts(self) -> tuple[Liveness]:
        """Return itself alone."""
        return (self,)


class ActorRecord:
    """The driver's record of one process of an actor. It lives as long as anything asks about it."""

    def __init__(
        self,
        process_table: _core.ProcessTable,
        identity: ActorId,
        slot: int,
        actor: Actor,
        label: Label,
        tells: Callable[[], bool],
    ) -> None:
        """``label`` names a (graph, node), as far as the driver knows it. ``tells()``: whether the calling
        thread is the one that is told of ends."""
        self._process_table = process_table
        self._label = label
        self._tells = tells
        self.id = identity
        self.slot = slot
        self.incarnation = process_table.incarnation(slot)
        self.actor = actor
        self.process: Spawned | None = None
        self.bits = DoorbellBits(reserved=RESULT_BIT)
        self.killed = ""  # how, if it was the driver's doing
        self.wanted_back = False  # although its end is orderly
        #: Set from the preparation of the process to the cleanup after its death.
        self.arena: _core.ArenaView | None = None
        self.arena_fd = -1
        self.eventfd = -1
        #: Where the process is, if not on the driver's node.
        self.node: RemoteNode | None = None
        self.control_socket: socket.socket | None = None
        self._fds_ids = itertools.count(1)
        # Descriptors and the frame that announces them go in step.
        self.control_lock = threading.Lock()
        self.known_peers: dict[int, int] = {}  # slot -> incarnation
        #: Mailboxes that other actors have for this process's calls, by the number of the link: their bits,
        #: to be given back, and the numbers of their segments on other nodes.
        self.mailboxes: dict[int, tuple[ActorRecord, int, int]] = {}
        #: Those who have such mailboxes for calls of this process, by the number of the link.
        self.callers: dict[int, ActorRecord] = {}
        #: Callers of which the process has been told, and which it may not have accepted yet; under
        #: `control_lock`.
        self.introduced: list[Introduced] = []
        #: Why others could not accept this process as a caller, by the number of the link.
        self.refusals: dict[int, ConveyorError] = {}
        self.calls: Link | None = None
        self.start: Ref | None = None  # of the constructor
        self.control_link: Link | None = None
        self.previous: ActorRecord | None = None  # the one before, which may still be asked about
        self.unnamed: ActorId | None = None  # the actor that has lost its name to this one
        self.exit_status: int | None = None
        self.started = False  # until then its exit is only noted
        #: Set once others may call it, behind the constructor's call, or there will be no process.
        self.usable = Flag()
        #: Set from the request to the engine until the process is there, or does not come: then `placed` is
        #: set, and `start_error` says why not. `error_was_got`: by somebody.
        self.spawning: Spawning | None = None
        self.placed = Flag()
        self.start_error = ""
        self.error_was_got = False
        self.headless = False  # the engine has been told that its main thread is gone
        #: Set once the cause of the death is known, also for a thread that holds a lock which the rest of the
        #: cleanup needs.
        self.cause_known = Flag()
        self.cleaned_up = Flag()
        # Its last process snapshot: the slot may be another process's by the time somebody asks.
        self._last_snapshot: ProcessSnapshot | None = None
        self._left = False
        self._death_number = 0
        #: From `cleaned_up` on: whether the driver starts the actor again. `replaced` says that it has
        #: done so, or has given up for the reason in `restart_error`.
        self.restarting = False
        self.comes_back = False  # by itself: whoever else has it started, does so
        self.keeps_slot = False  # for the process that replaces it
        self.replaced = Flag()
        self.restart_error = ""
        #: The process that replaces it, from when it can be called until `replaced`: it may not be there
        #: yet. `succeeded` says that there is one, or that there will be none. One that could not be started
        #: stays, for who has called it.
        self.successor: ActorRecord | None = None
        self.succeeded = Flag()

    @property
    def class_name(self) -> str:
        return self.actor.class_name

    @property
    def methods(self) -> Mapping[str, MethodInfo]:
        return self.actor.methods

    @property
    def pid(self) -> int:
        return 0 if self.process is None else self.process.pid

    @property
    def reader(self) -> Reader:
        """Slot and incarnation of the process, by which references know it."""
        return self.slot, self.incarnation

    @property
    def alive(self) -> bool:
        return not self._process_table.gone(self.slot, self.incarnation)

    @property
    def is_unmade(self) -> bool:
        """Whether the process lives, and its constructor has raised."""
        start = self.start  # which has failed as well once the process is dead
        return start is not None and start.done() and start.has_failed() and self.alive

    @property
    def death_number(self) -> int:
        """Number of this death in the session, counted up; 0: none is known."""
        return self._death_number or self._process_table.death_number(self.slot)

    @property
    def was_wanted(self) -> bool:
        """Whether the program has ended the process: by ``kill``, its own orderly exit, or the session's
        end."""
        orderly = self._exit_code == 0 and (self._left or self.actor.stopping)
        return orderly or bool(self.killed)

    def check_alive(self) -> None:
        if not self.alive:
            raise self.death()

    def order(self, order: Order, purpose: str = "") -> Ref:
        """Send the actor's main loop an order, which is no call of the user's. Return the ref of its
        acknowledgement. ``purpose``: what for, in words, for the process that waits for it."""
        link = self.control_link
        if link is None:
            raise self.death()
        ref: CallRef = link.call((type(order).__name__.lower(), (order,), None, 1, ORDER))
        if purpose:
            ref.method = purpose
        return ref

    def next_fds_id(self) -> int:
        """Return a new id for descriptors that come to this process."""
        return next(self._fds_ids)

    def send_fds(self, fds: list[int]) -> int:
        """Send descriptors to the actor, and return their id, which the frame they belong to must have.
        They are sent before that frame: the actor never waits for descriptors. If their frame does not come
        (it cannot be encoded, or the program is interrupted), they are thrown away with the next ones."""
        assert self.control_socket is not None
        fds_id = self.next_fds_id()
        try:
            send_with_id(self.control_socket, fds_id, fds)
        except OSError as error:
            # Its end of the socket has gone with it, most often before its death was heard of. If that was
            # heard of, the slot may be another process's by now.
            if isinstance(error, (BrokenPipeError, ConnectionResetError)) and self.alive:
                self._process_table.announce_death(self.slot)
                if self.process is not None:
                    self.process.end_headless()
            self.check_alive()
            raise
        return fds_id

    def keep_last_snapshot(self) -> None:
        """Keep the last process snapshot: the process has ended, and its death is announced."""
        reported = None if self.process is None else self.process.last_snapshot()
        self._last_snapshot, self._left = reported or (
            self._process_table.status(self.slot),
            self._process_table.is_exiting(self.slot),
        )
        self._death_number = self._process_table.death_number(self.slot)
        if self.actor.ended:
            self.actor.constructor = None  # it will not be started again
        start, self.start = self.start, None
        if start is not None:
            begun = start._number >= 0 and start._window.ready(start._number, start._reader)
            self.actor.failures = 0 if begun else self.actor.failures + 1

    @property
    def under_way(self) -> bool:
        """Whether the actor is being restarted."""
        return self.restarting and not self.replaced.is_set()

    def may_restart(self) -> bool:
        """Return whether the driver would restart the actor by itself if this process is dead."""
        actor = self.actor
        orderly = self._exit_code == 0
        over = actor.ended or actor.stopping or (orderly and not self.wanted_back)
        return actor.restarts_left and not over

    def death(self, label: Label | None = None) -> ActorDiedError:
        """Return the error for users of this process. ``label`` names a (graph, node) that the driver may not
        know."""
        if self.start_error:
            self.error_was_got = True
            return ActorStartError(self.start_error, self.id.name)
        snapshot = self._last_snapshot or self._process_table.status(self.slot)
        # Not in the thread that brings the code: it would wait for itself.
        if not (snapshot[5] and self.node is None) and not self._tells():
            self.cause_known.wait(_EXIT_CODE_WAIT if self.node is None else _REPORT_WAIT)
            snapshot = self._last_snapshot or snapshot
        state, graph, node, execution, _since, number, what = snapshot
        doing: str | None = None
        if state != 0:
            doing = what
            if graph:
                doing = label(graph, node) if label is not None else None
                doing = doing or self._label(graph, node) or f"node {node} of graph {graph}"
        code: int | None = None
        ended = self._exit_code
        if ended is not None:
            number = number or (-ended if ended < 0 else 0)
            code = ended if ended >= 0 else None
        where = (
            ""
            if self.process is None or not self.process.location
            else f" on {self.process.location}"
        )
        process = f" (pid {self.pid & PID_MASK}{where})" if self.pid else ""
        message = f"actor {self.id.name}{process} {self._how(number, code)}"
        if doing is not None:
            where = f"execution {execution}" if graph else f"call {execution}"
            message += f" while running {doing} ({where})"
        if number == signal.SIGKILL and not self.killed and not self._went_on:
            message += self._who_killed()
        again = self.restarting if self.cause_known.is_set() else self.may_restart()
        if self.restart_error:
            again = False
            message += f"; it could not be started again: {self.restart_error}"
        elif again:
            message += "; it is being started again, and then the same can be tried again"
        tail = "" if self.process is None or self.killed else self.process.stderr_tail()
        if tail:
            message += f"\nthe last lines of its stderr:\n{tail}"
        kind = ActorRestartedError if again else ActorDiedError
        error = kind(message, self.id.name, doing, code, number or None)
        if not self.cause_known.is_set():
            set_later(error, lambda: self.death() if self.cause_known.is_set() else None)
        return error

    def silence(self, why: str) -> ConveyorError:
        """Return the error for a wait on a connection of the process that has ended. ``why`` says how it
        ended here; without it, the other side has ended it, most often by its death."""
        if self.alive and not why:
            self.cause_known.wait(_EXIT_CODE_WAIT)
        if not self.alive:
            return self.death()
        why = why or "it could not use it any more"
        return RuntimeStateError(f"the connection to actor {self.id.name} has broken: {why}")

    def _how(self, number: int, code: int | None) -> str:
        if self.killed:
            return self.killed
        if self._went_on:
            return "ended its main thread but not its process, as os.exec* does, and was killed for that"
        if number:
            return f"died of signal {number} ({_signal_name(number)})"
        if code is not None:
            # Not every end with a code is user code's orderly one: os._exit is none.
            if self._left:
                return f"left by sys.exit: it exited with code {code}"
            return f"exited with code {code}"
        lost = "" if self.process is None else self.process.lost()
        if lost:
            return f"was lost with its node: {lost}"
        if self.exit_status == UNKNOWN_END:
            return "died, and how cannot be known: its process was started by somebody else than this program"
        if self.control_socket is not None and descriptors.lost(self.control_socket.fileno()):
            return f"has ended, since code of this process {CLOSED}"
        return "died (its exit code is not known yet)"

    @property
    def _exit_code(self) -> int | None:
        """Exit code, as far as it is known: a signal's number is negative."""
        if self.exit_status is None or self.exit_status == UNKNOWN_END:
            return None
        return os.waitstatus_to_exitcode(self.exit_status)

    @property
    def _went_on(self) -> bool:
        return self.process is not None and self.cause_known.is_set() and self.process.went_on()

    def _who_killed(self) -> str:
        found = None
        if self.process is not None and self.cause_known.is_set():
            found = self.process.out_of_memory()
        if found is None:
            return "; SIGKILL is also what the kernel's out-of-memory killer sends: it may be that"
        if found:
            return ": it was killed by the kernel's out-of-memory killer"
        return (
            ": somebody else killed it, or it did so itself; the kernel's out-of-memory killer has not been "
            "at work"
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


#: Liveness futexes for one death watch: the limit of futex_waitv, less the watch's own alarm.
MAX_WATCHED = 120


class DeathWatches:
    """The death watches of a session, as many as are needed: each can watch a limited number of liveness
    futexes."""

    def __init__(self, process_table: _core.ProcessTable, eventfd: int) -> None:
        """``eventfd``: an eventfd that the watches write to whenever a liveness futex has fired."""
        self._process_table = process_table
        self._eventfd = eventfd
        self._lock = threading.Lock()
        self._watches: list[tuple[_core.DeathWatch, set[int]]] = []

    def add(self, slot: int) -> None:
        with self._lock:
            found = next((w for w in self._watches if len(w[1]) < MAX_WATCHED), None)
            if found is None:
                found = (_core.DeathWatch(self._process_table, self._eventfd), set())
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
PROCESS_TABLE_SLOTS = 2048
#: Number of dead actors without a handle in the driver that are remembered: some process may still ask how
#: they have ended.
DEAD_REMEMBERED = 256


class Table:
    """Registry of the actors, by number, by name and by the pid of their processes. Iteration gives the
    process that each has or had last."""

    def __init__(
        self, process_table: _core.ProcessTable, label: Label, tells: Callable[[], bool]
    ) -> None:
        """``label`` names a (graph, node), for errors about the dead. ``tells()`` returns whether the calling
        thread is the one that is told of ends, which must not wait for one."""
        self.process_table = process_table
        self.label = label
        self._tells = tells
        #: Guards this table, and sees to it that no descriptor of a process is closed while another thread
        #: duplicates it. Reentrant: a signal handler may call us.
        self.lock = threading.RLock()
        #: The session ends: nobody is entered any more.
        self.closed = False
        self._waiting: list[Callable[[], object]] = []
        self._free_slots = deque(range(DRIVER_SLOT + 1, PROCESS_TABLE_SLOTS))
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

    def on_engine_thread(self) -> bool:
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
                if replaces is None:
                    raise NameTakenError(actor.name)
                actor.name = None  # another actor has taken it meanwhile
            if replaces is not None and replaces.keeps_slot:
                slot = replaces.slot
                replaces.keeps_slot = False
            elif self._free_slots:
                slot = self._free_slots.popleft()
            else:
                raise ActorStartError(
                    f"more than {PROCESS_TABLE_SLOTS - 1} actors at the same time"
                )
            self.process_table.prepare(slot, identity.name)
            record = ActorRecord(self.process_table, identity, slot, actor, self.label, self._tells)
            if actor.name is not None:
                record.unnamed = self._take_name(actor.name, identity)
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

    def find(
        self, name: str, *, by_actor: bool = False
    ) -> tuple[ActorId, str, Mapping[str, MethodInfo]]:
        """Return the actor with this name, its class and its methods, with one handle more; raise
        ``ValueError`` if there is none. Waits for an actor that another thread is starting. ``by_actor``: the
        handle is not in this process."""
        while True:
            with self.lock:  # nobody takes its name meanwhile, which may end it
                identity = self._named(name)
                record = None if identity is None else self.known(identity)
                if record is None:
                    known = ", ".join(sorted(filter(self._named, list(self._names)))) or "none"
                    raise ValueError(f"there is no actor named {name!r}; named actors: {known}")
                if record.usable.is_set():
                    if by_actor:
                        record.actor.shared = True
                    else:
                        record.actor.handles += 1
                    return record.id, record.class_name, record.methods
            what, doing = f"the start of {name}", "another thread starts it"
            wait_for_flag(record.usable, what, doing)

    def _named(self, name: str) -> ActorId | None:
        """Return the actor that has this name, unless it is dead for good: its end may not be reported
        yet. An actor whose constructor has raised counts as dead."""
        identity = self._names.get(name)
        record = None if identity is None else self.known(identity)
        if record is None or record.is_unmade:
            return None
        return identity if record.alive or record.may_restart() or record.under_way else None

    def _take_name(self, name: str, identity: ActorId) -> ActorId | None:
        """Take the name for an actor, also from another one whose constructor has raised. Return the other
        actor, with one handle more."""
        before = self._names.get(name)
        self._names[name] = identity
        record = None if before is None or before == identity else self.known(before)
        if record is None or not record.is_unmade:
            return None
        record.actor.name = None
        self.retain(record.id)
        return record.id

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

    def retain_for(self, actor: ActorId, graph: int) -> None:
        """Note that graph ``graph`` needs the actor. This is no count: a caller that is interrupted here
        gives back what may have been taken."""
        record = self.known(actor)
        if record is not None:
            record.actor.graphs.add(graph)

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
                record.actor.constructor = None  # nobody can have it started again
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
        requested_for = actor.handles > 0 or actor.graphs
        return not requested_for and record.cleaned_up.is_set() and not record.under_way

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
