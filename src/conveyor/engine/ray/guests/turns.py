"""Methods that Ray calls and methods that the session calls take turns in one actor.

Ray runs the calls of a plain actor one after the other, on its process's main thread. A guest's loop
(``guest.py``) is another thread. So that methods still run one at a time, both take a lock: the loop before
each of its own, and Ray's calls because the functions that Ray runs for them are changed as long as the
session lasts. That is in Ray's own parts: where they look otherwise than expected nothing is changed, and the
session says so.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from conveyor import _core

_RUNNING = 1


class Turn:
    """The turns of one actor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The method that Ray runs, for whoever asks what the loop waits for.
        self._rays = ""
        self._changed: list[tuple[types.CellType, Any]] = []

    # The session's methods

    def taking(
        self, method: Callable[..., Any], board: _core.Board, inbox: _core.Inbox
    ) -> Callable[..., Any]:
        """``method`` of the session's, which waits for its turn. A generator waits for each item."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._ours(board, inbox):
                result = method(*args, **kwargs)
            return self._items(result, board, inbox) if inspect.isgenerator(result) else result

        return run

    def _items(
        self, items: Generator[Any, Any, Any], board: _core.Board, inbox: _core.Inbox
    ) -> Iterator[Any]:
        try:
            while True:
                with self._ours(board, inbox):
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                yield item
        finally:
            with self._ours(board, inbox):
                items.close()

    @contextmanager
    def _ours(self, board: _core.Board, inbox: _core.Inbox) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            state, graph, node, execution, _, _, what = board.status(inbox.slot)
            inbox.running_call(f"{self._rays} for Ray, and then goes on", execution)
            self._lock.acquire()
            if state == _RUNNING and graph:
                inbox.running(graph, node, execution)
            elif state == _RUNNING:
                inbox.running_call(what, execution)
        try:
            yield
        finally:
            self._lock.release()

    # Ray's

    def begin(self) -> bool:
        """From now on Ray's calls take it, too. False: that cannot be had."""
        try:
            found = list(calls_of_ray())
        except Exception:  # another Ray than this was written for
            return False
        for cell, name, method in found:
            self._changed.append((cell, method))
            cell.cell_contents = self._guarded(name, method)
        return True

    def end(self) -> None:
        """Ray's calls are as they were. One that runs is not disturbed."""
        while self._changed:
            cell, method = self._changed.pop()
            cell.cell_contents = method

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(method):

            @functools.wraps(method)
            def items(*args: Any, **kwargs: Any) -> Iterator[Any]:
                with self._theirs(name):
                    yield from method(*args, **kwargs)

            return items

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._theirs(name):
                return method(*args, **kwargs)

        return run

    @contextmanager
    def _theirs(self, name: str) -> Iterator[None]:
        # On other threads Ray runs calls side by side, because the actor has asked for that.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with self._lock:
            self._rays = name
            yield


def calls_of_ray() -> Iterator[tuple[types.CellType, str, Callable[..., Any]]]:
    """For each method of the process's actor that Ray can call: where the function that Ray runs for it has
    the method, its name, and the method itself."""
    import ray

    manager = ray._private.worker.global_worker.function_actor_manager
    for info in list(manager._function_execution_info.values()):
        function = info.function
        name = getattr(function, "name", "__")
        if name.startswith("__"):  # Ray's own calls, and the constructor
            continue
        cell = function.__closure__[function.__code__.co_freevars.index("method")]
        method = cell.cell_contents
        if isinstance(method, types.FunctionType):  # a class's method needs no turn
            yield cell, name, method
