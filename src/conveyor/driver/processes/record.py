"""The driver's records of actors and of their processes, and the errors of their deaths."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct, field

from conveyor import _core, descriptors
from conveyor.calls.call import ORDER
from conveyor.codec import Reader, set_later
from conveyor.driver.hosts.protocol import UNKNOWN_END, Page, Spawned
from conveyor.exceptions import (
    ActorDiedError,
    ActorRestartedError,
    ActorStartError,
    ConveyorError,
    RuntimeStateError,
)
from conveyor.flag import Flag
from conveyor.runtime.messages.message import send_with_ticket
from conveyor.runtime.process import RESULT_BIT, BellBits
from conveyor.runtime.protocol import PID_MASK, ActorId, MethodInfo, ProcessOptions
from conveyor.system_limits import CLOSED

if TYPE_CHECKING:
    from conveyor.calls.constructor import Kept
    from conveyor.calls.links import Link
    from conveyor.calls.pump import CallRef
    from conveyor.driver.hosts.far_host import FarHost
    from conveyor.driver.hosts.protocol import Spawning
    from conveyor.refs.ref import Ref
    from conveyor.worker.orders import Order

Label: TypeAlias = "Callable[[int, int], str | None]"

#: Seconds that an error waits for the exit code that the fork server is about to report: usually a
#: millisecond. On a busy machine it may come later, but errors are not to be late for it.
_EXIT_CODE_WAIT = 0.05
#: Seconds for the report of another node's agent, which comes by way of Ray.
_REPORT_WAIT = 0.25


class Actor(Struct, eq=False):
    """The lasting part of an actor, whatever process it has.

    kept: its constructor's call; ``None``: that was too large to keep.
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
    kept: Kept | None = None
    restarts: int = 0
    failures: int = 0
    handles: int = 0
    graphs: set[int] = field(default_factory=set)
    held: bool = False  # there has been a handle
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
    #: The segment's number on other hosts; 0: it is on none.
    shared: int = 0


class Life:
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

    def parts(self) -> tuple[Life]:
        """Return itself alone."""
        return (self,)


class ActorRecord:
    """The driver's record of one process of an actor. It lives as long as anything asks about it."""

    def __init__(
        self,
        board: _core.Board,
        identity: ActorId,
        slot: int,
        actor: Actor,
        label: Label,
        tells: Callable[[], bool],
    ) -> None:
        """``label`` names a (graph, node), as far as the driver knows it. ``tells()``: whether the calling
        thread is the one that is told of ends."""
        self._board = board
        self._label = label
        self._tells = tells
        self.id = identity
        self.slot = slot
        self.incarnation = board.incarnation(slot)
        self.actor = actor
        self.process: Spawned | None = None
        self.bits = BellBits(reserved=RESULT_BIT)
        self.killed = ""  # how, if it was the driver's doing
        self.wanted_back = False  # although its end is orderly
        #: Set from the preparation of the process to the cleanup after its death.
        self.arena: _core.ArenaView | None = None
        self.arena_fd = -1
        self.eventfd = -1
        #: Where the process is, if not on the driver's host.
        self.host: FarHost | None = None
        self.control_socket: socket.socket | None = None
        self._tickets = itertools.count(1)
        # Descriptors and the frame that announces them go in step.
        self.control_lock = threading.Lock()
        self.known_peers: dict[int, int] = {}  # slot -> incarnation
        #: Mailboxes that other actors have for this process's calls, by the number of the link: their bits,
        #: to be given back, and the numbers of their segments on other hosts.
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
        self.exit_status: int | None = None
        self.started = False  # until then its exit is only noted
        #: Set once others may call it, behind the constructor's call, or there will be no process.
        self.usable = Flag()
        #: Set from the request to the engine until the process is there, or does not come: then `placed` is
        #: set, and `start_error` says why not. `asked`: somebody has got that error.
        self.spawning: Spawning | None = None
        self.placed = Flag()
        self.start_error = ""
        self.asked = False
        self.headless = False  # the hosts have been told that its main thread is gone
        #: Set once the cause of the death is known, also for a thread that holds a lock which the rest of the
        #: cleanup needs.
        self.told = Flag()
        self.exited = Flag()
        # Its last process snapshot: the slot may be another process's by the time somebody asks.
        self._last_page: Page | None = None
        self._left = False
        self._death_number = 0
        #: From `exited` on: whether the driver starts the actor again. `replaced` says that it has
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
        return not self._board.gone(self.slot, self.incarnation)

    @property
    def is_unmade(self) -> bool:
        """Whether the process lives, and its constructor has raised."""
        start = self.start
        return self.alive and start is not None and start.done() and start.has_failed()

    @property
    def death_number(self) -> int:
        """Number of this death in the session, counted up; 0: none is known."""
        return self._death_number or self._board.death_number(self.slot)

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

    def next_ticket(self) -> int:
        """Return a new ticket for descriptors that come to this process."""
        return next(self._tickets)

    def send_fds(self, fds: list[int]) -> int:
        """Send descriptors to the actor, and return their ticket, which the frame they belong to must have.
        They are sent before that frame: the actor never waits for descriptors. If their frame does not come
        (it cannot be encoded, or the program is interrupted), they are thrown away with the next ones."""
        assert self.control_socket is not None
        ticket = self.next_ticket()
        try:
            send_with_ticket(self.control_socket, ticket, fds)
        except OSError as error:
            # Its end of the socket has gone with it, most often before its death was heard of. If that was
            # heard of, the slot may be another process's by now.
            if isinstance(error, (BrokenPipeError, ConnectionResetError)) and self.alive:
                self._board.announce_death(self.slot)
                if self.process is not None:
                    self.process.end_headless()
            self.check_alive()
            raise
        return ticket

    def bury(self) -> None:
        """Keep the last process snapshot: the process has ended, and its death is announced."""
        told = None if self.process is None else self.process.last_page()
        self._last_page, self._left = told or (
            self._board.status(self.slot),
            self._board.leaving(self.slot),
        )
        self._death_number = self._board.death_number(self.slot)
        if self.actor.ended:
            self.actor.kept = None  # it will not be started again
        start, self.start = self.start, None
        if start is not None:
            begun = start._number >= 0 and start._gate.ready(start._number, start._reader)
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
            self.asked = True
            return ActorStartError(self.start_error, self.id.name)
        page = self._last_page or self._board.status(self.slot)
        # Not in the thread that brings the code: it would wait for itself.
        if not (page[5] and self.host is None) and not self._tells():
            self.told.wait(_EXIT_CODE_WAIT if self.host is None else _REPORT_WAIT)
            page = self._last_page or page
        state, graph, node, execution, _since, number, what = page
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
            "" if self.process is None or not self.process.place else f" on {self.process.place}"
        )
        process = f" (pid {self.pid & PID_MASK}{where})" if self.pid else ""
        message = f"actor {self.id.name}{process} {self._how(number, code)}"
        if doing is not None:
            where = f"execution {execution}" if graph else f"call {execution}"
            message += f" while running {doing} ({where})"
        if number == signal.SIGKILL and not self.killed and not self._went_on:
            message += self._who_killed()
        again = self.restarting if self.told.is_set() else self.may_restart()
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
        if not self.told.is_set():
            set_later(error, lambda: self.death() if self.told.is_set() else None)
        return error

    def silence(self, why: str) -> ConveyorError:
        """Return the error for a wait on a connection of the process that has ended. ``why`` says how it
        ended here; without it, the other side has ended it, most often by its death."""
        if self.alive and not why:
            self.told.wait(_EXIT_CODE_WAIT)
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
        return self.process is not None and self.told.is_set() and self.process.went_on()

    def _who_killed(self) -> str:
        found = None
        if self.process is not None and self.told.is_set():
            found = self.process.out_of_memory()
        if found is None:
            return "; SIGKILL is also what the kernel's out-of-memory killer sends: it may be that"
        if found:
            return ": it was killed by the kernel's out-of-memory killer"
        return ": somebody else killed it; the kernel's out-of-memory killer has not been at work"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
