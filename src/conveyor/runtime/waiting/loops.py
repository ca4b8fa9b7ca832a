"""Event loops that actors run on, and what becomes of them in a forked child.

A child that a coroutine forks shares the parent's epoll instance, and has the parent's callbacks before it.
It goes on with neither: what it awaits never comes, and it ends there.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from conveyor import _core, descriptors
from conveyor.runtime.waiting.awaits import activity
from conveyor.weak import WeakSet

_loops: WeakSet[ActorLoop] = WeakSet()


class ActorSelector(selectors.EpollSelector):
    """The selector of a loop that runs an actor's coroutines."""

    _selector_cls = staticmethod(descriptors.epoll)

    def __init__(self, name: str) -> None:
        """``name`` is the actor's."""
        super().__init__()
        self._name = name

    def be_its_own(self) -> None:
        """Detach from the parent, in a forked child, which ends where it would wait for more. Until then it
        leaves the parent's epoll instance alone: any change here would change it there."""

        def end(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            return _core.end_forked_child(f"a coroutine of {self._name}")

        # Here, and not in a method of the class, which every turn of the loop would call.
        self.select = end  # type: ignore[method-assign]
        # Without a descriptor left it keeps the parent's; it ends before it selects.
        with suppress(OSError):
            own = descriptors.epoll()
            try:
                os.dup2(own.fileno(), self.fileno(), inheritable=False)
            finally:
                own.close()


class ActorLoop(asyncio.SelectorEventLoop):
    """Event loop for an actor's coroutines. It knows which timers belong to which activity."""

    def __init__(self, selector: ActorSelector) -> None:
        super().__init__(selector)
        self._actor_selector = selector
        self._forking: asyncio.Task[Any] | None = None
        _loops.add(self)

    #: The clock of deadlines, which a test that replaces ``time.monotonic`` does not stop.
    time = staticmethod(_core.monotonic)

    def _make_self_pipe(self) -> None:
        super()._make_self_pipe()  # type: ignore[misc]  # of asyncio's base class since it exists
        self._remove_reader(self._ssock.fileno())  # type: ignore[attr-defined, has-type]
        self._ssock = descriptors.own_socket(self._ssock)  # type: ignore[has-type]
        self._csock = descriptors.own_socket(self._csock)  # type: ignore[has-type]
        self._add_reader(self._ssock.fileno(), self._read_from_self)  # type: ignore[attr-defined]

    def call_at(  # type: ignore[override]  # it takes and passes on anything
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = super().call_at(when, callback, *args, context=context)
        of = activity.get() if context is None else context.get(activity)
        if of is not None:
            of.add_timer(handle, self.time())
        return handle

    def before_fork(self) -> None:
        """Note which task forks this process."""
        self._forking = asyncio.current_task(self)

    def in_child(self) -> None:
        """Drop the parent's callbacks in a forked child. One of the callbacks that are due may have forked
        the process; the others are the parent's."""
        self._actor_selector.be_its_own()
        if self._thread_id == threading.get_ident():  # type: ignore[attr-defined]  # likewise
            # The child goes on inside of the task that has forked it. Python 3.14 has taken that away, and
            # would refuse to leave it.
            asyncio._set_running_loop(self)
            if self._forking is not None and asyncio.current_task(self) is None:
                asyncio.tasks._enter_task(self, self._forking)
        for handle in self._ready:  # type: ignore[attr-defined]  # of asyncio's base class since it exists
            handle.cancel()


def _before_fork() -> None:
    loop = asyncio._get_running_loop()
    if isinstance(loop, ActorLoop):
        loop.before_fork()


def _in_child() -> None:
    for loop in list(_loops):
        if not loop.is_closed():
            loop.in_child()


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
