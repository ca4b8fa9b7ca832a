"""The fork server: a small process without user code that forks actors and reaps them.

It is a fresh Python (exec'd, not forked), so actors inherit nothing of the driver: no threads, no
CUDA context, no locks held. It has imported what an actor needs, so a new actor costs a fork.

It outlives nobody: the driver's pidfd tells it when the driver's last thread is gone, whoever else
holds the driver's sockets, and then it kills the actors and leaves. Should the server itself be
killed, the kernel kills its children (``PR_SET_PDEATHSIG``, see ``child``).

The driver and the server exchange messages of one datagram each:

======== ========================= ======================== ============================
kind     direction                 fields                   descriptors
======== ========================= ======================== ============================
SPAWN    to the server             request                  spec, stdout, stderr, fds...
KILL     to the server             pid, signal
HEADLESS to the server             pid
CLOSE    to the server
BORN     to the driver             request, pid             pidfd of the actor
FAILED   to the driver             request, errno
DEAD     to the driver             went on, pid, status
======== ========================= ======================== ============================

HEADLESS says that the main thread of an actor is gone. A process that goes on nevertheless (another
program, after ``os.exec*``) is killed, and its DEAD says so in the field of the request.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn, TypedDict

from conveyor import descriptors
from conveyor.engines.headless import Headless
from conveyor.engines.local import child
from conveyor.engines.local.tunables import fill_huge_heap
from conveyor.engines.surroundings import HUGE_TENSORS
from conveyor.system_limits import FORK_SERVER, PASSING

SPAWN, KILL, CLOSE, BORN, FAILED, DEAD, HEADLESS = range(7)
MESSAGE = struct.Struct("=BQiI")  # kind, request, pid or errno, wait status or signal
MAX_FDS = 253  # the kernel's limit for one message (SCM_MAX_FD)


class Setup(TypedDict):
    """Setup of the fork server, which the launcher leaves on its stdin."""

    path: list[str]  # sys.path
    control: int  # socket to the driver
    driver: int  # pidfd of the driver
    preload: list[str]  # modules to import before the first fork
    wanted: list[str]  # and those that the user has named


def send(control: socket.socket, message: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message with descriptors, or raise ``BlockingIOError`` at once."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    control.sendmsg([message], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive(control: socket.socket, max_fds: int) -> tuple[bytes, list[int], bool]:
    """Receive one message: its data, its descriptors, and whether no descriptor was lost. Raises
    ``BlockingIOError`` at once if there is no message.

    Not ``socket.recv_fds``, which ignores the flags it is given (seen up to Python 3.13).
    """
    item = array("i").itemsize
    data, ancillary, flags, _ = control.recvmsg(
        MESSAGE.size,
        socket.CMSG_SPACE(max_fds * item),
        socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,
    )
    fds = array("i")
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(rights[: len(rights) - len(rights) % item])
    return data, [descriptors.own(fd) for fd in fds], not flags & socket.MSG_CTRUNC


def main(setup: Setup) -> NoReturn:
    """Serve until the driver is gone or says so."""
    status = 1
    try:
        _isolate()
        child.set_process_title(FORK_SERVER)
        _preload(setup["preload"], setup["wanted"])
        child.prepare_for_forks()
        server = _Server(setup["control"], setup["driver"])
        # Objects that exist now stay for good. The collector must not write to their pages, which all actors
        # share.
        gc.collect()
        gc.freeze()
        server.serve()
        status = 0
    except BaseException:
        with suppress(BaseException):
            sys.excepthook(*sys.exc_info())
    finally:
        with suppress(BaseException):
            sys.stderr.flush()
        os._exit(status)


def _isolate() -> None:
    gc.disable()
    # Inherited from whichever thread started us.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # With SIGCHLD ignored the kernel would reap our children itself.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Ending is the driver's decision. Batch systems send SIGTERM to every process of a job, and a
    # driver that saves its actors' state then needs them alive.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)


def _preload(modules: Sequence[str], wanted: Sequence[str]) -> None:
    for module in modules:
        # Only for speed. An actor that cannot import it either says so itself, with a traceback.
        with suppress(Exception):
            importlib.import_module(module)
    # Numeric libraries read this when they are imported, and with more they would start threads here, which
    # actors do not inherit.
    for variable in child.THREAD_VARIABLES:
        os.environ.setdefault(variable, "1")
    fill_huge_heap(os.environ)
    os.environ.setdefault(HUGE_TENSORS, "1")  # torch looks when it first allocates anything
    for module in wanted:
        try:
            importlib.import_module(module)
        except Exception as error:
            print(
                f"Conveyor: init(preload=) names {module!r}, which cannot be imported before actors start "
                f"({type(error).__name__}: {error}): each actor that needs it will try for itself",
                file=sys.stderr,
            )
    modules = *modules, *wanted
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        print(
            f"Conveyor's fork server has {threads} threads after importing {', '.join(modules)}: "
            "actors forked from it may deadlock. Something starts a thread when imported.",
            file=sys.stderr,
        )
    # A server in the driver's directory would keep a file system from being unmounted.
    os.chdir("/")


class _Server:
    def __init__(self, control: int, driver: int) -> None:
        self._pid = os.getpid()
        self._control = socket.socket(fileno=control)
        self._control.setblocking(False)
        self._driver = driver
        self._actors: dict[int, int] = {}  # pidfd -> pid
        self._headless = Headless()
        self._outbox: deque[tuple[bytes, int]] = deque()  # message, descriptor to pass or -1
        self._closing = False
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(driver, select.POLLIN)

    def serve(self) -> None:
        while not (self._closing and not self._actors and not self._outbox):
            for fd, _ in self._poll.poll(self._headless.due()):
                if fd == self._driver:
                    self._lose_driver()
                elif fd in self._actors:
                    self._bury(fd)
                elif fd == self._control.fileno():
                    self._receive()
            self._headless.look_again()
            self._send()

    def _receive(self) -> None:
        while True:
            try:
                data, fds, whole = receive(self._control, MAX_FDS)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in PASSING:
                    return  # and asked to again at once
                data = b""
            if not data:
                self._lose_driver()
                return
            kind, request, pid, number = MESSAGE.unpack(data)
            if kind == SPAWN:
                self._spawn(request, fds, whole)
            elif kind == KILL:
                if pid in self._actors.values():
                    os.kill(pid, number)
            elif kind == HEADLESS:
                for pidfd in [fd for fd, actor in self._actors.items() if actor == pid]:
                    self._headless.look(pidfd, pid)
            elif kind == CLOSE:
                self._close()

    def _spawn(self, request: int, fds: list[int], whole: bool) -> None:
        try:
            if not whole:
                raise OSError(errno.EMFILE, "descriptors were lost on the way")
            if self._closing:
                raise OSError(errno.ESHUTDOWN, "the fork server is closing")
            spec, stdout, stderr, *handed = fds
            # Both processes would write the contents of a buffer.
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                # The number is closed with all others; the object must not close it once more.
                self._control.detach()
                child.become_actor(self._pid, spec, stdout, stderr, handed)
            pidfds: list[int] = []
            try:
                pidfds.append(descriptors.own(os.pidfd_open(pid)))
                pidfds.append(descriptors.duplicate(pidfds[0]))
            except OSError:
                # An actor that cannot be watched must not be.
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                for fd in pidfds:
                    os.close(fd)
                raise
        except OSError as error:
            self._outbox.append((MESSAGE.pack(FAILED, request, error.errno or 0, 0), -1))
        else:
            watched, answer = pidfds
            self._actors[watched] = pid
            self._poll.register(watched, select.POLLIN)
            self._outbox.append((MESSAGE.pack(BORN, request, pid, 0), answer))
        finally:
            for fd in fds:
                os.close(fd)
        self._send()

    def _bury(self, pidfd: int) -> None:
        pid = self._actors.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        # Before it is reaped: so long its number, which is its group's as well, is not given away.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        went_on = self._headless.bury(pidfd, status)
        self._outbox.append((MESSAGE.pack(DEAD, went_on, pid, status), -1))

    def _send(self) -> None:
        # Never blocks: a driver that does not read may be dead, and that is for us to notice.
        if self._control.fileno() < 0:
            self._outbox.clear()
            return
        while self._outbox:
            data, fd = self._outbox[0]
            try:
                send(self._control, data, [fd] if fd >= 0 else [])
            except OSError as error:
                if isinstance(error, BlockingIOError) or error.errno in PASSING:
                    self._poll.modify(self._control, select.POLLIN | select.POLLOUT)
                else:
                    self._lose_driver()
                return
            self._outbox.popleft()
            if fd >= 0:
                os.close(fd)
        self._poll.modify(self._control, select.POLLIN)

    def _lose_driver(self) -> None:
        """Close, since the driver is dead or has closed its socket: nobody listens any more."""
        self._outbox.clear()
        if self._control.fileno() >= 0:
            self._poll.unregister(self._control)
            self._control.close()
        if self._driver >= 0:
            self._poll.unregister(self._driver)
            os.close(self._driver)
            self._driver = -1
        self._close()

    def _close(self) -> None:
        self._closing = True
        for pidfd, pid in self._actors.items():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            # Newborn, it may not have its group yet.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
