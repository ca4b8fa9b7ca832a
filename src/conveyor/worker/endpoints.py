"""The out-of-band parts of a graph's frames in an actor: tensors, by the transports of their edges, and
collectives that communicators of the user's run.

A transport is foreign code: whatever its methods raise or return is an error of one transfer, or of the edge.
It never ends the actor or leaves a reader without a word. During a collective the actor's program is
suspended, and the actor serves others.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from conveyor import _core
from conveyor.codec import copy_to_raise, decode_error, encode_error
from conveyor.codec.out_of_band import Head, OutgoingValue
from conveyor.codec.promises import CheckedValue, PromiseChecker
from conveyor.dag.collective.calls import Offer, Together
from conveyor.exceptions import GraphTornDownError, TransportError
from conveyor.graph.edges import Assignment, EdgeEndpoint, WriteEnd
from conveyor.plan.model import Call, Program, Recv, Reg, Send, Task
from conveyor.runtime import threads
from conveyor.runtime.process import Process
from conveyor.runtime.uninterrupted import try_each
from conveyor.runtime.waiting import Alarm
from conveyor.transport.base import Endpoint, Enqueued, Sending
from conveyor.transport.communicator import Gathering, Job
from conveyor.worker.instance import Abandoned, until

if TYPE_CHECKING:
    from concurrent.futures import Future


class EdgeWire:
    """The :class:`conveyor.transport.Wire` of one end. It also tells the readers of failures at the writer,
    so that a transport need not."""

    def __init__(
        self,
        process: Process,
        segment: _core.Segment,
        assignment: Assignment,
        end: EdgeEndpoint,
        budget: _core.MemoryBudget | None,
        ring: Callable[[], None],
    ) -> None:
        """``ring`` has the program look again, from any thread."""
        source = assignment.sources[end.edge]
        name, carries = assignment.name, f"beside {source}"
        self.notify = ring
        self.rank = end.rank
        self.members = end.members
        self.overlap = end.overlap
        self.hosts = end.where.hosts
        self.known_dead_within = end.where.known_dead_within
        self.deployed = end.where.deployed
        #: The transfer that begins; messages about who holds memory name it.
        self.transfer = 0
        self.edge = f"{name}, edge #{end.edge} ({source})"
        self._others = [0] if end.rank else list(range(1, len(end.members)))
        self._readers = [read.open(process, segment, name, carries) for read in end.receives]
        self._writer = end.sends.open(
            process, segment, assignment.graph, name, carries, budget=budget
        )
        #: Where the writer's last message goes, at its end.
        self._last: _core.Writer | None = None
        if isinstance(end.last, WriteEnd):
            self._last = end.last.open(process, segment, assignment.graph, name, carries)
        else:
            self._others.append(0)
            self._readers.append(end.last.open(process, segment, name, carries))
        self._ending = False
        #: Messages that found no room, in order: value, call id, kind.
        self._unsent: deque[tuple[Any, int, int]] = deque()
        self._come: list[tuple[int, Any]] = []
        #: By transfer, how it has failed at the writer: the meta bytes of an error.
        self.failures: dict[int, bytes] = {}
        #: How the writer's end has broken, if it has: nothing comes any more.
        self.broken: bytes | None = None

    def send(self, message: Any) -> None:
        """Send ``message``; see :meth:`conveyor.transport.Wire.send`."""
        self._send(message, self.transfer, _core.KIND_VALUE)

    def start_thread(self, target: Callable[[], object], name: str) -> None:
        """Start a thread; see :meth:`conveyor.transport.Wire.start_thread`."""
        threads.start(target, name)

    def tell_failure(self, transfer: int, meta: bytes) -> None:
        """Tell the readers that a transfer has failed whose frame they have been given."""
        self._send((transfer, meta), 0, _core.KIND_CONTROL)

    def tell_broken(self, meta: bytes) -> None:
        """Tell the readers that nothing comes any more. Messages that wait for room are given up."""
        self._unsent.clear()
        self._send((None, meta), 0, _core.KIND_CONTROL)

    def receive(self) -> list[tuple[int, Any]]:
        """Take the messages that have come; see :meth:`conveyor.transport.Wire.receive`."""
        self.exchange()
        come, self._come = self._come, []
        return come

    def exchange(self) -> None:
        """Take the messages that have come, and send those that there is room for by now. A message that
        cannot be taken or sent raises, once."""
        come: list[tuple[int, Any]] = []
        try:
            # The writer's last message is looked for first: all earlier ones are there by then.
            for rank, reader in zip(reversed(self._others), reversed(self._readers), strict=True):
                come[:0] = self._taken(rank, reader)
        finally:
            self._come += come
        while self._unsent and self._has_room():
            message = self._unsent.popleft()
            if not self._writer.send(*message):  # what it has run meanwhile has sent something
                self._unsent.appendleft(message)

    def _taken(self, rank: int, reader: _core.Reader) -> list[tuple[int, Any]]:
        """Take the messages that have come from ``rank`` over one ring, and return the values among them."""
        values: list[tuple[int, Any]] = []
        try:
            while (message := reader.receive()) is not _core.EMPTY:
                if reader.kind != _core.KIND_CONTROL:
                    values.append((rank, message))
                elif message[0] is None:
                    self.broken = message[1]
                else:
                    self.failures[message[0]] = message[1]
        except BaseException:  # one that cannot be taken; those before it were
            self._come += values
            raise
        return values

    def end(self) -> None:
        """Prepare for the endpoint's close. Messages that wait for room are given up, but the writer's next
        message finds some: busy readers would not know that its memory is let go of."""
        self._unsent.clear()
        self._ending = True

    def close(self) -> None:
        """Take and send nothing more."""
        self._unsent.clear()
        self._come.clear()
        for reader in self._readers:
            reader.close()

    def _send(self, message: Any, call_id: int, kind: int) -> None:
        if self._unsent or not self._has_room() or not self._writer.send(message, call_id, kind):
            last = self._last if self._ending else None
            if last is None or not last.send(message, call_id, kind):
                self._unsent.append((message, call_id, kind))

    def _has_room(self) -> bool:
        if not self._writer.has_room:
            self._writer.wants_room()  # whoever makes some from now on rings
        return self._writer.has_room


class Endpoints:
    """All out-of-band ends of one actor's part of a graph. Used on the thread that runs the actor's program.

    outbound, inbound: by edge number, where this actor writes and where it reads.
    alarm: has the program look again when a deadline passes.
    """

    def __init__(
        self,
        process: Process,
        segment: _core.Segment,
        assignment: Assignment,
        program: _core.Program,
        limits: _core.Limits,
        recorder: _core.Recorder,
        budget: _core.MemoryBudget | None,
        checkers: Mapping[int, PromiseChecker],
    ) -> None:
        """``checkers``: by edge, for the edges with a promise about their values."""
        self.outbound: dict[int, Outbound] = {}
        self.inbound: dict[int, Inbound] = {}
        self._name = assignment.name

        def notify() -> None:
            process.process_table.notify(process.slot, assignment.bit)

        self.alarm = Alarm(notify)
        try:
            for end in assignment.endpoints:
                wire = EdgeWire(process, segment, assignment, end, budget, notify)
                if end.rank == 0:
                    label = assignment.sources[end.edge]
                    sender = assignment.actor_name, label
                    position = assignment.recorder.sends.index(end.edge)
                    sent = functools.partial(recorder.count_out_of_band, position)
                    checker = checkers.get(end.edge)
                    outbound = Outbound(wire, end, notify, program, sender, sent, checker)
                    self.outbound[end.edge] = outbound
                else:
                    inbound = Inbound(wire, end, notify, limits, self.alarm)
                    self.inbound[end.edge] = inbound
        except BaseException:
            self.close()
            raise

    def progress(self) -> None:
        """Do all that can be done without waiting. Raises no error: a failure is one transfer's."""
        for link in (*self.outbound.values(), *self.inbound.values()):
            link.progress()

    def close(self) -> None:
        """End all transfers under way, and let go of the ends. Does nothing the second time."""
        self.alarm.close()
        reason = GraphTornDownError(f"{self._name} has been torn down")
        while self.outbound or self.inbound:
            _, link = (self.outbound or self.inbound).popitem()
            link.close(reason)


class _Link:
    """Base of both ends of a transport's endpoint."""

    def __init__(self, wire: EdgeWire, end: EdgeEndpoint, ring: Callable[[], None]) -> None:
        """``ring`` has the program look again, from any thread."""
        self.wire = wire
        self.transport = end.transport
        self.name = str(end.transport.name)
        self._notify = ring
        #: Why nothing can be moved any more.
        self._broken: BaseException | None = None
        try:
            self.endpoint: Endpoint = end.transport.open(wire)
            if not isinstance(self.endpoint, Endpoint):
                raise TypeError(
                    f"open() has returned a {type(self.endpoint).__name__}, no Endpoint"
                )
        except Exception as error:
            self.wire.close()
            who = wire.members[wire.rank]
            raise self.error(f"{who}'s end could not be opened", error) from error

    def progress(self) -> None:
        """Do all that can be done without waiting. Raises no error."""
        if self._broken is not None:
            return
        try:
            self.wire.exchange()
            self.endpoint.progress()
        except Exception as error:
            self.breaks(error)

    def breaks(self, error: BaseException) -> None:
        """Abort the endpoint: nothing can be moved any more."""
        self._broken = error
        try_each(lambda: self.endpoint.abort(error), name=f"abort() of the transport {self.name!r}")

    def close(self, reason: BaseException) -> None:
        """Close the endpoint and its wire: the graph is taken down."""
        name = f"the transport {self.name!r}"
        if self._broken is None:
            self._broken = reason
            try_each(lambda: self.endpoint.abort(reason), name=name)
        try_each(self.wire.end, self.endpoint.close, self.wire.close, name=name)

    def error(self, what: str, cause: BaseException) -> TransportError:
        """Return an error that says what has failed, and on which edge."""
        wrapped = TransportError(
            f"{self.wire.edge}: {what} by the transport {self.name!r}: {in_words(cause)}"
        )
        wrapped.__cause__ = cause
        return wrapped


class Outbound(_Link):
    """The writer's end."""

    def __init__(
        self,
        wire: EdgeWire,
        end: EdgeEndpoint,
        ring: Callable[[], None],
        program: _core.Program,
        sender: tuple[str, str],
        sent: Callable[[int], None],
        checker: PromiseChecker | None,
    ) -> None:
        """``sender``: the actor and what the edge carries, for errors. ``sent(bytes)`` counts. ``checker``
        checks values against what was promised of them."""
        super().__init__(wire, end, ring)
        self._program = program
        self._sender = sender
        self._sent = sent
        self._checker = checker
        able = end.transport.capabilities
        self._kinds = able.devices if able.others_in_frame else None
        #: Tensors whose frame is not published yet, with the transfer and the size in bytes.
        self._offered: tuple[Sending, int, int] | None = None
        #: Transfers that have failed since their frames were published, put here by any thread.
        self._failed: deque[tuple[int, BaseException]] = deque()

    def pack(self, value: Any) -> OutgoingValue:
        """Return the frame that is sent in place of ``value``."""
        self._withdraw()  # the last one could not be published
        if self._checker is not None:
            packed = self._checker.pack(value)
            if type(packed) is CheckedValue:
                return OutgoingValue(value, self._accepts, self._offer, self._checker, self._kinds)
        return OutgoingValue(value, self._accepts, self._offer, None, self._kinds)

    def posted(self) -> None:
        """Begin the transfer: its frame is published. Raises no error."""
        if self._offered is None:
            return
        sending, transfer, size = self._offered
        self._offered = None
        self._sent(size)
        self.wire.transfer = transfer

        def ended(future: Future[None]) -> None:
            error = _failure_of(future)
            if error is not None:
                self._failed.append((transfer, error))
                self._notify()

        try:
            sending.begin().add_done_callback(ended)
        except BaseException as error:
            self._failed.append((transfer, error))
            self.progress()
            if not isinstance(error, Exception):
                raise

    def progress(self) -> None:
        """Make progress, and tell the readers of failed transfers."""
        super().progress()
        while self._failed:
            transfer, cause = self._failed.popleft()
            self._tell(functools.partial(self.wire.tell_failure, transfer), cause)

    def breaks(self, error: BaseException) -> None:
        """Abort the endpoint, and tell the readers."""
        super().breaks(error)
        self._tell(self.wire.tell_broken, error)

    def close(self, reason: BaseException) -> None:
        """Withdraw a transfer that was not published, then close the endpoint and its wire."""
        self._withdraw()
        super().close(reason)

    def _tell(self, tell: Callable[[bytes], None], cause: BaseException) -> None:
        try:
            error = self.error("tensors could not be sent", cause)
            tell(encode_error(error, *self._sender))
        except Exception:  # no memory for the words
            tell(_core.UNSAID)

    def _withdraw(self) -> None:
        if self._offered is not None:
            sending, *_ = self._offered
            self._offered = None
            try_each(sending.withdraw, name=f"withdraw() of the transport {self.name!r}")

    def _accepts(self, tensor: Any) -> str | None:
        try:
            why_not: Any = self.transport.accepts(tensor)
        except Exception as error:
            return f"cannot go by {self.name!r}: accepts() has raised {in_words(error)}"
        if why_not is None:
            return None
        if not isinstance(why_not, str):
            return f"cannot go by {self.name!r}: accepts() has returned {why_not!r}, no text"
        return f"cannot go by {self.name!r}: it {why_not}"

    def _offer(self, tensors: list[Any]) -> bytes:
        if not tensors:
            return b""
        transfer = self._program.execution
        try:
            if self._broken is not None:
                raise copy_to_raise(self._broken)
            sending: Any = self.endpoint.send(tensors, transfer)
            if not isinstance(sending, Sending):
                raise TypeError(f"send() has returned a {type(sending).__name__}, no Sending")
            note: Any = sending.note
            if not isinstance(note, bytes):
                raise TypeError(f"the note is a {type(note).__name__}, not bytes")
        except Exception as error:
            raise self.error("tensors could not be sent", error) from error
        size = sum([tensor.numel() * tensor.element_size() for tensor in tensors])
        self._offered = sending, transfer, size
        return note


# The alarm holds it by itself, and weakly.
class Coming(Struct, frozen=True, eq=False, weakref=True):
    """A value whose tensors are on their way.

    head: the content of its frame.
    transfer: the number of the transfer.
    tensors: the transport's future; ``None``: the value has no tensors.
    deadline: of the execution, on the monotonic clock in nanoseconds; 0: none.
    """

    head: Head
    transfer: int
    tensors: Future[Any] | None
    deadline: int

    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return 0 < self.deadline <= _core.monotonic_ns()


class Inbound(_Link):
    """A reader's end."""

    def __init__(
        self,
        wire: EdgeWire,
        end: EdgeEndpoint,
        ring: Callable[[], None],
        limits: _core.Limits,
        alarm: Alarm,
    ) -> None:
        super().__init__(wire, end, ring)
        self._limits = limits
        self._alarm = alarm

    def arrived(self, head: Head, execution: int) -> Coming:
        """Ask for the tensors of a frame that has come."""
        deadline = self._limits.deadline(execution)
        if not head.tensors:
            return Coming(head, execution, None, deadline)
        try:
            if self._broken is not None:
                raise copy_to_raise(self._broken)
            tensors: Any = self.endpoint.receive(head.tensors, head.note, execution)
            notify = getattr(tensors, "add_done_callback", None)
            if notify is None:
                raise TypeError(f"receive() has returned a {type(tensors).__name__}, no Future")
            notify(lambda _: self._notify())
        except Exception as error:
            head.give_up()
            raise self.error("tensors could not be received", error) from error
        coming = Coming(head, execution, tensors, deadline)
        if deadline:
            self._alarm.add(coming)
        return coming

    def take(self, coming: Coming) -> Any:
        """Return the value, or ``NotImplemented`` while its tensors are on their way. Raises ``Abandoned`` if
        nobody waits for them any more."""
        head, transfer, tensors = coming.head, coming.transfer, coming.tensors
        if tensors is None:
            return head.open(())
        if tensors.done():
            error = _failure_of(tensors)
            if error is None:
                came = tensors.result()
                try:
                    if isinstance(came, Enqueued):
                        came.join()
                        came = came.tensors
                    mismatch = head.mismatch(came)
                except Exception as failed:
                    error = failed
                else:
                    if mismatch is None:
                        return head.open(came)
                    error = TypeError(mismatch)
            head.give_up()
            raise self.error("tensors could not be received", error) from error
        meta = self.wire.failures.get(transfer) or self.wire.broken
        if meta is not None:
            # Nobody asks for older ones.
            self.wire.failures = {t: m for t, m in self.wire.failures.items() if t > transfer}
            self._give_up(coming)
            raise decode_error(meta)
        if self._broken is not None:
            self._give_up(coming)
            raise self.error("tensors could not be received", self._broken) from self._broken
        if self._limits.cancelled(transfer) or coming.is_late():
            self._give_up(coming)
            raise Abandoned(f"{self.wire.edge}: nobody waits for execution {transfer} any more")
        return NotImplemented

    def _give_up(self, coming: Coming) -> None:
        """Let go of a transfer without waiting for its end."""
        coming.head.give_up()
        if self._broken is None:
            name = f"drop() of the transport {self.name!r}"
            try_each(lambda: self.endpoint.drop(coming.transfer), name=name)


def _failure_of(future: Future[Any]) -> BaseException | None:
    """Return the error of a future that is done, or None if it has a result."""
    if future.cancelled():
        return RuntimeError("its future was cancelled")
    return future.exception()


def in_words(error: BaseException) -> str:
    """Return an error's class and message, whose methods may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (whose message cannot be made)"


class GraphCollectives:
    """All collectives of one actor's part of a graph. Used on the thread that runs the actor's program."""

    def __init__(
        self,
        steps: Program,
        tasks: Mapping[int, Task],
        endpoints: Endpoints,
        program: _core.Program,
        limits: _core.Limits,
        running: list[Any],
    ) -> None:
        """``running[0].cancel()`` is called when an execution in which a task runs has been cancelled."""
        self._endpoints = endpoints
        self._program = program
        self._limits = limits
        self._running = running
        self._edges = {
            step.reg: step.edge for step in steps.steps if isinstance(step, (Recv, Send))
        }
        self._tasks = tasks
        self._collectives: list[GraphCollective] = []

    def offer(self, step: Call, task: Task) -> Callable[..., Any] | None:
        """Return the callable that replaces a task's function if other ranks meet this one behind the
        task."""
        is_outbound = self._edges.get(step.out) in self._endpoints.outbound
        return task.function.announce if isinstance(task.function, Offer) and is_outbound else None

    def add(self, step: Call, task: Task) -> GraphCollective | None:
        """Make the collective that a task is this rank's part of, if other ranks take part in it."""
        function = task.function
        if len(step.meets) < 2 or not isinstance(function, Together):
            return None
        positions = [argument.index for argument in task.args if isinstance(argument, Reg)]
        edges = [self._edges[position] for position in positions[function.tensors :]]
        ends: list[Any] = []
        for edge in edges:
            link = self._endpoints.outbound.get(edge) or self._endpoints.inbound[edge]
            ends.append(link.endpoint)
        collective = GraphCollective(
            function,
            positions,
            ends,
            self._program,
            self._limits,
            self._endpoints.alarm,
            self._running,
        )
        self._collectives.append(collective)
        return collective

    def progress(self) -> None:
        """Do all that can be done without waiting."""
        self._endpoints.progress()
        for collective in self._collectives:
            collective.progress()


class GraphCollective:
    """A collective of a graph. If one rank fails in it, all fail: a rank that does not come to the end tells
    the others, and all have their communicator made anew."""

    def __init__(
        self,
        function: Together,
        positions: Sequence[int],
        ends: Sequence[Gathering],
        program: _core.Program,
        limits: _core.Limits,
        alarm: Alarm,
        running: list[Any],
    ) -> None:
        """``positions``: the registers of the inputs; ``ends``: by rank, the endpoint over which the rank
        tells of itself."""
        self._function = function
        self._positions = positions
        self._own = ends[function.rank]
        self._others = [end for end in ends if end is not self._own]
        self._program = program
        self._limits = limits
        self._alarm = alarm
        self._running = running
        #: The execution that has come here, if one has.
        self._execution: int | None = None
        #: The outcome, which the program gets when it is rung.
        self._outcome: tuple[Any, BaseException | None] | None = None

    @property
    def deadline(self) -> int:
        """Deadline of the execution, for the alarm; 0: none."""
        return 0 if self._execution is None else self._limits.deadline(self._execution)

    def start(self, regs: list[Any]) -> None:
        """Begin this rank's part: the task's turn has come. An exception raised here is the task's
        outcome."""
        execution = self._program.execution
        try:
            run = self._function.begin([regs[position] for position in self._positions])
        except BaseException as error:
            self._own.tell("gone", execution, in_words(error))  # others may have had the memory
            raise
        for other in self._others:
            other.gone = {n: why for n, why in other.gone.items() if n >= execution}
        self._execution, self._outcome = execution, None
        self._running[:] = (self,)

        def may_begin() -> bool:
            generation = self._own.operations.generation
            return all(
                other.generation == generation
                and (other.rank > self._own.rank or other.begun == (execution, generation))
                for other in self._others
            )

        def ended(made: Any, error: BaseException | None) -> None:
            if self._execution == execution:
                self._complete(made, error if error is None else self._error(error))

        key = execution, 0
        began = functools.partial(self._own.tell, "begun", execution)
        self._own.operations.add(Job(self._own, key, run, None, may_begin, began, ended))
        if self.deadline:
            self._alarm.add(self)
        self._own.notify()  # messages that the others have sent until now get a turn of their own

    def cancel(self) -> None:
        """Give the operation up: nobody waits for the execution any more."""
        self._give_up(Abandoned(f"{self._function.operation} was given up"))

    def progress(self) -> None:
        """Look at the messages of the other ranks, and give the program the outcome if there is one."""
        execution = self._execution
        if execution is None:
            return
        if self._outcome is None:
            for other in (self._own, *self._others):
                if other.broken is not None:
                    self._give_up(self._error(other.broken))
                elif execution in other.gone:
                    self._give_up(self._error(f"{other.member}: {other.gone[execution]}"))
            if until(self._limits, execution) < 0:
                self.cancel()
        if self._outcome is not None:
            outcome, self._outcome, self._execution = self._outcome, None, None
            self._program.resume(*outcome)

    def _give_up(self, error: BaseException) -> None:
        execution = self._execution
        if execution is not None and self._outcome is None:
            self._complete(None, error)
            self._own.operations.forget(self._own, (execution, 0), in_words(error))

    def _complete(self, value: Any, error: BaseException | None) -> None:
        if self._outcome is not None:
            return
        self._outcome = value, error
        self._own.notify()
        if error is not None and self._own.broken is None:
            self._own.tell("gone", self._execution, in_words(error))

    def _error(self, cause: BaseException | str) -> TransportError:
        function = self._function
        wrapped = TransportError(
            f"{function.operation} over {', '.join(function.names)} by the {function.communicator} has "
            f"failed: {cause if isinstance(cause, str) else in_words(cause)}"
        )
        if isinstance(cause, BaseException):
            wrapped.__cause__ = cause
        return wrapped
