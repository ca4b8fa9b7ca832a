"""Handles of a compiled graph in other processes than its owner, which compiled it. They ask the owner, which
has a service for each of them."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from msgspec import Struct
from msgspec.structs import replace

import conveyor
from conveyor import _core
from conveyor.calls.unsendable import blame_arguments
from conveyor.checks import deadline_in_words
from conveyor.codec import Reader, SentDefinitions, borrows, dumps_by_value, loads
from conveyor.config import Config
from conveyor.exceptions import (
    CapacityError,
    ConveyorError,
    DeadlineExceededError,
    GraphTornDownError,
    RuntimeStateError,
    SerializationError,
)
from conveyor.graph.compiled import CompiledGraph, GraphParts, parts_of
from conveyor.graph.entry import OwnerEntry
from conveyor.graph.status import GraphStatus
from conveyor.graph.submission import (
    Need,
    Options,
    SubmissionWaits,
    Submitter,
    Terms,
    reserved_inputs,
)
from conveyor.plan.model import Plan
from conveyor.refs.imports import Outcome
from conveyor.refs.ref import Itself
from conveyor.runtime import context, threads
from conveyor.runtime.messages import SHARE_FROM, Connection, Message, received
from conveyor.runtime.process import Process
from conveyor.runtime.wait_graph import Blockers
from conveyor.runtime.waiting import TimeLimit
from conveyor.weak import WeakValues

if TYPE_CHECKING:
    import socket

    from conveyor.refs.imports import Parts


#: Questions to a graph's owner beside executions; the names are those of ``CompiledGraph``.
Question = Literal["explain", "status", "stats", "is_teardown"]


class ToOwner(Message, frozen=True):
    """A message of a handle to the graph's owner. Each request has a number."""


class Execute(ToOwner, frozen=True):
    """Begin an execution; answered by :class:`Answered`. ``patient``: wait for room, for ``time_limit``
    seconds (``None``: for ever). ``left``: seconds that the execution has for all of it (``None``: no
    limit). These are durations, since clocks of nodes differ. The snapshot holds the arguments (``whole``:
    the only one, as it is), or the error of one of them (``failed``)."""

    number: int
    patient: bool
    whole: bool
    failed: bool
    time_limit: float | None
    left: float | None
    parts: Parts


class Show(ToOwner, frozen=True):
    """Answer a question about the graph; answered by :class:`Answered`."""

    number: int
    question: Question
    args: tuple[Any, ...]


class Withdraw(ToOwner, frozen=True):
    """Forget request ``number``: nobody waits for its answer any more."""

    number: int


class Whom(ToOwner, frozen=True):
    """Name the blockers of request ``number``; answered by :class:`HeldUp`."""

    number: int
    question: int


class FromOwner(Message, frozen=True):
    """A message of the owner to a handle, about one of its requests."""


class Answered(FromOwner, frozen=True):
    """The answer to a request: the pickled result, or (not ``ok``) the pickled error to raise."""

    number: int
    ok: bool
    data: bytes


class HeldUp(FromOwner, frozen=True):
    """Blockers of a request: the processes that have to do something before it is answered."""

    number: int
    question: int
    blockers: Blockers


def reducer_of(plan: Plan, graph_info: object) -> Callable[[CompiledGraph], tuple[Any, ...]]:
    """Return the function that pickles a graph of this plan, in its owner. ``graph_info``: the graph's."""
    # Whether its input is one argument that travels as it is.
    whole = plan.whole_input and plan.shape is None
    options = reserved_inputs(plan)

    def reduce(graph: CompiledGraph) -> tuple[Any, ...]:
        runtime = context.running()
        if runtime is None or not runtime.share_graph(graph, graph_info):
            raise RuntimeStateError(f"{graph.name} cannot be pickled: its session has ended")
        session, number = runtime.exports.session, parts_of(graph).number
        return load, (session, number, graph.name, whole, options)

    return reduce


def load(session: str, number: int, name: str, whole: bool, options: tuple[str, ...]) -> Any:
    """Load a pickled graph: the graph itself in its owner, otherwise a handle."""
    runtime = context.running()
    if runtime is None or runtime.exports.session != session:
        raise RuntimeStateError(
            f"{name} belongs to another session: a pickled graph can only be loaded by the driver and "
            "the actors of the session that it was compiled in"
        )
    return runtime.load_graph(number, name, whole, options)


class SharedGraphs:
    """The graphs of a session of which others may have handles: they live until they are torn down, and are
    known as long as somebody holds them."""

    def __init__(self, graph_infos: Collection[object]) -> None:
        """``graph_infos``: of all graphs of the session."""
        self._graph_infos = graph_infos
        self._shared: dict[int, CompiledGraph] = {}
        self._known: WeakValues[int, CompiledGraph] = WeakValues()

    def share(self, graph: CompiledGraph, graph_info: object, closed: bool) -> bool:
        """Note that a handle of ``graph`` is about to leave. Return False if the graph is of another session;
        ``closed``: this one has ended."""
        if graph.is_teardown and not closed:
            raise _torn_down(graph.name)
        if graph.is_teardown or graph_info not in self._graph_infos:
            return False
        number = parts_of(graph).number
        self._shared[number] = self._known[number] = graph
        return True

    def load(self, number: int, name: str) -> CompiledGraph:
        """Return the graph itself, which may be torn down. Raises ``GraphTornDownError`` if it is no more."""
        graph = self._known.get(number)
        if graph is None:
            raise _torn_down(name)
        return graph

    def forget(self, number: int) -> None:
        """Forget graph ``number``, which is torn down."""
        self._shared.pop(number, None)

    def clear(self) -> None:
        """Forget all graphs: the session has ended."""
        self._shared.clear()
        self._known.clear()


def _torn_down(name: str) -> GraphTornDownError:
    return GraphTornDownError(f"{name} has been torn down")


_BELONGS = "others use it too, and its actors belong to that process"
_HAS_PLAN = (
    "only there are its plan and its settings; explain(), status() and stats() work everywhere"
)


class _Request:
    """A request to the owner that is not answered yet."""

    __slots__ = ("answer", "connection", "held_up", "number", "requested")

    def __init__(self, number: int, connection: Connection) -> None:
        self.number = number
        self.connection = connection
        self.answer: Answered | None = None
        # The blockers of the request: the last question about them, and the last answer.
        self.requested = -1
        self.held_up: HeldUp | None = None

    def is_answered(self) -> bool:
        """Return whether there is an answer, or will be none."""
        return self.answer is not None or self.connection.ended

    def ask(self, question: int) -> Blockers | None:
        """Return the blockers of the answer; ``None``: the owner has not said yet."""
        known = self.held_up
        if known is not None and known.question == question:
            return known.blockers
        if self.requested != question:
            self.requested = question
            self.connection.send(Whom(self.number, question))
        return None


class Requests:
    """Pending requests of a handle. Separate from the handle, so that its connection does not keep it
    alive."""

    def __init__(self, ring: Callable[[], object]) -> None:
        self.notify = ring
        self.pending: dict[int, _Request] = {}

    def on_message(self, message: FromOwner, _fds: list[int]) -> None:
        self.handlers[type(message)](self, message)

    def _answered(self, answer: Answered) -> None:
        request = self.pending.get(answer.number)
        if request is not None:
            request.answer = answer
            self.notify()
        else:
            _let_go(answer)

    def _held_up(self, message: HeldUp) -> None:
        request = self.pending.get(message.number)
        if request is not None:
            request.held_up = message
            self.notify()

    #: The function for each kind of message.
    handlers: ClassVar[Mapping[type[FromOwner], Callable[[Requests, Any], None]]] = {
        Answered: _answered,
        HeldUp: _held_up,
    }


def _let_go(answer: Answered) -> None:
    """Drop the references in an answer that nobody wants, so that the values that are stored for them are
    freed."""
    if answer.ok:
        loads(answer.data)


class Owner:
    """The process that has compiled a graph, over a connection of the handle's own."""

    def __init__(self, name: str, process: Process, connect: Callable[[], Any]) -> None:
        """``name``: the graph's. ``connect()`` returns the socket of a connection to its owner."""
        self.name = name
        self.waits = SubmissionWaits(process)
        process_table, slot = process.process_table, process.slot
        self._requests = Requests(lambda: process_table.notify(slot, _core.ATTENTION_BIT))
        self._numbers = itertools.count(1)
        # Reentrant: a signal handler may use the handle while its thread waits for the connection.
        self._lock = threading.RLock()
        self._connect = connect
        self._connection: Connection | None = None

    def send(
        self, ask: Callable[[int], ToOwner], snapshot: _core.Snapshot | None = None
    ) -> _Request:
        """Send the request that ``ask(number)`` makes, for ``answer``. ``snapshot``: the one whose parts the
        request has."""
        with self._lock:
            connection = self._open()
            number = next(self._numbers)
            request = self._requests.pending[number] = _Request(number, connection)
            try:
                connection.send(ask(number), snapshot)
            except BaseException:
                del self._requests.pending[number]
                raise
        return request

    def _open(self) -> Connection:
        """Return the open connection, or a new one. With the lock."""
        if self._connection is not None and not self._connection.ended:
            return self._connection
        requests = self._requests
        connection = Connection(self._connect(), "graph", requests.on_message, requests.notify)
        if self._connection is not None and not self._connection.ended:
            connection.hang_up()  # a signal handler has opened one meanwhile
            return self._connection
        self._connection = connection
        weakref.finalize(self, connection.hang_up).atexit = False
        return connection

    def answer(self, request: _Request, bounded: bool = False) -> Generator[Need, None, Any]:
        """Wait for the answer, as a part of a submission, and return it or raise it. If the wait is broken
        off, the request is withdrawn. ``bounded``: the owner answers in time in any case."""
        try:
            while not request.is_answered():
                # The owner counts the time, and says what it was waiting for.
                yield Need(
                    request.is_answered,
                    request.ask,
                    lambda: f"{self.name} to answer",
                    lambda: "its owner has not answered",
                    bounded=bounded,
                )
        except BaseException:
            self._withdraw(request)
            raise
        del self._requests.pending[request.number]
        if request.answer is None:
            why = request.connection.broken
            broken = f"the connection to the process that compiled it has broken: {why}"
            gone = "the process that compiled it is gone, or has ended the connection"
            raise RuntimeStateError(f"{self.name}: {broken if why else gone}")
        value = loads(request.answer.data)
        try:
            if not request.answer.ok:
                raise value
            return value
        finally:
            del value  # what is raised refers to this frame

    def _withdraw(self, request: _Request) -> None:
        if self._requests.pending.pop(request.number, None) is None:
            return
        if request.answer is not None:
            _let_go(request.answer)
        request.connection.send(Withdraw(request.number))

    def ask(self, question: Question, *args: Any) -> Any:
        """Ask the owner a question, and return its answer. This thread waits."""
        request = self.send(lambda number: Show(number, question, args))
        return self.waits.block(self.answer(request), TimeLimit(None))

    def refuse(self, what: str, why: str = _BELONGS) -> NoReturn:
        """Raise that only the owner can do this with the graph; ``what``: the participle."""
        raise RuntimeStateError(
            f"{self.name} can only be {what} by the process that compiled it: {why}"
        )


# The alarm holds it by itself, and weakly.
class _Remote(Struct, frozen=True, eq=False, weakref=True):
    """An execution that is about to be asked for."""

    #: On the monotonic clock, in nanoseconds; 0: none.
    deadline: int
    seconds: float | None

    def passed(self) -> bool:
        return bool(self.deadline) and _core.monotonic_ns() >= self.deadline


class RemoteEntry:
    """Entry of a handle, which has the owner submit; see ``graph.submission.Entry``."""

    takes_parts = remote_status = False  # the owner sees to that

    def __init__(self, owner: Owner, process: Process, whole: bool) -> None:
        """``whole``: the graph's input is one argument that travels as it is."""
        self._owner = owner
        self._alarm = process.alarm
        self._whole = whole

    def at_once(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        deadline: Any = None,
        blocking: bool = True,
    ) -> None:
        """Return None: every execution waits for the owner's answer."""

    def is_down(self) -> bool:
        return False  # the owner sees to that

    def revive(self, terms: Terms) -> None:
        pass

    def begin(self, terms: Terms) -> _Remote:
        return _Remote(_end(terms.seconds), terms.seconds)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check nothing: the owner knows the inputs."""

    def until_done(self, need: Need, execution: _Remote) -> Need:
        if execution.passed():
            raise DeadlineExceededError(
                f"{self._owner.name}: the {deadline_in_words(execution.seconds)} has passed before an "
                "argument was there"
            )
        if execution.deadline:
            self._alarm.add(execution)
        ready = need.ready
        bounded = bool(execution.deadline)
        return replace(need, ready=lambda: ready() or execution.passed(), bounded=bounded)

    def submit(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        execution: _Remote,
        terms: Terms,
        error: BaseException | None = None,
    ) -> Generator[Need, None, Any]:
        whole = self._whole and len(args) == 1 and not kwargs
        if error is None:
            try:
                message = args[0] if whole else (args, kwargs)
                snapshot = _core.Snapshot(message, SentDefinitions(), SHARE_FROM)
            except SerializationError as unsendable:
                raise blame_arguments(unsendable, self._owner.name, args, kwargs) from (
                    unsendable.__cause__
                )
        else:
            # The owner makes refs with this outcome.
            snapshot = Outcome.failed(error).snapshot
        time_limit = terms.time_limit.left()
        left = None
        if execution.deadline:
            left = (execution.deadline - _core.monotonic_ns()) / 1e9

        def ask(number: int) -> Execute:
            return Execute(
                number,
                terms.mode != "refuse",
                whole,
                error is not None,
                time_limit,
                left,
                snapshot.parts,
            )

        request = self._owner.send(ask, snapshot)
        bounded = time_limit is not None or left is not None
        return (yield from self._owner.answer(request, bounded))


class HandleControl:
    """Control of a graph by a handle: it asks the owner. It refuses to tear down or restart the graph, since
    others use it, and its actors are its owner's."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    @property
    def is_teardown(self) -> bool:
        try:
            return bool(self._owner.ask("is_teardown"))
        except GraphTornDownError:  # it is not known any more where it was compiled
            return True

    def restart(self) -> None:
        self._owner.refuse("restarted")

    def teardown(self, kill_actors: bool = False) -> None:
        self._owner.refuse("torn down")

    def check_block(self) -> None:
        self._owner.refuse("torn down (as the end of a 'with' block does)")

    @property
    def plan(self) -> Plan:
        self._owner.refuse("asked for its plan", _HAS_PLAN)

    @property
    def config(self) -> Config:
        self._owner.refuse("asked for its config", _HAS_PLAN)

    def describe(self) -> str:
        return "compiled by another process"

    def explain(self) -> str:
        return str(self._owner.ask("explain"))

    def draw(self, *args: Any) -> str:
        self._owner.refuse("drawn", _HAS_PLAN)

    def status(self, stacks: bool = False) -> GraphStatus:
        status: GraphStatus = self._owner.ask("status", stacks)
        return status

    def stats(self) -> conveyor.observe.GraphStats:
        stats: conveyor.observe.GraphStats = self._owner.ask("stats")
        return stats

    def trace(self, path: str | os.PathLike[str], max_events: int) -> conveyor.observe.Trace:
        self._owner.refuse("traced", _HAS_PLAN)

    def simulate(self, durations: Any, options: dict[str, Any]) -> conveyor.observe.Simulation:
        self._owner.refuse("simulated", _HAS_PLAN)

    def html(self, title: str) -> str:
        from html import escape

        return f"<p><b>{escape(title)}</b></p>{self.stats()._repr_html_()}"


def graph_handle(
    process: Process,
    connect: Callable[[], Any],
    session: str,
    number: int,
    name: str,
    whole: bool,
    options: tuple[str, ...],
) -> CompiledGraph:
    """Make a handle of graph ``number``. ``options``: those options of ``execute`` that are inputs of the
    graph."""
    owner = Owner(name, process, connect)
    entry = RemoteEntry(owner, process, whole)
    reduced = load, (session, number, name, whole, options)
    return CompiledGraph(
        GraphParts(
            number,
            name,
            Submitter(name, entry, owner.waits, Options(options)),
            HandleControl(owner),
            lambda _: reduced,
        )
    )


def _end(seconds: float | None) -> int:
    """Return the instant ``seconds`` from now on the monotonic clock, in nanoseconds; 0: never."""
    return 0 if seconds is None else _core.monotonic_ns() + int(seconds * 1e9)


class GraphService:
    """The owner's end of one handle's connection. Executions that wait for room wait on a thread of the
    service's own, in order; meanwhile those that only try are refused."""

    def __init__(self, graph: CompiledGraph, sock: socket.socket, reader: Reader) -> None:
        """``reader``: the process that has the handle."""
        self._reader = reader
        self._graph = graph
        entry = parts_of(graph).submitter.entry
        assert isinstance(entry, OwnerEntry)
        self._entry = entry
        # Taken by itself: entering a condition runs Python code, and a signal handler that raises there
        # leaves the lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # In the order of arrival, with the arguments and the time.
        self._queue: dict[int, tuple[Execute, _core.Snapshot, int]] = {}
        # Number of the execution that waits for room, or is about to begin; 0: none.
        self._busy = 0
        self._ended = False
        self._worker = threads.serve(self._work, "graph-executions")
        try:
            self.connection = Connection(sock, "graph", self._on_message, self._on_end)
        except BaseException:
            with self._lock:
                self._ended = True
                self._changed.notify()
            raise

    def _on_message(self, message: ToOwner, fds: list[int]) -> None:
        self.handlers[type(message)](self, message, fds)

    def _withdraw(self, message: Withdraw, _fds: list[int]) -> None:
        with self._lock:
            _, snapshot, _ = self._queue.pop(message.number, (None, None, 0))
        if snapshot is not None:
            _give_up(snapshot)

    def _whom(self, message: Whom, _fds: list[int]) -> None:
        with self._lock:
            waits = message.number == self._busy or message.number in self._queue

        def tell(blockers: Blockers) -> None:
            self.connection.send(HeldUp(message.number, message.question, blockers))

        if waits:
            self._entry.tell_capacity_blockers(tell)
        else:
            tell(())

    def _tell(self, message: Show, _fds: list[int]) -> None:
        # It may look for a stack, which takes its time. The thread ends with the answer.
        threads.start_or_run(
            self._answer, "graph-answer", message.number, partial(self._said, message)
        )

    def _execute(self, message: Execute, fds: list[int]) -> None:
        came = _core.monotonic_ns()
        try:
            snapshot = received(message.parts, fds)
        except Exception as error:  # it cannot be mapped
            self._answer(message.number, partial(_raise, error))
            return
        with self._lock:
            if message.patient:
                self._queue[message.number] = message, snapshot, came
                self._changed.notify()
                return
            waiting = bool(self._busy or self._queue)
        begin = partial(self._begin, message, snapshot, came, waiting)
        self._answer(message.number, begin, snapshot)

    #: What is done for each kind of message.
    handlers: ClassVar[Mapping[type[ToOwner], Callable[[GraphService, Any, list[int]], None]]] = {
        Execute: _execute,
        Show: _tell,
        Withdraw: _withdraw,
        Whom: _whom,
    }

    def _on_end(self) -> None:
        with self._lock:
            self._ended = True
            left = [snapshot for _, snapshot, _ in self._queue.values()]
            self._queue.clear()
            self._changed.notify()
        for snapshot in left:
            _give_up(snapshot)
        self._worker.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._queue or self._ended)
                if self._ended:
                    return
                message, snapshot, came = self._queue.pop(next(iter(self._queue)))
                self._busy = message.number
            begin = partial(self._begin, message, snapshot, came, False)
            self._answer(message.number, begin, snapshot)
            del message, snapshot, begin
            with self._lock:
                self._busy = 0

    def _answer(
        self, number: int, act: Callable[[], Any], snapshot: _core.Snapshot | None = None
    ) -> None:
        """Send the result or the error of ``act()``. ``act`` may not have come to looking at the
        ``snapshot``."""
        try:
            answer = Answered(number, True, self._pickle(act()))
        except Exception as error:
            answer = Answered(number, False, self._pickle_error(error))
        if snapshot is not None:
            _give_up(snapshot)
        self.connection.send(answer)

    def _pickle(self, value: Any) -> bytes:
        return dumps_by_value(value, SentDefinitions((self._reader,)))

    def _pickle_error(self, error: Exception) -> bytes:
        error = error.with_traceback(None)
        try:
            return self._pickle(error)
        except ConveyorError:
            return self._pickle(RuntimeStateError(f"{type(error).__name__}: {error}"))

    def _arguments(self, whole: bool, snapshot: _core.Snapshot) -> tuple[Any, dict[str, Any]]:
        if whole:  # sent on as it is
            return (snapshot,), {}
        args, kwargs = snapshot.decode()
        # A ref in the other process's argument has been replaced by its value already.
        return tuple(map(Itself.of, args)), {k: Itself.of(v) for k, v in kwargs.items()}

    def _said(self, request: Show) -> Any:
        graph = self._graph
        answers: dict[Question, Callable[..., Any]] = {
            "explain": graph.explain,
            "status": graph.status,
            "stats": graph.stats,
            "is_teardown": lambda: graph.is_teardown,
        }
        return answers[request.question](*request.args)

    def _begin(self, request: Execute, snapshot: _core.Snapshot, came: int, waiting: bool) -> Any:
        """Begin an execution. ``came``: when it was asked for. ``waiting``: other executions come first."""
        if request.failed:
            return self._entry.refs_of(snapshot.decode())
        if waiting:
            raise CapacityError(f"{self._graph.name}: others of this handle wait for room")
        args, kwargs = self._arguments(request.whole, snapshot)
        options: dict[str, Any] = {}
        passed = (_core.monotonic_ns() - came) / 1e9
        if request.left is not None:
            # A deadline that has passed is no wrong argument.
            options["deadline"] = max(request.left - passed, 1e-9)
        if not request.patient:
            return self._graph.try_execute(*args, **kwargs, **options)
        if request.time_limit is not None:
            options["timeout"] = max(request.time_limit - passed, 0.0)
        return self._graph.execute(*args, **kwargs, **options)


def _give_up(snapshot: _core.Snapshot) -> None:
    """Release ``snapshot``, which nobody decodes from now on. References that were loaded from it stay."""
    if snapshot.has_refs:
        borrows.give_up(snapshot.meta)


def _raise(error: Exception) -> None:
    raise error
