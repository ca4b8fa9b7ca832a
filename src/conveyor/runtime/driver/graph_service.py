"""Serving the handles that other processes have of a graph; see ``runtime.graph.handle``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.channel import dumps_by_value
from conveyor.exceptions import CapacityError, ConveyorError, RuntimeStateError
from conveyor.runtime import threads
from conveyor.runtime.refs.ref import Itself
from conveyor.runtime.refs.wire import Wire, received

if TYPE_CHECKING:
    import socket

    from conveyor.runtime.graph.compiled import CompiledGraph
    from conveyor.runtime.refs.exports import Exports


class GraphService:
    """The owner's end of one handle's connection. Executions that wait for room wait on a thread of
    its own, in order; meanwhile others are refused to those who only try."""

    def __init__(
        self,
        graph: CompiledGraph,
        sock: socket.socket,
        exports: Exports,
        actor: int,
        alive: Callable[[], bool],
    ) -> None:
        """``actor``: the number of the one that asks, and whether it is alive."""
        self._actor = actor
        self._alive = alive
        self._graph = graph
        self._exports = exports
        self._changed = threading.Condition()
        self._queue: dict[int, tuple[Any, ...]] = {}  # in the order of arrival
        self._busy = False
        self._ended = False
        # Of refs in answers: should the other side die, nobody will load them.
        self._tickets: list[int] = []
        self._worker = threads.start(self._work, "graph-executions")
        try:
            self.wire = Wire(sock, "graph", self._on_message, self._on_end)
        except BaseException:
            with self._changed:
                self._ended = True
                self._changed.notify()
            raise

    def _on_message(self, message: Any, fds: list[int]) -> None:
        how, number, *rest = message
        if how == "withdraw":
            with self._changed:
                self._queue.pop(number, None)
            return
        if how == "who":
            with self._changed:
                waits = self._busy or number in self._queue
            blockers = self._graph.room_blockers() if waits else ()
            self.wire.send((number, None, (rest[0], blockers)))
            return
        *options, parts = rest
        try:
            snapshot = received(parts, fds)
        except Exception as error:  # it cannot be mapped
            unread = error
            self._answer(number, lambda: _raise(unread))
            return
        if how == "try":
            with self._changed:
                waiting = self._busy or bool(self._queue)
            self._answer(number, lambda: self._try(waiting, snapshot, *options))
            return
        with self._changed:
            self._queue[number] = (snapshot, *options)
            self._changed.notify()

    def _on_end(self) -> None:
        with self._changed:
            self._ended = True
            self._queue.clear()
            self._changed.notify()
        self._worker.join()
        self._exports.addressed(self._actor, self._tickets, self._alive)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ended)
                if self._ended:
                    return
                number = next(iter(self._queue))
                request = self._queue.pop(number)
                self._busy = True
            self._answer(number, lambda: self._execute(*request))  # noqa: B023
            del request
            with self._changed:
                self._busy = False

    def _answer(self, number: int, submit: Callable[[], Any]) -> None:
        with self._exports.collecting() as tickets:
            try:
                answer = (True, dumps_by_value(submit()))
            except Exception as error:
                answer = (False, _pickle_error(error))
        with self._changed:
            self._tickets = self._exports.outstanding(self._tickets) + tickets
        self.wire.send((number, *answer))

    def _arguments(self, whole: bool, snapshot: _core.Snapshot) -> tuple[Any, dict[str, Any]]:
        if whole:  # sent on as it is
            return (snapshot,), {}
        args, kwargs = snapshot.decode()
        # What was a ref in the other process's argument stands for its value already.
        return tuple(map(Itself.of, args)), {k: Itself.of(v) for k, v in kwargs.items()}

    def _try(
        self,
        waiting: bool,
        snapshot: _core.Snapshot,
        whole: bool,
        failed: bool,
        _until: int,
        deadline: float | None,
        end: int,
    ) -> Any:
        if failed:
            return self._graph._results.failed(snapshot.decode(), self._graph)
        if waiting:
            raise CapacityError(f"{self._graph.name}: others of this handle wait for room")
        args, kwargs = self._arguments(whole, snapshot)
        return self._graph.try_execute(*args, **kwargs, **self._deadline(deadline, end))

    def _execute(
        self,
        snapshot: _core.Snapshot,
        whole: bool,
        failed: bool,
        until: int,
        deadline: float | None,
        end: int,
    ) -> Any:
        if failed:
            return self._graph._results.failed(snapshot.decode(), self._graph)
        args, kwargs = self._arguments(whole, snapshot)
        options = self._deadline(deadline, end)
        if until:
            options["timeout"] = max((until - _core.monotonic_ns()) / 1e9, 0.0)
        return self._graph.execute(*args, **kwargs, **options)

    def _deadline(self, deadline: float | None, end: int) -> dict[str, Any]:
        if deadline is None:
            return {}
        left = end - _core.monotonic_ns()
        return {"deadline": max(left, 1) / 1e9}  # what has passed on the way is no wrong argument


def _raise(error: Exception) -> None:
    raise error


def _pickle_error(error: Exception) -> bytes:
    error = error.with_traceback(None)
    try:
        return dumps_by_value(error)
    except ConveyorError:
        return dumps_by_value(RuntimeStateError(f"{type(error).__name__}: {error}"))
