"""Serving the handles that other processes have of a graph; see ``runtime.graph.handle``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.codec import Reader, SentDefinitions, claims, dumps_by_value
from conveyor.exceptions import CapacityError, ConveyorError, RuntimeStateError
from conveyor.runtime import threads
from conveyor.runtime.graph.compiled import CompiledGraph, parts_of
from conveyor.runtime.graph.entry import GateEntry
from conveyor.runtime.graph.handle import Question
from conveyor.runtime.refs.ref import Itself
from conveyor.runtime.refs.wire import Wire, received

if TYPE_CHECKING:
    import socket


class GraphService:
    """The owner's end of one handle's connection. Executions that wait for room wait on a thread of
    its own, in order; meanwhile others are refused to those who only try."""

    def __init__(self, graph: CompiledGraph, sock: socket.socket, reader: Reader) -> None:
        """``reader``: the process that asks."""
        self._reader = reader
        self._graph = graph
        entry = parts_of(graph).submitter.entry
        assert isinstance(entry, GateEntry)
        self._entry = entry
        self._changed = threading.Condition()
        # In the order of arrival: snapshots of the arguments, and options.
        self._queue: dict[int, tuple[_core.Snapshot, tuple[Any, ...]]] = {}
        self._busy = False
        self._ended = False
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
                withdrawn = self._queue.pop(number, None)
            if withdrawn is not None:
                _let_go(withdrawn[0])
            return
        if how == "who":
            with self._changed:
                waits = self._busy or number in self._queue
            blockers = self._entry.room_blockers() if waits else ()
            self.wire.send((number, None, (rest[0], blockers)))
            return
        if how == "ask":
            question, args = rest
            # It may look for a stack, which takes its time. The thread ends with the answer.
            threads.start_or_run(self._tell, "graph-answer", number, question, args)
            return
        *options, parts = rest
        try:
            snapshot = received(parts, fds)
        except Exception as error:  # it cannot be mapped
            unread = error
            self._answer(number, None, lambda: _raise(unread))
            return
        if how == "try":
            with self._changed:
                waiting = self._busy or bool(self._queue)
            self._answer(number, snapshot, lambda: self._try(waiting, snapshot, *options))
            return
        with self._changed:
            self._queue[number] = snapshot, tuple(options)
            self._changed.notify()

    def _on_end(self) -> None:
        with self._changed:
            self._ended = True
            left = [snapshot for snapshot, _ in self._queue.values()]
            self._queue.clear()
            self._changed.notify()
        for snapshot in left:
            _let_go(snapshot)
        self._worker.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ended)
                if self._ended:
                    return
                number = next(iter(self._queue))
                snapshot, options = self._queue.pop(number)
                self._busy = True
            self._answer(number, snapshot, lambda: self._execute(snapshot, *options))  # noqa: B023
            del snapshot
            with self._changed:
                self._busy = False

    def _tell(self, number: int, question: Question, args: tuple[Any, ...]) -> None:
        graph = self._graph
        answers: dict[Question, Callable[..., Any]] = {
            "explain": graph.explain,
            "status": graph.status,
            "stats": graph.stats,
            "is_teardown": lambda: graph.is_teardown,
        }
        self._answer(number, None, lambda: answers[question](*args))

    def _answer(
        self, number: int, snapshot: _core.Snapshot | None, submit: Callable[[], Any]
    ) -> None:
        try:
            answer = (True, self._pickle(submit()))
        except Exception as error:
            answer = (False, self._pickle_error(error))
        if snapshot is not None:
            _let_go(snapshot)  # it may not have come to looking at it
        self.wire.send((number, *answer))

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
            return self._entry.refs_of(snapshot.decode())
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
            return self._entry.refs_of(snapshot.decode())
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


def _let_go(snapshot: _core.Snapshot) -> None:
    """Nobody decodes it from now on. What of its refs has been loaded stays."""
    if snapshot.has_refs:
        claims.give_up(snapshot.meta)


def _raise(error: Exception) -> None:
    raise error
