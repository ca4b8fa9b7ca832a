"""The actor's process: one loop on the main thread that serves mailboxes and graph programs."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from conveyor import _core
from conveyor.channel import encode_error
from conveyor.exceptions import ActorStartError, GraphTornDownError
from conveyor.runtime import context
from conveyor.runtime.actor.producers import Producers
from conveyor.runtime.actor.program import make_program
from conveyor.runtime.actor.runtime import ActorRuntime
from conveyor.runtime.calls.constructor import START, Constructor
from conveyor.runtime.calls.generators import OpenGenerators, find_method
from conveyor.runtime.calls.links import link_limits, reply_offset
from conveyor.runtime.calls.returns import elements
from conveyor.runtime.graph.layout import RESULT_BIT, Assignment
from conveyor.runtime.process import ArenaSize, Process, close_all
from conveyor.runtime.protocol import MAX_FDS, TICKET_BYTES

EMPTY = _core.EMPTY

#: Calls served from one mailbox before others have a turn.
_TURN = 16


@dataclass(frozen=True, slots=True)
class Hello:
    """What an actor's process is told at birth; its descriptors come in the order of ``FDS``."""

    slot: int
    name: str
    number: int
    session: str
    arena: ArenaSize
    driver_slot: int
    mailbox_bit: int
    control_bit: int
    max_concurrency: int | None
    has_async: bool

    #: board, own arena, own eventfd, driver's arena, driver's eventfd, control socket, request
    #: socket, call segment, control segment
    FDS = 9


@dataclass(frozen=True, slots=True)
class Caller:
    """A link that somebody opens to this actor; its segment comes on the control socket."""

    slot: int
    bit: int


class Mailbox:
    """The actor's end of one caller's link."""

    def __init__(self, worker: Worker, segment: _core.Segment, caller_slot: int, bit: int) -> None:
        process = worker.process
        self.bit = bit
        self.reader = process.reader(segment, 0, 0, (caller_slot, RESULT_BIT), shared=False)
        self.replies = process.writer(
            segment, reply_offset(), [(caller_slot, RESULT_BIT)], "results of calls"
        )
        self.limits = link_limits(segment)
        # Coroutines of calls, and how many cancellations they have been looked through for.
        self.running: dict[int, Any] = {}
        self.cancellations = 0
        # Calls that run side by side may answer side by side.
        self.reply_lock = threading.Lock()


class Worker:
    """Everything one actor's process does."""

    def __init__(self, hello: Hello, fds: list[int]) -> None:
        board_fd, arena_fd, eventfd, driver_arena, driver_event, control, request, calls, ctl = fds
        self.hello = hello
        board = _core.Board.attach(board_fd)
        self.process = Process(board, hello.slot, eventfd, arena_fd, hello.arena)
        self.process.adopt(hello.driver_slot, driver_arena, driver_event)
        self._control_socket = socket.socket(fileno=control)
        self._programs: dict[int, tuple[_core.Program, Producers]] = {}
        self._loads: dict[int, tuple[int, Assignment, _core.Segment]] = {}
        self._handlers: dict[int, Callable[[], None]] = {}
        self._mailboxes: list[Mailbox] = []
        self._instance: Any = None
        self._generators = OpenGenerators()
        self._start_error: bytes | None = None
        self._started = False
        # Calls that have overtaken the constructor's, which came another way.
        self._early: list[tuple[Mailbox, int, Any]] = []
        self._stop = False
        self._loop: Any = None  # asyncio.AbstractEventLoop, where the actor has async methods
        self._slots: Any = None  # asyncio.Semaphore
        self._pool: Any = None  # concurrent.futures.ThreadPoolExecutor
        self._tasks: set[Any] = set()
        self._running = 0
        self._leaving = False  # the process ends; that cancels coroutines, which is no result
        self.runtime = ActorRuntime(self, socket.socket(fileno=request))
        calls_segment = _core.Segment.attach(calls)
        control_segment = _core.Segment.attach(ctl)
        self._control = Mailbox(self, control_segment, hello.driver_slot, hello.control_bit)
        self._handlers[hello.control_bit] = self._serve_control
        self._handlers[_core.ATTENTION_BIT] = self.runtime.tidy
        self._open(Mailbox(self, calls_segment, hello.driver_slot, hello.mailbox_bit))
        for fd in (board_fd, arena_fd, eventfd, driver_arena, driver_event, calls, ctl):
            os.close(fd)

    @property
    def exclusive(self) -> bool:
        """Whether one call at a time runs here, so that a call that waits blocks the actor."""
        return (
            self._loop is None
            and self._pool is None
            and threading.current_thread() is threading.main_thread()
        )

    # The loop

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
            if (self.hello.max_concurrency or 1) > 1:
                from concurrent.futures import ThreadPoolExecutor

                self._pool = ThreadPoolExecutor(self.hello.max_concurrency, "conveyor-call")
            wait = self.process.inbox.next
            handlers = self._handlers
            while not self._stop or not self._quiet():
                handler = handlers.get(wait())
                if handler is not None:
                    handler()
            if self._pool is not None:
                self._pool.shutdown()

    async def _run_async(self) -> None:
        import asyncio

        from conveyor.runtime.waiting.aio import wait_until

        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(self.hello.max_concurrency or 1000)
        inbox, handlers = self.process.inbox, self._handlers
        bits: list[int] = []

        def something() -> bool:
            bit = inbox.poll()
            if bit >= 0:
                bits.append(bit)
            return bool(bits)

        try:
            while not self._stop or not self._quiet():
                if not self._tasks:
                    inbox.idle()
                await wait_until(something)
                while bits:
                    handler = handlers.get(bits.pop())
                    if handler is not None:
                        handler()
                    something()
                # Tasks that these calls started get their turn before the next ones are taken.
                await asyncio.sleep(0)
        finally:
            self._leaving = True

    def _quiet(self) -> bool:
        """Nothing is queued and nothing runs: an orderly stop may end the process."""
        if self._running or not all(m.reader.empty for m in self._mailboxes):
            self.process.board.ring(self.process.slot, _core.ATTENTION_BIT)
            return False
        return True

    def _open(self, mailbox: Mailbox) -> None:
        self._mailboxes.append(mailbox)
        self._handlers[mailbox.bit] = lambda: self._serve(mailbox)
        # Frames may have come before the handler was there.
        self.process.board.ring(self.process.slot, mailbox.bit)

    # Calls

    def method(self, name: str) -> tuple[Callable[..., Any], bool]:
        """The instance's method ``name``, and whether it is a coroutine function."""
        if self._start_error is not None:
            meta = self._start_error

            def failed(*_args: Any, **_kwargs: Any) -> Any:
                from conveyor.channel import decode_error

                raise decode_error(meta)

            return failed, False
        return find_method(self._instance, self._generators, name)

    def _serve(self, mailbox: Mailbox) -> None:
        reader, limits = mailbox.reader, mailbox.limits
        if mailbox.running and limits.cancellations != mailbox.cancellations:
            self._cancel_running(mailbox)
        for _ in range(_TURN):
            try:
                call = reader.receive()
            except Exception as error:
                self._reply_error(mailbox, reader.tag, error, "call")
                continue
            if call is EMPTY:
                return
            tag = reader.tag
            if limits.cancelled(tag):
                self._reply_cancelled(mailbox, tag)
            elif call[0] == START and not self._started:
                self._start(mailbox, tag, *call[1], **(call[2] or {}))
            elif not self._started:
                self._early.append((mailbox, tag, call))
            else:
                self._call(mailbox, tag, *call)
        self.process.board.ring(self.process.slot, mailbox.bit)

    def _start(
        self, mailbox: Mailbox, tag: int, cls: type | Constructor, /, *args: Any, **kwargs: Any
    ) -> None:
        self._started = True
        self.process.inbox.running_call("__init__", tag)
        label = f"{self.hello.name}.__init__"
        try:
            if isinstance(cls, Constructor):
                cls, args, kwargs = cls.call(args)
            self._instance = cls(*args, **kwargs)
        except SystemExit:
            raise
        except BaseException as error:
            # Every later call, and every step of a graph, answers with this.
            self._start_error = encode_error(error, self.hello.name, label)
            mailbox.replies.send_error(self._start_error, tag)
        else:
            mailbox.replies.send(None, tag)
        self._finish_loads()
        early, self._early = self._early, []
        for waiting, number, call in early:
            self._call(waiting, number, *call)

    def _call(
        self,
        mailbox: Mailbox,
        tag: int,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        num_returns: int,
    ) -> None:
        if self._start_error is not None:
            mailbox.replies.send_error(self._start_error, tag)
            return
        try:
            method, is_async = find_method(self._instance, self._generators, name)
        except Exception as error:
            self._reply_error(mailbox, tag, error, name)
            return
        if self._loop is not None and is_async:
            self._running += 1
            task = self._loop.create_task(
                self._call_async(mailbox, tag, name, method, args, kwargs, num_returns)
            )
            mailbox.running[tag] = task
            task.add_done_callback(lambda task: self._call_ended(mailbox, tag, task))
        elif self._pool is not None:
            self._running += 1
            self._pool.submit(
                self._call_pooled, mailbox, tag, name, method, args, kwargs, num_returns
            )
        else:
            self.process.inbox.running_call(name, tag)
            self._call_now(mailbox, tag, name, method, args, kwargs, num_returns)

    def _cancel_running(self, mailbox: Mailbox) -> None:
        # Before the look: a cancellation that comes meanwhile is looked for next time.
        mailbox.cancellations = mailbox.limits.cancellations
        for tag in [tag for tag in mailbox.running if mailbox.limits.cancelled(tag)]:
            mailbox.running.pop(tag).cancel()

    def _forget_task(self, task: Any) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self.process.inbox.idle()

    def _call_ended(self, mailbox: Mailbox, tag: int, task: Any) -> None:
        mailbox.running.pop(tag, None)
        self._forget_task(task)
        # Before its first step, or it would have answered itself; or because the actor ends.
        if task.cancelled() and not self._leaving:
            self._running -= 1
            self._reply_cancelled(mailbox, tag)

    def _reply_cancelled(self, mailbox: Mailbox, tag: int) -> None:
        with mailbox.reply_lock:
            mailbox.replies.send_error(_core.CANCELLED, tag)

    def _call_now(
        self,
        mailbox: Mailbox,
        tag: int,
        name: str,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        num_returns: int,
    ) -> None:
        try:
            result = method(*args, **kwargs) if kwargs else method(*args)
        except SystemExit:
            raise
        except BaseException as error:
            self._reply_error(mailbox, tag, error, name)
        else:
            self._reply(mailbox, tag, name, result, num_returns)

    def _call_pooled(self, mailbox: Mailbox, tag: int, name: str, *rest: Any) -> None:
        try:
            if mailbox.limits.cancelled(tag):
                self._reply_cancelled(mailbox, tag)
                return
            self.process.inbox.running_call(name, tag)
            self._call_now(mailbox, tag, name, *rest)
        finally:
            self._running -= 1
            self.process.board.ring(self.process.slot, _core.ATTENTION_BIT)

    async def _call_async(
        self,
        mailbox: Mailbox,
        tag: int,
        name: str,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        num_returns: int,
    ) -> None:
        try:
            async with self._slots:
                self.process.inbox.running_call(name, tag)
                result = await method(*args, **(kwargs or {}))
        except SystemExit:
            self._leaving = True
            raise
        except BaseException as error:
            if self._leaving:
                raise
            self._reply_error(mailbox, tag, error, name)
        else:
            self._reply(mailbox, tag, name, result, num_returns)
        finally:
            self._running -= 1

    def start_coroutine(
        self,
        coroutine: Coroutine[Any, Any, Any],
        finish: Callable[[Any, BaseException | None], None],
        deadline: int,
    ) -> Any:
        """Run a graph step's coroutine; ``finish(value, error)`` is called on the loop.

        deadline: when it is cancelled, in nanoseconds of the monotonic clock; 0: never. Returns the
        task.
        """
        begun = False

        async def run() -> None:
            nonlocal begun
            begun = True
            try:
                try:
                    value = await coroutine
                except SystemExit:
                    raise
                except BaseException as error:
                    if self._leaving:
                        raise
                    finish(None, error)
                else:
                    finish(value, None)
            except SystemExit:  # also of a method that came after the coroutine
                self._leaving = True
                raise

        def ended(task: Any) -> None:
            self._forget_task(task)
            if timer is not None:
                timer.cancel()
            if not begun:  # cancelled before its first step
                coroutine.close()
                if not self._leaving:
                    finish(None, TimeoutError())

        task = self._loop.create_task(run())
        timer = None
        if deadline:
            left = (deadline - _core.monotonic_ns()) / 1e9
            timer = self._loop.call_later(left, task.cancel)
        self._tasks.add(task)
        task.add_done_callback(ended)
        return task

    def _reply(self, mailbox: Mailbox, tag: int, name: str, result: Any, num_returns: int) -> None:
        try:
            if num_returns > 1:
                result = elements(result, num_returns, f"{self.hello.name}.{name}")
            with mailbox.reply_lock:
                mailbox.replies.send(result, tag)
        except Exception as error:
            self._reply_error(mailbox, tag, error, name)

    def _reply_error(self, mailbox: Mailbox, tag: int, error: BaseException, name: str) -> None:
        label = f"{self.hello.name}.{name}"
        with mailbox.reply_lock:
            mailbox.replies.send_error(encode_error(error, self.hello.name, label), tag)

    # Control: the driver lays and takes down channels. Never queued behind calls.

    def _serve_control(self) -> None:
        reader, replies = self._control.reader, self._control.replies
        while True:
            call = reader.receive()
            if call is EMPTY:
                return
            tag = reader.tag
            operation, args = call[0], call[1]
            if operation == "load":
                self._load(tag, *args)
                continue
            try:
                getattr(self, f"_control_{operation}")(*args)
            except Exception as error:
                replies.send_error(encode_error(error, self.hello.name, operation), tag)
            else:
                replies.send(None, tag)

    def _receive_fds(self, count: int, ticket: int) -> list[int]:
        """The descriptors that were sent with ``ticket``, just before the frame that tells of it.
        Others are of a frame that never came: whoever should have sent it was interrupted."""
        fds: list[int] = []
        while len(fds) < count:
            data, more, _, _ = socket.recv_fds(self._control_socket, TICKET_BYTES, MAX_FDS)
            if not more:
                raise ConnectionError("the driver's control socket has ended")
            if int.from_bytes(data, "little") == ticket:
                fds.extend(more)
            else:
                close_all(more)
        return fds

    def _adopt(self, slots: tuple[int, ...], fds: list[int]) -> None:
        for i, slot in enumerate(slots):
            self.process.adopt(slot, fds[2 * i], fds[2 * i + 1])

    def _load(
        self, tag: int, assignment: Assignment, new_peers: tuple[int, ...], ticket: int
    ) -> None:
        fds = self._receive_fds(1 + 2 * len(new_peers), ticket)
        try:
            self._adopt(new_peers, fds[1:])
            segment = _core.Segment.attach(fds[0])
        finally:
            for fd in fds:
                os.close(fd)
        self._loads[assignment.graph] = (tag, assignment, segment)
        if self._started:
            self._finish_loads()

    def _finish_loads(self) -> None:
        # The methods are known once the actor has been started, and whoever made it may be slower to
        # start it than the driver is to lay a graph.
        while self._loads:
            graph = next(iter(self._loads))
            tag, assignment, segment = self._loads.pop(graph)
            try:
                program, producers = make_program(self, assignment, segment)
            except Exception as error:
                meta = encode_error(error, self.hello.name, "load")
                self._control.replies.send_error(meta, tag)
                continue
            self._programs[graph] = program, producers
            self._handlers[assignment.bit] = producers.handler(program)
            self.process.board.ring(self.process.slot, assignment.bit)
            self._control.replies.send(None, tag)

    def _control_unload(self, graph: int) -> None:
        never, *_ = self._loads.pop(graph, (None,))
        if never is not None:
            error = GraphTornDownError("the graph was torn down before the actor had been started")
            meta = encode_error(error, self.hello.name, "load")
            self._control.replies.send_error(meta, never)
        program, producers = self._programs.pop(graph, (None, None))
        if program is not None and producers is not None:
            program.close()
            producers.close()
            del self._handlers[program.bit]

    def _control_accept(
        self, caller: Caller, new_peers: tuple[int, ...], bit: int, ticket: int
    ) -> None:
        fds = self._receive_fds(1 + 2 * len(new_peers), ticket)
        try:
            self._adopt(new_peers, fds[1:])
            self._open(Mailbox(self, _core.Segment.attach(fds[0]), caller.slot, bit))
        finally:
            for fd in fds:
                os.close(fd)

    def _control_hang_up(self, bit: int) -> None:
        """A caller is dead. What it has asked for is done; then its mailbox is let go of."""
        mailbox = next(m for m in self._mailboxes if m.bit == bit)
        while not mailbox.reader.empty:
            self._serve(mailbox)
        self._mailboxes.remove(mailbox)
        del self._handlers[bit]
        if not self._started:
            # Most likely it was the one that should have sent the constructor's call.
            gone = ActorStartError(f"{self.hello.name} has not been started, and a caller has died")
            for waiting, tag, call in self._early:
                self._reply_error(waiting, tag, gone, call[0])
            self._early.clear()

    def _control_stop(self) -> None:
        self._stop = True


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
