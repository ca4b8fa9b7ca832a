"""The actor's process: one loop on the main thread that serves mailboxes and graph programs."""

from __future__ import annotations

import functools
import gc
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from conveyor import _core, system_limits
from conveyor.calls.constructor import EXIT_HOOK
from conveyor.checks import in_seconds
from conveyor.codec import faults
from conveyor.codec.pickling import definitions, unpickler
from conveyor.later import LaterModule
from conveyor.runtime import context, threads
from conveyor.runtime.messages import after_version
from conveyor.runtime.process import Process
from conveyor.runtime.uninterrupted import try_each
from conveyor.runtime.wait_graph import LOOP, ONE, STARTING, THREADS
from conveyor.worker.actor_runtime import ActorRuntime
from conveyor.worker.calls import Calls
from conveyor.worker.control import Control
from conveyor.worker.forked import flush_files
from conveyor.worker.instance import WorkerState
from conveyor.worker.messages import WorkerBootstrap

if TYPE_CHECKING:
    import asyncio

    from conveyor.worker.instance import Instance

# It brings asyncio, which is slow to import.
aio: Any = LaterModule("conveyor.runtime.aio")


def limit_grace(name: str, seconds: float) -> None:
    """Kill this process, which has begun to end of its own accord, if that takes longer than ``seconds``.

    If the driver has asked for the end, it sees to that itself.
    """
    if seconds > 0:
        threads.start(_kill, "grace", name, seconds, threading.main_thread().ident)


def _kill(name: str, seconds: float, main_thread: int) -> None:
    time.sleep(seconds)
    frame = sys._current_frames().get(main_thread)
    where = "" if frame is None else f"; it is in\n{traceback.format_stack(frame)[-1]}"
    message = f"{name} has not ended within the grace period of {in_seconds(seconds)} and is killed{where}\n"
    # Past Python's buffers, whose locks a thread that hangs may hold.
    os.write(2, message.encode("utf-8", "backslashreplace"))
    os.kill(os.getpid(), signal.SIGKILL)


class Worker:
    """The process of one actor, with all its parts."""

    def __init__(
        self, bootstrap: WorkerBootstrap, fds: list[int], instance: Instance | None = None
    ) -> None:
        """``instance``: the object of an attached actor, which is not to be made."""
        *others, control, request, calls, ctl = fds
        # The process of an attached actor goes on if this fails.
        with ExitStack() as failed, ExitStack() as handed:
            for fd in (*others, calls, ctl):
                handed.callback(os.close, fd)
            sockets = [failed.enter_context(socket.socket(fileno=fd)) for fd in (control, request)]
            failed.callback(self._close_process)
            self._set_up(bootstrap, [*others, calls, ctl], sockets, instance)
            failed.pop_all()  # the sockets belong to their users now

    def _close_process(self) -> None:
        if hasattr(self, "process"):
            self.process.close()

    def _set_up(
        self,
        bootstrap: WorkerBootstrap,
        fds: list[int],
        sockets: list[socket.socket],
        instance: Instance | None,
    ) -> None:
        process_table_fd, arena_fd, eventfd, driver_arena, driver_event, calls, ctl = fds
        orders, asks = sockets
        self.bootstrap = bootstrap
        process_table = _core.ProcessTable.attach(process_table_fd)
        if process_table.gone(bootstrap.slot, bootstrap.incarnation):
            raise SystemExit  # it was given up before it was there, and the place may be another's
        self.process = Process(process_table, bootstrap.slot, eventfd, arena_fd, bootstrap.arena)
        _core.check_writes(os.environ.get("CONVEYOR_DEBUG_WRITES") == "1")
        driver = bootstrap.driver_slot, process_table.incarnation(bootstrap.driver_slot)
        arena_of_driver = self.process.adopt(*driver, driver_arena, driver_event)
        self.worker_state = WorkerState(bootstrap, self.process, instance)
        self.handlers = self.worker_state.handlers
        self.instance = self.worker_state.instance
        self._stopping = False
        self._ending = False
        #: The ``SystemExit`` of a method on a thread, with the method's name and its call.
        self._left: tuple[SystemExit, str, int] | None = None
        self.runtime = ActorRuntime(self.worker_state, asks)
        self.calls = Calls(self.process, self.instance, self._started, self.stop, self.leave)
        self.control = Control(
            self.worker_state,
            self.calls,
            _core.Segment.attach(ctl),
            arena_of_driver,
            orders,
            self.runtime.refuse,
            partial(self.runtime.exports.drain, cleanup=self.runtime.cleanup),
            self.end,
        )
        self.calls.serve_orders = self.control.serve_first
        if not bootstrap.has_async and (bootstrap.max_concurrency or 1) == 1:
            self.calls.one_by_one = True
            # Only here: where methods run side by side, the failure of one says nothing of the others.
            self.process.on_failure = self.runtime.collectives.step_failed
            self.calls.on_failure = self.runtime.collectives.call_failed
            self.runtime.collectives.until = self._until
        self.process.wait_registry.open(STARTING, 1, self._doing)
        self.handlers[bootstrap.control_bit] = self.control.serve
        self.handlers[_core.ATTENTION_BIT] = self._look
        self.handlers[bootstrap.mailbox_bit] = self.calls.open(
            _core.Segment.attach(calls), driver, arena_of_driver, bootstrap.mailbox_bit
        )

    def _started(self) -> None:
        """Open the lanes of calls, and make the loaded programs: the constructor has run."""
        threads = self.bootstrap.max_concurrency or 1
        if self.bootstrap.has_async:
            self.process.wait_registry.open(LOOP, 1, self._doing)
        elif threads > 1:
            self.process.wait_registry.open(
                THREADS, threads, self._doing, lambda: Meanwhile.begin(self)
            )
        else:
            self.process.wait_registry.open(ONE, 1, self._doing)
        self.control.finish_loads()

    def _look(self) -> None:
        """Look at everything that has no doorbell bit of its own."""
        self.runtime.tidy()
        self.calls.look_again()
        self.control.look_again()

    def _doing(self) -> str:
        """Return the name of the task or method that the main thread runs."""
        _, graph, node, _, _, _, what = self.process.process_table.status(self.process.slot)
        label = self.control.label(graph, node) if graph else None
        return label or f"{self.bootstrap.name}.{what}"

    def _until(self) -> int:
        """Return when the main thread's task or call is over at the latest; see ``instance.until``."""
        _, graph, _, execution, _, _, _ = self.process.process_table.status(self.process.slot)
        return self.control.until(graph, execution) if graph else self.calls.until()

    def stop(self) -> None:
        """End in good order: queued calls are done first."""
        self._stopping = True

    def end(self) -> None:
        """End in good order, now: the running call is finished, queued ones are not begun. The driver sees to
        it that this does not take too long."""
        self._ending = True
        self.calls.end()

    def leave(self, error: SystemExit, name: str, call: int) -> None:
        """End the process: a method on a thread has left by ``sys.exit``, which the main thread has to carry
        out."""
        if self._left is None:
            self._left = error, name, call
        self.end()

    @property
    def _over(self) -> bool:
        return self._ending or (self._stopping and self.calls.quiet())

    def run(self) -> None:
        """Serve until told to stop, then end as a program does: nothing of the user's is left here."""
        process_table, slot = self.process.process_table, self.process.slot
        process_table.guard_signals(slot)
        process_table.live(slot)
        _sleep_in_the_futex(self.process.inbox)
        try:
            if self.bootstrap.has_async:
                self._run_with_loop()
            else:
                self._run()
        finally:
            self.handlers.clear()

    def _begin_end(self) -> None:
        """Begin the end of the actor. Not called in a forked child, which leaves by ``sys.exit``."""
        process = self.process
        process.loop_over = True  # who waits for a call of the actor itself looks again
        process.notify()
        if not self._ending or self._left is not None:
            limit_grace(self.bootstrap.name, self.bootstrap.grace)

    def _end_instance(self, run: Callable[[Coroutine[Any, Any, Any]], object]) -> None:
        try_each(self.calls.close, self.control.close)
        regular = sys.exc_info()[0] is None  # else the page says what has ended the actor
        if regular:
            self.process.inbox.running_call(EXIT_HOOK, 0)
        # The collection frees reference cycles, and runs the finalizers of what these hold.
        try_each(lambda: self.instance.end(run))
        if self.process.inbox.inherited:
            _core.end_forked_child(f"{self.bootstrap.name}.{EXIT_HOOK}")
        try_each(flush_files, gc.collect)
        if regular:
            self.process.inbox.idle()

    def _run(self) -> None:
        if (self.bootstrap.max_concurrency or 1) > 1:
            from concurrent.futures import ThreadPoolExecutor

            self.calls.pool = ThreadPoolExecutor(self.bootstrap.max_concurrency, "conveyor-call")
        try:
            self._serve()
        finally:
            if not self.process.inbox.inherited:
                self._begin_end()
                if self.calls.pool is not None:
                    self.calls.pool.shutdown(cancel_futures=True)
                self._end_instance(_run_alone)

    def _serve(self) -> None:
        wait, handlers = self.process.inbox.next, self.handlers
        while not self._over:
            handler = handlers.get(wait())
            if handler is not None:
                handler()
        if self._left is not None:
            error, name, call = self._left
            self.process.inbox.running_call(name, call)  # what the error says that it was running
            raise error

    def _run_with_loop(self) -> None:
        import asyncio

        loop = aio.ActorLoop(aio.ActorSelector(self.bootstrap.name))
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._serve_on_loop())
        finally:
            if not self.process.inbox.inherited:
                try:
                    self._begin_end()
                    self._end_with_loop(loop)
                finally:
                    asyncio.set_event_loop(None)
                    loop.close()

    def _end_with_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.worker_state.coroutines is not None:
            self.worker_state.coroutines.exiting = True
        # One that raises KeyboardInterrupt stops the loop: the others need another turn.
        while try_each(lambda: loop.run_until_complete(aio.cancel_all_tasks())) is not None:
            pass
        try_each(lambda: loop.run_until_complete(loop.shutdown_asyncgens()))
        self._end_instance(loop.run_until_complete)
        try_each(lambda: loop.run_until_complete(loop.shutdown_default_executor()))

    async def _serve_on_loop(self) -> None:
        import asyncio

        from conveyor.worker.coroutines import Coroutines

        inbox, handlers = self.process.inbox, self.handlers
        coroutines = Coroutines(inbox, self.process.wait_registry, self.bootstrap.max_concurrency)
        self.worker_state.coroutines = self.calls.coroutines = coroutines
        bits: list[int] = []

        def something() -> bool:
            bit = inbox.poll()
            if bit >= 0:
                bits.append(bit)
            return bool(bits)

        while not self._over:
            coroutines.note_idle()
            await aio.wait_until(something)
            if coroutines.exiting:
                return  # a coroutine has ended the process: the loop runs only for its end
            while bits:
                handler = handlers.get(bits.pop())
                if handler is not None:
                    handler()
                something()
            # Tasks that these calls started get their turn before the next ones are taken.
            await asyncio.sleep(0)


def _run_alone(coroutine: Coroutine[Any, Any, Any]) -> None:
    import asyncio

    asyncio.run(coroutine)


class Meanwhile:
    """Service of the main thread while a graph step waits there, in an actor with threads for its calls. It
    hands calls to the threads; everything else has to wait for the step's end."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._left: set[int] = set()

    @classmethod
    def begin(cls, worker: Worker) -> tuple[Callable[[], None], Callable[[], None]]:
        """Begin the service beside one wait; return the functions that serve and that end it."""
        service = cls(worker)
        return service.poll, service.end

    def poll(self) -> None:
        worker, inbox = self._worker, self._worker.process.inbox
        before, worker.control.only_accept = worker.control.only_accept, True
        try:
            while (bit := inbox.poll()) >= 0:
                if worker.calls.takes(bit):
                    worker.handlers[bit]()
                elif bit == worker.bootstrap.control_bit:
                    worker.handlers[bit]()
                    self._left.add(bit)
                elif bit in worker.handlers:
                    self._left.add(bit)
        finally:
            worker.control.only_accept = before

    def end(self) -> None:
        process = self._worker.process
        for bit in self._left:
            process.process_table.notify(process.slot, bit)


def _sleep_in_the_futex(inbox: _core.Inbox) -> None:
    """Let the main thread sleep in the futex, which wakes faster than poll does, until somebody installs a
    signal handler in Python: only poll can be relied upon to wake up for handlers."""
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
    """Run an actor's process. The engine calls this on the process's main thread."""
    bootstrap: WorkerBootstrap = pickle.loads(after_version(payload))
    system_limits.name_process(f"actor {bootstrap.name}")
    _core.end_without_descriptors()
    worker = Worker(bootstrap, fds)
    context.install(worker.runtime)
    definitions.name_in(sys.modules["__main__"])
    unpickler.show_imports()
    faults.nobody_presses_ctrl_c()
    try:
        worker.run()
    except SystemExit:
        # Raised by user code: an orderly end, unlike os._exit with the same code.
        if not worker.process.inbox.inherited:
            worker.process.process_table.mark_exiting(worker.process.slot)
        raise
