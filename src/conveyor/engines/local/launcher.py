"""The driver's side of the fork server: starts it, asks it for actors, hears how they end."""

from __future__ import annotations

import itertools
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec import Struct

from conveyor import _core, descriptors
from conveyor.engines.local import server
from conveyor.engines.local.server import with_huge_heap
from conveyor.engines.local.spec import ChildSpec, SpawnRequest, why
from conveyor.exceptions import ActorStartError, RuntimeStateError
from conveyor.flag import Flag
from conveyor.runtime import threads
from conveyor.runtime.events import EventLoop, guarded
from conveyor.runtime.status import is_stopped
from conveyor.runtime.uninterrupted import uninterrupted
from conveyor.runtime.waiting import TimeLimit

# On one line, and short: until the server sets its title this is what `ps` shows.
_BOOTSTRAP = (
    "import sys, marshal; f = open(0, 'rb', closefd=False); f.seek(0); setup = marshal.load(f); "
    "sys.path[:] = setup['path']; from conveyor.engines.local.server import main; main(setup)"
)


# A process group of its own: Ctrl-C in the terminal is the driver's affair. Not a session of its own:
# the kernel's autogroup scheduling would give the driver as much of a core as all actors together.
_OWN_GROUP: dict[str, Any] = (
    {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
)


class ForkServer(Struct, frozen=True):
    """Fork server, with the driver's ends of its connections. ``log``: what the server prints itself."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    log: int
    pidfd: int

    def kill(self) -> None:
        """Kill the server, and close the driver's ends."""
        self.process.kill()
        self.process.wait()
        self.control.close()
        os.close(self.log)
        os.close(self.pidfd)


def execute(preload: Sequence[str], wanted: Sequence[str]) -> ForkServer:
    """Start a fork server that will import ``preload`` and ``wanted``. Does not wait until it has."""
    control, theirs = descriptors.socket_pair()
    opened: list[int] = []
    passed = [theirs.detach()]
    process: subprocess.Popen[bytes] | None = None
    try:
        # A pidfd of ourselves, opened by ourselves: there is no moment at which it could mean
        # another process, and it stands for the process, not for the thread that runs this.
        passed.append(descriptors.own(os.pidfd_open(os.getpid())))
        passed.append(descriptors.memory_file("conveyor-setup"))
        log, log_writer = map(descriptors.own, os.pipe())
        opened.append(log)
        passed.append(log_writer)
        os.set_blocking(log, False)
        import_path: list[object] = list(sys.path)
        setup = {
            "path": [str(entry) for entry in import_path if isinstance(entry, str)],
            "control": passed[0],
            "driver": passed[1],
            "preload": list(preload),
            "wanted": list(wanted),
        }
        with open(passed[2], "wb", closefd=False) as file:
            marshal.dump(setup, file)
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", _BOOTSTRAP],
            stdin=passed[2],
            stdout=log_writer,
            stderr=log_writer,
            pass_fds=passed[:2],
            env=with_huge_heap(os.environ),
            **_OWN_GROUP,
        )
        return ForkServer(process, control, log, descriptors.own(os.pidfd_open(process.pid)))
    except BaseException:
        if process is not None:
            process.kill()
            process.wait()
        control.close()
        for fd in opened:
            os.close(fd)
        raise
    finally:
        for fd in passed:
            os.close(fd)


READ_BYTES = 64 << 10
PIPE_BYTES = 1 << 20  # the most a pipe holds by default


class Output:
    """Output of actors' processes. ``on_output(pid, stream, data)`` gets bytes as they come and ``b""`` at
    the end of each stream (``"stdout"``, ``"stderr"``). If it blocks, the output of all processes is held
    up."""

    def __init__(self, on_output: Callable[[int, str, bytes], None]) -> None:
        self._on_output = on_output
        self._loop = EventLoop("output")

    def on_thread(self) -> bool:
        """Whether the caller is called by this."""
        return self._loop.on_thread()

    def watch(self, pid: int, pipes: dict[int, str]) -> None:
        """Pass on what comes over ``pipes``, each with the name of its stream. A pipe that has ended is taken
        out of ``pipes``."""
        for fd, stream in list(pipes.items()):
            self._loop.add(fd, partial(self._read, pid, pipes, fd, stream))

    def say(self, pid: int, data: bytes) -> None:
        """Pass on what a process has written to stderr."""
        self._loop.call(partial(self._on_output, pid, "stderr", data))

    def finish(self, pid: int, pipes: dict[int, str], then: Callable[[], object]) -> None:
        """Pass on what a dead process's pipes still hold, close them, and call ``then()``."""
        finish = partial(self._finish, pid, pipes, then)
        try:
            self._loop.call(finish)
        except (
            OSError
        ):  # there is no such thread, since none could be started: nobody has read them
            finish()

    def close(self, timeout: float) -> None:
        """Pass on what has come, and end. See :meth:`EventLoop.close`."""
        self._loop.close(timeout)

    def _read(self, pid: int, pipes: dict[int, str], fd: int, stream: str) -> None:
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._end(pid, pipes, fd)
            return
        self._on_output(pid, stream, data)

    def _end(self, pid: int, pipes: dict[int, str], fd: int) -> None:
        stream = pipes.pop(fd)
        self._loop.remove(fd)
        os.close(fd)
        guarded(partial(self._on_output, pid, stream, b""))

    def _finish(self, pid: int, pipes: dict[int, str], then: Callable[[], object]) -> None:
        # Not until their end: a process that left the actor's group may hold them open and write on.
        # What it writes from here on is lost.
        for fd, stream in list(pipes.items()):
            for _ in range(PIPE_BYTES // READ_BYTES):
                try:
                    data = os.read(fd, READ_BYTES)
                except BlockingIOError:
                    break
                if not data:
                    break
                guarded(partial(self._on_output, pid, stream, data))
            self._end(pid, pipes, fd)
        then()


class _Child(Struct, eq=False):
    pid: int
    pidfd: int
    #: The pipes of the process, each with the name of its stream.
    outputs: dict[int, str]


class Children:
    """Processes that the launcher has had forked. They share the launcher's lock. Their ends are told on the
    thread of ``events``."""

    def __init__(
        self,
        lock: threading.RLock,
        events: EventLoop,
        output: Output,
        on_exit: Callable[[int, int], None],
    ) -> None:
        self._lock = lock
        self._events = events
        self._output = output
        self._on_exit = on_exit
        self._living: dict[int, _Child] = {}
        #: Dead processes that went on without their main thread, and were killed for that.
        self.went_on: set[int] = set()
        self._unreported = 0  # those whose on_exit is still to be called
        self._orphaned = False
        #: Set once the fork server and all of them are gone.
        self.all_gone = Flag()
        #: Set once all of their ends are reported as well.
        self.all_reported = Flag()

    def __bool__(self) -> bool:
        """Whether any of them lives."""
        return bool(self._living)

    def add(self, pid: int, pidfd: int, outputs: dict[int, str]) -> None:
        """Add a process that has been started. Call with the lock."""
        self._living[pid] = _Child(pid, pidfd, outputs)
        self._unreported += 1

    def send_signal(self, pid: int, sig: int) -> None:
        """Send ``sig`` to ``pid``, unless it has ended."""
        with self._lock, suppress(KeyError, ProcessLookupError):
            signal.pidfd_send_signal(self._living[pid].pidfd, sig)

    def ended(self, pid: int, status: int, went_on: bool = False) -> None:
        """Handle the end of a child that is gone and reaped."""
        with self._lock:
            child = self._living.pop(pid, None)
            if child is None:
                return
            if went_on:
                self.went_on.add(pid)
            self._events.remove(child.pidfd)
            os.close(child.pidfd)
        # The end is reported after all output of the process.
        report = partial(self._events.call, partial(self._report, pid, status))
        self._output.finish(pid, child.outputs, report)

    def orphaned(self) -> None:
        """Kill the processes that are left, since the fork server is gone: the kernel has told them to die
        with it. All is over only when they have died. Their real status is lost with their parent; SIGKILL is
        what the kernel did to them."""
        with self._lock:
            self._orphaned = True
            orphans = list(self._living.values())
        for child in orphans:
            self.send_signal(child.pid, signal.SIGKILL)
            killed = int(signal.SIGKILL)
            self._events.add(child.pidfd, partial(self.ended, child.pid, killed))
        self._note_end()

    def _report(self, pid: int, status: int) -> None:
        guarded(partial(self._on_exit, pid, status))
        with self._lock:
            self._unreported -= 1
        self._note_end()

    def _note_end(self) -> None:
        with self._lock:
            if self._orphaned and not self._living:
                self.all_gone.set()
                if not self._unreported:
                    self.all_reported.set()


class SendWait:
    """Wait of one message until it can be sent, limited in time. Its owner may end the wait at any moment,
    from any thread."""

    def __init__(self, seconds: float) -> None:
        self._end = _core.monotonic() + seconds
        self._given_up = False
        self.go_on = Flag()

    def give_up(self) -> None:
        """Wait no longer."""
        self._given_up = True
        self.go_on.set()

    @property
    def over(self) -> bool:
        """Whether the message waits no longer."""
        return self._given_up or _core.monotonic() >= self._end

    def wait(self) -> None:
        """Wait until ``go_on`` is set, or the wait is over."""
        if not self.over:
            self.go_on.wait(self._end - _core.monotonic())


class SendWaiters:
    """Senders that wait for space in a socket, and the watch that wakes them. ``lock``: the launcher's."""

    def __init__(self, events: EventLoop, lock: threading.RLock, control: socket.socket) -> None:
        self._events = events
        self._lock = lock
        self._waiting: list[Flag] = []
        # The loop has the socket already, for what comes, and no descriptor twice. This can be read
        # when there is room. It is made now: who waits may find no descriptor left.
        self._watch = descriptors.epoll()
        self._watch.register(control, select.EPOLLOUT)

    def tell(self, waiter: Flag) -> None:
        """Set ``waiter``, which is cleared now, once there may be room or never will be. With the lock."""
        waiter.clear()
        if not self._waiting:
            self._events.add(self._watch.fileno(), self.wake)
        self._waiting.append(waiter)

    def wake(self) -> None:
        """Wake all waiters; on the loop's thread, or with the lock before this is closed."""
        with self._lock:
            self._events.remove(self._watch.fileno())
            waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.set()

    def close(self) -> None:
        """Wake all waiters, since the other end is gone; nobody waits from now on. On the loop's thread."""
        self.wake()
        self._watch.close()


# Modules that actors need, also those that compile graphs: a process that is short of descriptors cannot
# import.
_PRELOADED = (
    "conveyor.worker.worker",
    "conveyor.codec.pickling.full_pickler",
    "conveyor.plan.lower",
    "conveyor.dag.node",
    "conveyor.logs",
)
SPAWN_TIMEOUT = 60.0  # the first spawn waits until the server has imported what it preloads
CLOSE_TIMEOUT = 10.0  # a killed process may be long in the kernel, freeing memory
KILL_TIMEOUT = 5.0
PRINT_TIMEOUT = 2.0
LAST_WORDS_BYTES = 4 << 10
_CLOSING = "the fork server is being ended, since the session ends"


class Launcher:
    """Starts actor processes and tells when they end.

    ``on_exit(pid, status)`` gets a wait status (see ``os.waitstatus_to_exitcode``) and runs on the
    thread of ``events``. ``on_output(pid, stream, data)`` gets bytes as they come and ``b""`` at
    the end of each stream (``"stdout"``, ``"stderr"``). It runs on a thread of its own and may
    block: that holds up the output of all actors, and the ``on_exit`` of those that end, since an
    actor's ``on_exit`` comes after all its output. It also gets what the fork server itself prints.

    In a child of ``os.fork`` a launcher still belongs to the parent: ``spawn`` raises, ``kill`` and
    ``close`` do nothing. Close it before ``events``, and before the interpreter ends (``atexit``).
    """

    def __init__(
        self,
        events: EventLoop,
        on_exit: Callable[[int, int], None],
        on_output: Callable[[int, str, bytes], None],
        preload: Sequence[str] = _PRELOADED,
        wanted: Sequence[str] = (),
    ) -> None:
        """``preload``, ``wanted``: modules that the fork server imports once, for all actors. The user wants
        the latter, and is told of those that cannot be imported."""
        self.server_pid = 0
        #: Whether somebody has waited for it in vain since it has said anything.
        self.is_silent = False
        self._owner = os.getpid()
        self._events = events
        self._output = Output(on_output)
        self._preload = list(preload)
        self._wanted = list(wanted)
        self._numbers = itertools.count(1)
        # Guards all that follows, and that no descriptor is closed while another thread uses it.
        # Never held across anything that blocks. Reentrant: a signal handler may call kill().
        self._lock = threading.RLock()
        self._closing = self._hurried = False
        self._server: subprocess.Popen[bytes] | None = None
        self._server_fd = -1
        self._server_log = -1
        self._last_words = b""
        self._server_end = ""  # how it ended; empty while it lives
        self._control: socket.socket | None = None
        self._send_waiters: SendWaiters | None = None
        self._requests: dict[int, SpawnRequest] = {}
        self._children = Children(self._lock, events, self._output, on_exit)
        self.went_on = self._children.went_on
        self._closers = threading.Lock()

    def start(self) -> None:
        """Start the fork server without waiting until it is ready. ``spawn`` does it if need be."""
        self._check_owner()
        if self._server is not None and not self._closing:
            return
        try:
            uninterrupted(self._start)
        except OSError as error:
            raise ActorStartError(f"cannot start the fork server: {why(error)}") from error

    def spawn(
        self,
        spec: ChildSpec,
        fds: Sequence[int],
        on_spawned: Callable[[int], None] | None = None,
    ) -> int:
        """Start a process and return its pid once it is forked: :meth:`request`, and :meth:`wait`."""
        request = self.request(spec, fds, on_spawned)
        try:
            return self.wait(request)
        except BaseException:
            uninterrupted(lambda: self.give_up(request))
            raise

    def request(
        self,
        spec: ChildSpec,
        fds: Sequence[int],
        on_spawned: Callable[[int], None] | None = None,
    ) -> SpawnRequest:
        """Make the request for a process.

        It receives duplicates of ``fds``, in order (at most 250), which stay open until :meth:`wait` has
        returned. ``on_spawned(pid)`` is called on the thread of ``events`` before any ``on_exit`` and
        ``on_output`` of this process, both of which can come before ``wait`` returns. Whoever does not want
        it any more gives it up. Raises ``ActorStartError``.
        """
        self._check_owner()
        if len(fds) > server.MAX_FDS - 3:
            raise ActorStartError(
                f"cannot start actor {spec.name!r}: {len(fds)} descriptors to hand over, "
                f"but at most {server.MAX_FDS - 3} fit"
            )
        return SpawnRequest(next(self._numbers), spec, fds, on_spawned)

    def ask(self, request: SpawnRequest, seconds: float) -> bool:
        """Ask the fork server for the process, unless that was done before, and wait ``seconds`` for the
        answer. Returns whether the answer is there."""
        self._check_owner()
        if self._events.on_thread():
            raise RuntimeError("ask() waits for the event loop: call it from another thread")
        end = _core.monotonic() + seconds
        if not request.sent:
            self.start()
            send_wait = SendWait(seconds)
            uninterrupted(lambda: self._ask(request, send_wait), send_wait.give_up)
        self.is_silent = not request.done.wait(
            max(end - _core.monotonic(), 0.0), interruptible=True
        )
        return not self.is_silent

    def wait(self, request: SpawnRequest) -> int:
        """Wait for the process, and return its pid. Raises ``ActorStartError``."""
        time_limit = TimeLimit(SPAWN_TIMEOUT)
        while not self.ask(request, time_limit.step() or 0.0):
            if time_limit.over():
                request.error = (
                    f"the fork server (pid {self.server_pid}) has not answered "
                    f"for {SPAWN_TIMEOUT:g} s"
                )
                break
            time_limit.check(lambda: f"actor {request.spec.name} to be started", self._server_does)
        if request.error:
            raise ActorStartError(
                f"cannot start actor {request.spec.name!r}: {request.error}"
            ) from request.cause
        return request.pid

    def give_up(self, request: SpawnRequest, why: str = "it is not wanted any more") -> None:
        """Give the process up, and end every wait for it. Any thread may call this."""
        with self._lock:
            # If the answer is still to come it will find no request, and end the process.
            self._requests.pop(request.number, None)
            pid = request.pid
            if not pid and not request.error:
                request.refuse(why)
        if pid:
            self.kill(pid)
        else:
            request.close()

    def kill(self, pid: int, sig: int = signal.SIGKILL) -> None:
        """Send ``sig`` to an actor's process; nothing happens if it has ended.

        By its pidfd, so it never hits another process that has got the number since, and it works
        while the fork server is busy.
        """
        if os.getpid() != self._owner:
            return
        self._children.send_signal(pid, sig)
        self._go_on()

    def _go_on(self) -> None:
        """Let a stopped fork server go on: an actor's end is complete only when the server has reaped it."""
        with self._lock, suppress(ProcessLookupError):
            if self._server_fd >= 0 and not self._server_end and is_stopped(self.server_pid):
                signal.pidfd_send_signal(self._server_fd, signal.SIGCONT)

    def end_headless(self, pid: int) -> None:
        """The main thread of an actor's process is gone: have the fork server kill the process if it goes
        on. The server can tell, since no other process gets the number before it has reaped this one."""
        if os.getpid() != self._owner:
            return
        try:
            self._send(server.HEADLESS, pid=pid)
        except TimeoutError:  # hundreds of requests are before it
            threads.start_or_run(self._end_headless_later, "headless", pid)
        except OSError:  # the server is gone, and its actors with it
            pass

    def _end_headless_later(self, pid: int) -> None:
        with suppress(OSError):
            self._send(server.HEADLESS, pid=pid, send_wait=SendWait(SPAWN_TIMEOUT))

    def hurry(self) -> None:
        """Wait for no imports of the fork server when it is closed, or is being closed just now."""
        if os.getpid() != self._owner:
            return
        with self._lock, suppress(ProcessLookupError):
            self._hurried = True
            # One that has actors has done its imports, and ends the processes that these have started, too.
            lives = self._server_fd >= 0 and not self._server_end
            if self._closing and lives and not self._children:
                signal.pidfd_send_signal(self._server_fd, signal.SIGKILL)

    def close(self) -> None:
        """Refuse what is asked for, kill all actors, wait until they and the fork server are gone.
        Idempotent, bounded."""
        if os.getpid() != self._owner:
            return
        if self._events.on_thread() or self._output.on_thread():
            raise RuntimeError("close() waits for the event loop: call it from another thread")
        with self._closers:
            with self._lock:
                self._closing = True
                fork_server = self._server
                # Now, since nobody may be left to hear of the server's end.
                for request in list(self._requests.values()):
                    request.refuse(_CLOSING)
                self._requests.clear()
                if self._control is not None and self._send_waiters is not None:
                    self._send_waiters.wake()
            if fork_server is None:
                return
            if self._events.closed:
                # Nobody is left to hear of the end. The kernel kills the actors.
                fork_server.kill()
                fork_server.wait()
                return
            try:
                self._send(server.CLOSE)
            except OSError:  # it is gone; or the kernel kills the actors with it
                fork_server.kill()
            self._go_on()
            if self._hurried:
                self.hurry()
            with threads.lent(self._lock):  # a signal handler may have interrupted whoever has it
                if not self._children.all_gone.wait(CLOSE_TIMEOUT):
                    fork_server.kill()
                    self._children.all_gone.wait(KILL_TIMEOUT)
                self._children.all_reported.wait(PRINT_TIMEOUT)
                self._output.close(PRINT_TIMEOUT)

    def _server_does(self) -> str:
        """Why there is no answer, in words."""
        stopped = "is stopped" if is_stopped(self.server_pid) else "has not answered"
        return f"the fork server (pid {self.server_pid}) {stopped}"

    # Starting and asking: on the callers' threads.

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeStateError(
                "this launcher belongs to the parent process: a forked child cannot use it"
            )

    def _start(self) -> None:
        with self._lock:
            if self._closing:
                raise RuntimeStateError("this launcher is closed: it starts no more actors")
            if self._server is not None:
                return
            made = execute(self._preload, self._wanted)
            try:
                self._send_waiters = SendWaiters(self._events, self._lock, made.control)
                self._server, self._control = made.process, made.control
                self.server_pid = made.process.pid
                self._server_log, self._server_fd = made.log, made.pidfd
                # In this order: whichever calls back first finds everything set.
                self._events.add(made.control.fileno(), self._on_control)
                self._events.add(self._server_log, self._on_server_log)
                self._events.add(self._server_fd, self._on_server_end)
            except BaseException:
                self._server = self._control = None
                send_waiters, self._send_waiters = self._send_waiters, None
                if send_waiters is not None:
                    send_waiters.close()
                for fd in (made.control.fileno(), made.log, made.pidfd):
                    self._events.remove(fd)
                made.kill()
                raise

    def _ask(self, request: SpawnRequest, send_wait: SendWait) -> None:
        theirs: list[int] = []
        request.sent = True
        try:
            request.prepare(theirs)
            with self._lock:
                if self._server_end or self._closing:
                    request.refuse(self._server_end or _CLOSING)
                if request.error:
                    return
                self._requests[request.number] = request
            fds = [*theirs, *request.fds]
            self._send(server.SPAWN, request.number, fds=fds, send_wait=send_wait)
        except (BrokenPipeError, ConnectionResetError):
            # The server has just died. How will be known in a moment, and is told by the request.
            pass
        except TimeoutError:
            request.sent = False
        except (OSError, ValueError) as error:
            request.refuse(error if isinstance(error, OSError) else str(error))
        finally:
            for fd in theirs:
                os.close(fd)
            if not request.sent:
                request.close()

    def _send(
        self,
        kind: int,
        number: int = 0,
        pid: int = 0,
        sig: int = 0,
        fds: Sequence[int] = (),
        send_wait: SendWait | None = None,
    ) -> None:
        """``send_wait``: how to wait where there is no room for it; on any thread but the loop's."""
        message = server.MESSAGE.pack(kind, number, pid, sig)
        while True:
            with self._lock:
                if self._control is None or self._send_waiters is None:
                    raise BrokenPipeError("the fork server is gone")
                if self._closing and send_wait is not None:
                    raise BrokenPipeError(_CLOSING)
                with suppress(BlockingIOError):
                    server.send(self._control, message, fds)
                    return
                # Full: hundreds of spawns before this one, or a server that is stopped.
                if send_wait is None or send_wait.over:
                    raise TimeoutError("the fork server takes no requests")
                self._send_waiters.tell(send_wait.go_on)
            send_wait.wait()

    # Hearing: on the event loop's thread.

    def _on_control(self) -> None:
        while self._control is not None:
            try:
                data, fds, _ = server.receive(self._control, max_fds=1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # It died with requests unread. What it sent before is still there.
                continue
            if not data:
                # How it ended comes with its pidfd.
                self._events.remove(self._control.fileno())
                return
            self.is_silent = False
            kind, number, pid, status = server.MESSAGE.unpack(data)
            if kind == server.BORN:
                self._born(number, pid, fds[0] if fds else -1)
            elif kind == server.FAILED:
                self._failed(number, pid)
            elif kind == server.DEAD:
                self._children.ended(pid, status, went_on=bool(number))

    def _born(self, number: int, pid: int, pidfd: int) -> None:
        with self._lock:
            request = self._requests.pop(number, None)
            if request is not None and pidfd >= 0:
                self._children.add(pid, pidfd, request.outputs)
                request.pid = pid
        if request is None or pidfd < 0:
            with suppress(OSError):
                self._send(server.KILL, pid=pid, sig=signal.SIGKILL)
            if pidfd >= 0:
                os.close(pidfd)
            if request is not None:
                request.refuse("the driver has too many open files to watch the process")
            return
        try:
            if request.on_spawned is not None:
                guarded(partial(request.on_spawned, pid))
            self._output.watch(pid, request.outputs)
        except OSError as error:  # sooner or later it would wait for ever for somebody to read
            request.refuse(error, "its output cannot be read: ")
        finally:
            request.done.set()

    def _failed(self, number: int, code: int) -> None:
        with self._lock:
            request = self._requests.pop(number, None)
        if request is not None:
            refused = OSError(code, os.strerror(code))
            request.refuse(refused, "the fork server could not fork: ")

    def _on_server_log(self) -> None:
        try:
            data = os.read(self._server_log, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._events.remove(self._server_log)
            return
        self._last_words = (self._last_words + data)[-LAST_WORDS_BYTES:]
        self._output.say(self.server_pid, data)

    def _on_server_end(self) -> None:
        assert self._server is not None
        self._on_control()
        self._on_server_log()
        # It is a zombie by now, so this does not wait.
        code = self._server.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"has ended with exit code {code}"
        words = self._last_words.decode("utf-8", "replace").strip()
        if words:
            self._output.say(self.server_pid, b"")
        with self._lock:
            self._server_end = f"the fork server (pid {self.server_pid}) {how}" + (
                f"; it said:\n{words}" if words else ""
            )
            if self._control is not None:
                self._events.remove(self._control.fileno())
                self._control.close()
                self._control = None
            if self._send_waiters is not None:
                self._send_waiters.close()
            for fd in (self._server_log, self._server_fd):
                self._events.remove(fd)
                os.close(fd)
            requests = list(self._requests.values())
            self._requests.clear()
        for request in requests:
            request.refuse(self._server_end)
        self._children.orphaned()
