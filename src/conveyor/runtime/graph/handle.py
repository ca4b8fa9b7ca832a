"""A compiled graph in another process than the one that compiled it: a handle that submits there."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from conveyor import _core
from conveyor.channel import SentDefinitions, loads
from conveyor.checks import check_deadline, check_timeout
from conveyor.exceptions import (
    CapacityError,
    DeadlineExceededError,
    GraphTornDownError,
    RuntimeStateError,
    SerializationError,
)
from conveyor.runtime import context
from conveyor.runtime.graph.unsendable import blame_arguments
from conveyor.runtime.refs.imports import Outcome
from conveyor.runtime.refs.ref import blockers_of
from conveyor.runtime.refs.values import RefFailed, lacking, with_values
from conveyor.runtime.refs.wire import SHARE_FROM, Wire
from conveyor.runtime.waiting.alarm import Alarm
from conveyor.runtime.waiting.patience import Patience, wait_until
from conveyor.runtime.waiting.works import Blockers

if TYPE_CHECKING:
    from conveyor.runtime.graph.compiled import CompiledGraph
    from conveyor.runtime.refs.ref import Ref

G = TypeVar("G", bound="CompiledGraph")


def pickled(graph: CompiledGraph) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What ``__reduce__`` of a compiled graph returns."""
    runtime = context.running()
    if runtime is None or not runtime.share_graph(graph):
        raise RuntimeStateError(f"{graph.name} cannot be pickled: its session has ended")
    plan = graph.plan
    options = tuple(name for name in ("timeout", "deadline") if name in plan.keywords)
    whole = plan.whole_input and plan.shape is None
    return load, (runtime.exports.session, graph._number, graph.name, whole, options)


def load(session: str, number: int, name: str, whole: bool, options: tuple[str, ...]) -> Any:
    """Load a pickled graph: the graph itself where it was compiled, else a handle."""
    runtime = context.running()
    if runtime is None or runtime.exports.session != session:
        raise RuntimeStateError(
            f"{name} belongs to another session: a pickled graph can only be loaded by the driver and "
            "the actors of the session that it was compiled in"
        )
    return runtime.load_graph(number, name, whole, options)


def _torn_down(name: str) -> GraphTornDownError:
    return GraphTornDownError(f"{name} has been torn down")


class SharedGraphs(Generic[G]):
    """Of the graphs of a session those that others may have handles of: they live until they are torn
    down."""

    def __init__(self, graphs: Collection[G]) -> None:
        self._graphs = graphs
        self._shared: dict[int, G] = {}

    def share(self, graph: G, closed: bool) -> bool:
        """A handle of ``graph`` is about to leave. False if it is of another session; ``closed``: this
        one has ended."""
        if graph not in self._graphs:
            if graph.is_teardown and not closed:
                raise _torn_down(graph.name)
            return False
        self._shared[graph._number] = graph
        return True

    def load(self, number: int, name: str) -> G:
        graph = self._shared.get(number)
        if graph is None or graph.is_teardown:
            self._shared.pop(number, None)
            raise _torn_down(name)
        return graph

    def forget(self, number: int) -> None:
        self._shared.pop(number, None)

    def clear(self) -> None:
        self._shared.clear()


class _Request:
    """One submission that is on its way."""

    __slots__ = ("answer", "asked", "blockers", "wire")

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.answer: tuple[bool, bytes] | None = None
        # Who keeps the owner from taking it: the last question, and the answer to which one.
        self.asked = -1
        self.blockers: tuple[int, Blockers] = (-1, ())


class _Limit:
    """How long an argument is waited for."""

    __slots__ = ("__weakref__", "deadline")

    def __init__(self, deadline: int) -> None:
        self.deadline = deadline

    def passed(self) -> bool:
        return _passed(self.deadline)


class _Requests:
    """What a handle has asked for. Apart from it, so that its connection does not keep it alive."""

    def __init__(self, ring: Callable[[], object]) -> None:
        self.ring = ring
        self.pending: dict[int, _Request] = {}

    def on_message(self, message: Any, fds: list[int]) -> None:
        number, ok, data = message
        request = self.pending.get(number)
        if request is not None:
            if ok is None:
                request.blockers = data
            else:
                request.answer = (ok, data)
            self.ring()
        elif ok:
            loads(data)  # nobody wants the refs: they are dropped, and so is what is kept for them


class GraphHandle:
    """A graph that another process has compiled. Executions are submitted there, in one order with
    those of everybody else; what they return are refs like any other.

    It cannot be torn down here: others use the graph, and its actors are its owner's to free.
    """

    def __init__(
        self,
        name: str,
        whole: bool,
        options: tuple[str, ...],
        inbox: _core.Inbox,
        ring: Callable[[], object],
        alarm: Alarm,
        connect: Callable[[], Any],
        reduced: tuple[Any, ...],
    ) -> None:
        """``whole``: its input is one argument that travels as it is. ``options``: which options of
        ``execute`` are inputs of the graph. ``connect()``: the socket of a connection to its owner."""
        self.name = name
        self._whole = whole
        self._options = options
        self._inbox = inbox
        self._requests = _Requests(ring)
        self._alarm = alarm
        self._reduced = reduced
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._connect = connect
        self._wire: Wire | None = None

    def execute(
        self,
        *args: Any,
        timeout: float | None = None,
        deadline: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """See ``CompiledGraph.execute``. It waits for its owner's answer as well."""
        timeout = self._option("timeout", timeout, kwargs)
        deadline = self._option("deadline", deadline, kwargs)
        patience = Patience(None if timeout is not None and timeout < 0 else timeout)
        end = _end(deadline)
        while True:
            left = patience.left()
            lacked = lacking(args, kwargs)
            if lacked is None:
                break
            self._check_time(end, deadline)
            ask = functools.partial(blockers_of, lacked)
            with context.current().lanes.waiting(ask, True) as wait:
                wait_until(
                    self._inbox,
                    self._until_there(lacked, end),
                    left,
                    functools.partial("{!r}, an argument of {}".format, lacked, self.name),
                    lambda: "it is not done",
                    wait,
                )
        number, request = self._send("execute", args, kwargs, _end(left), deadline, end)
        return self._answer(number, request)

    def try_execute(self, *args: Any, deadline: float | None = None, **kwargs: Any) -> Any:
        """See ``CompiledGraph.try_execute``."""
        deadline = self._option("deadline", deadline, kwargs)
        lacked = lacking(args, kwargs)
        if lacked is not None:
            raise CapacityError(f"{self.name}: {lacked!r}, which is an argument, is not there yet")
        number, request = self._send("try", args, kwargs, 0, deadline, _end(deadline))
        return self._answer(number, request)

    async def execute_async(self, *args: Any, deadline: float | None = None, **kwargs: Any) -> Any:
        """See ``CompiledGraph.execute_async``."""
        from conveyor.runtime.waiting.aio import (
            wait_until as wait_async,  # asyncio is slow to import
        )

        deadline = self._option("deadline", deadline, kwargs)
        end = _end(deadline)
        while (lacked := lacking(args, kwargs)) is not None:
            self._check_time(end, deadline)
            await wait_async(self._until_there(lacked, end), functools.partial(blockers_of, lacked))
        number, request = self._send("execute", args, kwargs, 0, deadline, end)
        try:
            ask = functools.partial(self._blockers, number, request)
            await wait_async(lambda: self._is_answered(request), ask)
        except BaseException:
            self._withdraw(number)
            raise
        return self._result(number, request)

    def teardown(self, kill_actors: bool = False) -> NoReturn:
        """Raises ``RuntimeStateError``: a graph is torn down by the process that compiled it."""
        raise RuntimeStateError(
            f"{self.name} can only be torn down by the process that compiled it: others use it too, "
            "and its actors belong to that process"
        )

    def __reduce__(self) -> Any:
        return load, self._reduced

    def __repr__(self) -> str:
        return f"<GraphHandle {self.name}>"

    # Requests

    def _option(self, name: str, value: Any, kwargs: dict[str, Any]) -> Any:
        if name not in self._options:
            return check_deadline(value) if name == "deadline" else check_timeout(value)
        if value is not None or name == "timeout":
            kwargs[name] = value
        return None

    def _until_there(self, ref: Ref, end: int) -> Callable[[], bool]:
        """Whether to look again: ``ref`` is done, or it is too late. The bell rings at ``end``."""
        limit = _Limit(end)
        if end:
            self._alarm.add(limit)
        return lambda: ref.done() or limit.passed()

    def _check_time(self, end: int, deadline: float | None) -> None:
        if _passed(end):
            raise DeadlineExceededError(
                f"{self.name}: the deadline of {deadline:g} s has passed before an argument was there"
            )

    def _send(
        self,
        how: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        until: int,
        deadline: float | None,
        end: int,
    ) -> tuple[int, _Request]:
        whole = self._whole and len(args) == 1 and not kwargs
        failed = False
        try:
            args, kwargs = with_values(args, kwargs)
            message = args[0] if whole else (args, kwargs)
            snapshot = _core.Snapshot(message, SentDefinitions(), SHARE_FROM)
        except SerializationError as error:
            raise blame_arguments(error, self.name, args, kwargs) from error.__cause__
        except RefFailed as error:
            # The owner makes the refs of an execution that this is the outcome of.
            failed = True
            snapshot = Outcome.failed(error.error).snapshot
        with self._lock:
            if self._wire is None or self._wire.ended:
                requests = self._requests
                self._wire = Wire(self._connect(), "graph", requests.on_message, requests.ring)
                weakref.finalize(self, self._wire.hang_up).atexit = False
            number = next(self._numbers)
            request = self._requests.pending[number] = _Request(self._wire)
            head = how, number, whole, failed, until, deadline, end
            try:
                self._wire.send_snapshot(head, snapshot)
            except BaseException:
                del self._requests.pending[number]
                raise
        return number, request

    def _is_answered(self, request: _Request) -> bool:
        return request.answer is not None or request.wire.ended

    def _withdraw(self, number: int) -> None:
        request = self._requests.pending.pop(number, None)
        if request is None:
            return
        if request.answer is not None and request.answer[0]:
            loads(request.answer[1])
        request.wire.send(("withdraw", number, None))

    def _answer(self, number: int, request: _Request) -> Any:
        ask = functools.partial(self._blockers, number, request)
        try:
            with context.current().lanes.waiting(ask, True) as wait:
                # The owner counts the time, and says what it was waiting for.
                wait_until(
                    self._inbox,
                    lambda: self._is_answered(request),
                    None,
                    lambda: f"{self.name} to take an execution",
                    lambda: "its owner has not answered",
                    wait,
                )
        except BaseException:
            self._withdraw(number)
            raise
        return self._result(number, request)

    def _blockers(self, number: int, request: _Request, question: int) -> Blockers | None:
        answered, blockers = request.blockers
        if answered == question:
            return blockers
        if request.asked != question:
            request.asked = question
            request.wire.send(("who", number, question))
        return None

    def _result(self, number: int, request: _Request) -> Any:
        del self._requests.pending[number]
        if request.answer is None:
            why = request.wire.broken
            broken = f"the connection to the process that compiled it has broken: {why}"
            gone = "the process that compiled it is gone, or has ended the connection"
            raise RuntimeStateError(f"{self.name}: {broken if why else gone}")
        ok, data = request.answer
        value = loads(data)
        if not ok:
            raise value
        return value


def _end(seconds: float | None) -> int:
    """That time from now on the monotonic clock, in nanoseconds; 0: never."""
    return 0 if seconds is None else _core.monotonic_ns() + int(seconds * 1e9)


def _passed(end: int) -> bool:
    return bool(end) and _core.monotonic_ns() >= end
