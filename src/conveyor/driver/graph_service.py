"""Service for the handles that other processes have of a graph; see ``graph.handles``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from conveyor import _core
from conveyor.codec import Reader, SentDefinitions, claims, dumps_by_value
from conveyor.exceptions import CapacityError, ConveyorError, RuntimeStateError
from conveyor.graph.compiled import CompiledGraph, parts_of
from conveyor.graph.entry import GateEntry
from conveyor.graph.handles import (
    Answered,
    Execute,
    HeldUp,
    Question,
    Show,
    ToOwner,
    Whom,
    Withdraw,
)
from conveyor.refs.ref import Itself
from conveyor.runtime import threads
from conveyor.runtime.messages import Connection, received
from conveyor.runtime.wait_graph import Blockers

if TYPE_CHECKING:
    import socket


class GraphService:
    """The owner's end of one handle's connection. Executions that wait for room wait on a thread of the
    service's own, in order; meanwhile those that only try are refused."""

    def __init__(self, graph: CompiledGraph, sock: socket.socket, reader: Reader) -> None:
        """``reader``: the process that has the handle."""
        self._reader = reader
        self._graph = graph
        entry = parts_of(graph).submitter.entry
        assert isinstance(entry, GateEntry)
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
            _let_go(snapshot)

    def _whom(self, message: Whom, _fds: list[int]) -> None:
        with self._lock:
            waits = message.number == self._busy or message.number in self._queue

        def tell(blockers: Blockers) -> None:
            self.connection.send(HeldUp(message.number, message.question, blockers))

        if waits:
            self._entry.tell_room_blockers(tell)
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
            _let_go(snapshot)
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
            _let_go(snapshot)
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


def _let_go(snapshot: _core.Snapshot) -> None:
    """Release ``snapshot``, which nobody decodes from now on. References that were loaded from it stay."""
    if snapshot.has_refs:
        claims.give_up(snapshot.meta)


def _raise(error: Exception) -> None:
    raise error
