"""The actor's process: one loop on the main thread that serves mailboxes and graph programs."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from conveyor import _core
from conveyor.runtime import context
from conveyor.runtime.actor.calls import Calls
from conveyor.runtime.actor.control import Control
from conveyor.runtime.actor.hello import Hello
from conveyor.runtime.actor.instance import Instance
from conveyor.runtime.actor.runtime import ActorRuntime
from conveyor.runtime.process import Process

if TYPE_CHECKING:
    from conveyor.runtime.actor.coroutines import Coroutines


class Worker:
    """Everything one actor's process does."""

    def __init__(self, hello: Hello, fds: list[int]) -> None:
        board_fd, arena_fd, eventfd, driver_arena, driver_event, control, request, calls, ctl = fds
        self.hello = hello
        board = _core.Board.attach(board_fd)
        self.process = Process(board, hello.slot, eventfd, arena_fd, hello.arena)
        self.process.adopt(hello.driver_slot, driver_arena, driver_event)
        #: What is called when a bit of the bell is rung.
        self.handlers: dict[int, Callable[[], None]] = {}
        self.instance = Instance(hello.name)
        #: Where coroutines run, if the actor has async methods.
        self.coroutines: Coroutines | None = None
        self._stopping = False
        self.runtime = ActorRuntime(self, socket.socket(fileno=request))
        self._control = Control(self, _core.Segment.attach(ctl), socket.socket(fileno=control))
        self.calls = Calls(self.process, self.instance, self._control.finish_loads)
        self.handlers[hello.control_bit] = self._control.serve
        self.handlers[_core.ATTENTION_BIT] = self.runtime.tidy
        self.handlers[hello.mailbox_bit] = self.calls.open(
            _core.Segment.attach(calls), hello.driver_slot, hello.mailbox_bit
        )
        for fd in (board_fd, arena_fd, eventfd, driver_arena, driver_event, calls, ctl):
            os.close(fd)

    @property
    def exclusive(self) -> bool:
        """Whether one call at a time runs here, so that a call that waits blocks the actor."""
        return (
            self.coroutines is None
            and self.calls.pool is None
            and threading.current_thread() is threading.main_thread()
        )

    def stop(self) -> None:
        """End in good order: what is queued is done first."""
        self._stopping = True

    def run(self) -> None:
        """Serve until told to stop."""
        board, slot = self.process.board, self.process.slot
        board.guard_signals(slot)
        board.live(slot)
        _sleep_in_the_futex(self.process.inbox)
        if self.hello.has_async:
            import asyncio

            asyncio.run(self._run_async())
        else:
            self._run()

    def _run(self) -> None:
        if (self.hello.max_concurrency or 1) > 1:
            from concurrent.futures import ThreadPoolExecutor

            self.calls.pool = ThreadPoolExecutor(self.hello.max_concurrency, "conveyor-call")
        wait, handlers = self.process.inbox.next, self.handlers
        while not self._stopping or not self.calls.quiet():
            handler = handlers.get(wait())
            if handler is not None:
                handler()
        if self.calls.pool is not None:
            self.calls.pool.shutdown()

    async def _run_async(self) -> None:
        import asyncio

        from conveyor.runtime.actor.coroutines import Coroutines
        from conveyor.runtime.waiting.aio import wait_until

        inbox, handlers = self.process.inbox, self.handlers
        coroutines = Coroutines(inbox, self.hello.max_concurrency)
        self.coroutines = self.calls.coroutines = coroutines
        bits: list[int] = []

        def something() -> bool:
            bit = inbox.poll()
            if bit >= 0:
                bits.append(bit)
            return bool(bits)

        try:
            while not self._stopping or not self.calls.quiet():
                coroutines.note_idle()
                await wait_until(something)
                while bits:
                    handler = handlers.get(bits.pop())
                    if handler is not None:
                        handler()
                    something()
                # Tasks that these calls started get their turn before the next ones are taken.
                await asyncio.sleep(0)
        finally:
            coroutines.leaving = True


def _sleep_in_the_futex(inbox: _core.Inbox) -> None:
    """Let the main thread sleep in the futex, which wakes faster than poll does, until somebody
    installs a signal handler in Python: only poll can be relied upon to wake up for those."""
    main_thread = inbox.main_thread
    install = signal.signal

    @functools.wraps(install)
    def signal_signal(signalnum: Any, handler: Any) -> Any:
        if callable(handler):
            inbox.main_thread = main_thread
        return install(signalnum, handler)

    inbox.main_thread = 0
    signal.signal = signal_signal


def main(payload: bytes, fds: list[int]) -> None:
    """The entry of an actor's process, called on its main thread by the engine."""
    worker = Worker(pickle.loads(payload), fds)
    context.install(worker.runtime)
    try:
        worker.run()
    except SystemExit:
        # Raised by user code: an orderly end, unlike os._exit with the same code.
        worker.process.board.leave(worker.process.slot)
        raise
