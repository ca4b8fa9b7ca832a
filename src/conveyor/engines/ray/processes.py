"""Processes of this node that Ray has started: how they get their descriptors, leave, and end.

Ray starts a process and tells it the socket's name and a secret, over its own authenticated connections. The
process connects, both ends prove themselves (:mod:`conveyor.local_sockets`), and the driver gives the process
its descriptors. The socket is in the abstract namespace, not in the file system, and lasts as long as the
session.

Ray's daemon, the parent, reaps the process. From Linux 6.15 on the kernel tells the wait status to any
process that has a pidfd; see ``PIDFD_GET_INFO`` in the kernel's ``include/uapi/linux/pidfd.h``.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import socket
import struct
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from msgspec import Struct, field

from conveyor import descriptors
from conveyor.driver.process_engine import UNKNOWN_END
from conveyor.engines.headless import EXIT_DELAY, goes_on
from conveyor.engines.ray.bootstrap import (
    MESSAGE_BYTES,
    Farewell,
    Here,
    Leave,
    Welcome,
    read,
    version,
    write,
)
from conveyor.local_sockets import LocalListener, hang_up, new_key, new_name, owner
from conveyor.runtime import threads
from conveyor.runtime.events import EventLoop, guarded
from conveyor.runtime.process import close_all

_SIZE = 64  # of the structure's first version
_GET_INFO = 3 << 30 | _SIZE << 16 | 0xFF << 8 | 11  # _IOWR(0xFF, 11, struct pidfd_info)
_EXIT = 1 << 3
_MASK = struct.Struct("=Q")
_CODE = struct.Struct("=i")
_CODE_AT = 60


def exit_status(pidfd: int) -> int | None:
    """Return the wait status of a process that has been reaped. ``None``: it has not been reaped, or the
    kernel does not tell."""
    info = bytearray(_SIZE)
    _MASK.pack_into(info, 0, _EXIT)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:  # an older kernel
        return None
    (said,) = _MASK.unpack_from(info)
    (status,) = _CODE.unpack_from(info, _CODE_AT)
    return status & 0xFFFF if said & _EXIT else None


def status_once_reaped(pidfd: int, seconds: float) -> int | None:
    """Return the wait status of a process that has ended, or ``None``. Wait up to ``seconds`` for its parent
    to reap it. A kernel that does not tell the status does not tell the moment either: then wait in full."""
    poll = select.poll()
    poll.register(pidfd, 0)
    poll.poll(int(seconds * 1000))
    return exit_status(pidfd)


_BYTES = 8 << 10
_LINES = 20
#: Beginnings of the lines that Ray itself writes to the file.
_RAYS_LINES = (":job_id:", ":actor_name:", ":task_name:")


def tail(path: str) -> str:
    """Return the last lines of the file ``path``, without Ray's own; empty if there is no such file."""
    if not path:
        return ""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in lines if not line.startswith(_RAYS_LINES)][-_LINES:])


class Expected(Struct, eq=False):
    """A process that is to come. ``arrived(pid, stderr)`` returns the descriptors for the process, which stay
    the callee's; an ``OSError`` refuses the process, and its text is sent there. ``refused(why)`` is called
    if the process has come, and cannot be taken."""

    key: bytes
    arrived: Callable[[int, str], Sequence[int]]
    refused: Callable[[str], object]


class ProcessListener:
    """Socket at which expected processes connect, for the driver or a node agent. All of it but
    :meth:`start` and :meth:`expect` happens on the thread of ``events``."""

    def __init__(self, events: EventLoop, on_farewell: Callable[[int, int], object]) -> None:
        """``on_farewell(pid, code)`` is called when an arrived process says that it ends or leaves."""
        self._events = events
        self._on_farewell = on_farewell
        self._expected: dict[int, Expected] = {}
        #: Connections of expected processes that have not said yet what they are.
        self._coming: dict[int, tuple[socket.socket, Expected]] = {}
        self._known: dict[int, tuple[socket.socket, int]] = {}
        self._listener: LocalListener | None = None
        self._name = new_name()

    @property
    def address(self) -> str:
        """The socket's name, in the abstract namespace."""
        return self._name

    def start(self) -> None:
        """Accept connections from now on."""
        listener = LocalListener(self._name, socket.SOCK_SEQPACKET, self._key_of, self._admit)
        try:
            self._listener = listener
            self._events.add(listener.fileno(), self._serve)
        except BaseException:
            self._listener = None
            listener.close()
            raise

    def expect(
        self,
        number: int,
        arrived: Callable[[int, str], Sequence[int]],
        refused: Callable[[str], object],
    ) -> bytes:
        """Expect one process under this number; return the secret that it has to prove. See
        :class:`Expected`."""
        key = new_key()
        self._expected[number] = Expected(key, arrived, refused)
        return key

    def forget(self, number: int) -> None:
        """Stop expecting the process of that number."""
        self._expected.pop(number, None)

    def close(self) -> None:
        """Accept nothing any more, and close all connections."""
        if self._listener is not None:
            self._events.remove(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for known in list(self._known):
            self._hang_up(known)
        for coming in list(self._coming):
            self._drop(coming)

    def _key_of(self, number: int) -> bytes | None:
        expected = self._expected.get(number)
        return None if expected is None else expected.key

    def _serve(self) -> None:
        listener = self._listener
        if listener is None:
            return
        pause = listener.serve()
        if pause:
            self._events.rest(listener.fileno(), pause)

    def _admit(self, connection: socket.socket, number: int) -> None:
        expected = self._expected.pop(number)  # each process comes once
        fd = connection.fileno()
        self._coming[fd] = connection, expected
        self._events.add(fd, partial(self._hear, fd))

    def _hear(self, fd: int) -> None:
        connection, expected = self._coming[fd]
        try:
            data = connection.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said = read(data, Here)
        if said is None:  # it has ended, which Ray tells
            self._drop(fd)
            return
        self._handshake(fd, connection, said, expected)

    def _handshake(
        self, fd: int, connection: socket.socket, said: Here, expected: Expected
    ) -> None:
        pid, _ = owner(connection)
        why = ""
        fds: Sequence[int] = ()
        if said.version != version():
            why = f"it is {said.version}, and the driver {version()}"
        elif pid <= 0:
            why = "it is in another PID namespace than the driver, which could not see its end"
        else:
            try:
                fds = expected.arrived(pid, said.stderr)
            except OSError as error:
                why = str(error)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            connection.sendmsg([write(Welcome(why))], rights, socket.MSG_NOSIGNAL)
        except OSError as error:  # it has ended meanwhile, or its descriptors are used up
            why = why or f"its descriptors could not be sent: {error}"
        if why:
            self._drop(fd)
            expected.refused(why)
            return
        del self._coming[fd]
        self._known[fd] = connection, pid
        self._events.remove(fd)
        self._events.add(fd, partial(self._hear_end, fd))

    def _hear_end(self, fd: int) -> bool:
        """Receive one message of a process, such as its farewell. Return whether there may be more."""
        known = self._known.get(fd)
        if known is None:
            return False
        connection, pid = known
        try:
            data = connection.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it died with unread messages: its own can still be received
            return True
        except OSError:
            data = b""
        if not data:
            self._hang_up(fd)
            return False
        farewell = read(data, Farewell)
        if farewell is not None:
            self._on_farewell(pid, farewell.code)
        return True

    def last_words(self, pid: int) -> None:
        """Receive all that a process had sent before it ended."""
        for fd, (_, known) in list(self._known.items()):
            if known == pid:
                while self._hear_end(fd):
                    pass
                if fd in self._known:  # a child of the process has its end of the connection
                    self._hang_up(fd)

    def tell_to_leave(self, pid: int) -> None:
        """Tell a process to leave the session, if it has not left yet."""
        for connection, known in self._known.values():
            if known == pid:
                with suppress(OSError):  # it is gone, or its socket is full of such messages
                    connection.sendmsg([write(Leave())], [], socket.MSG_NOSIGNAL)

    def _hang_up(self, fd: int) -> None:
        self._events.remove(fd)
        hang_up(self._known.pop(fd)[0])

    def _drop(self, fd: int) -> None:
        self._events.remove(fd)
        hang_up(self._coming.pop(fd)[0])


#: Timeout of the wait until Ray has reaped a process that has ended, in seconds.
WORD_TIMEOUT = 1.0
#: Exit code of a process in Ray's messages.
_EXIT_CODE = re.compile(r"exit code (\d+)")


class Resident(Struct, eq=False):
    """A process of this node that takes part in the session. ``killed``, ``went_on`` and ``status`` may
    change on any thread, the rest on the event loop's."""

    pid: int = 0
    pidfd: int = -1
    #: Descriptors for its welcome, until that is sent: see :func:`bootstrap.made_for`.
    fds: list[int] = field(default_factory=list)
    killed: bool = False
    went_on: bool = False
    #: How it has ended: exit code by its own farewell, wait status by the kernel, text by Ray.
    code: int | None = None
    status: int | None = None
    word: str | None = None
    over: bool = False
    #: Called on the event loop's thread when it has ended, and all is known of how.
    on_end: Callable[[], object] = lambda: None

    def close_fds(self) -> None:
        """Close the descriptors for the welcome: they were sent, or never will be."""
        close_all(self.fds)
        self.fds.clear()

    def wait_status(self) -> int:
        """Return the wait status, or ``UNKNOWN_END``: the process is Ray's child, so it may not be known."""
        if self.code is not None:
            return self.code << 8
        if self.status is not None:
            return self.status
        if self.killed:
            return int(signal.SIGKILL)
        found = _EXIT_CODE.search(self.word or "")
        return UNKNOWN_END if found is None else (int(found.group(1)) & 0xFF) << 8


class Processes:
    """All processes of this node that Ray has started for the session, while they live."""

    def __init__(self, events: EventLoop) -> None:
        self._events = events
        self.process_listener = ProcessListener(events, self._on_farewell)
        self._living: dict[int, Resident] = {}
        #: Held to close a pidfd, and to use it off the event loop's thread: once closed, its number may be
        #: another descriptor's.
        self._pidfds = threading.Lock()

    def add(self, one: Resident, pid: int) -> None:
        """Add a process that has come. It waits for an answer, so its pid cannot be another's by now."""
        one.pidfd = descriptors.own(os.pidfd_open(pid))
        one.pid = pid
        self._living[pid] = one
        self._events.add(one.pidfd, partial(self._ended, one))

    def signal(self, one: Resident, number: int) -> None:
        """Send a signal to the process. On any thread."""
        one.killed = one.killed or number == signal.SIGKILL
        with self._pidfds, suppress(OSError):  # it has just ended
            signal.pidfd_send_signal(one.pidfd, number)

    def kill_all(self) -> None:
        """Kill all processes that are left."""
        for one in list(self._living.values()):
            self.signal(one, signal.SIGKILL)

    def end_headless(self, one: Resident) -> None:
        """Kill the process if it goes on without its main thread: see :meth:`Hosts.end_headless`."""
        if not one.over:
            threads.start_or_run(self._end_headless, "headless", one)

    def _end_headless(self, one: Resident) -> None:
        goes = goes_on(one.pid)
        if goes is None:
            with self._pidfds:
                pidfd = -1 if one.pidfd < 0 else descriptors.duplicate(one.pidfd)
            if pidfd < 0:
                return
            try:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll(EXIT_DELAY * 1000)
            finally:
                os.close(pidfd)
            goes = goes_on(one.pid) is not False
        if goes and not one.over:
            one.went_on = True
            self.signal(one, signal.SIGKILL)

    # On the thread of the events.

    def _on_farewell(self, pid: int, code: int) -> None:
        one = self._living.get(pid)
        if one is not None:
            one.code = code

    def _ended(self, one: Resident) -> None:
        """Find out how a process has ended, and report it."""
        self._events.remove(one.pidfd)
        self.process_listener.last_words(one.pid)
        one.over = True
        one.status = exit_status(one.pidfd)
        if one.killed or one.code is not None or one.status is not None:
            self._report(one)
        else:  # its parent has not reaped it yet
            threads.start_or_run(self._see_end, "how-it-ended", one)

    def _see_end(self, one: Resident) -> None:
        # Its pidfd stays open until the end is reported.
        one.status = status_once_reaped(one.pidfd, WORD_TIMEOUT)
        self._events.call(partial(self._report, one))

    def _report(self, one: Resident) -> None:
        if self._living.pop(one.pid, None) is None:
            return
        with self._pidfds:
            os.close(one.pidfd)
            one.pidfd = -1
        guarded(one.on_end)


class AttachedProcesses:
    """All processes of attached actors on this node. Each ends here with its farewell, or with its death;
    :class:`Processes` waits for the end of the process in any case. All of it but :meth:`tell_to_leave`
    happens on the event loop's thread."""

    def __init__(self, events: EventLoop) -> None:
        self._events = events
        self.process_listener = ProcessListener(events, self._left)
        self._present: dict[int, Resident] = {}

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, pid: int) -> bool:
        return pid in self._present

    def add(self, one: Resident, pid: int) -> None:
        """Add a process that has come. It waits for an answer, so its pid cannot be another's by now."""
        if pid in self._present:  # it has left, and its farewell is unread
            self.process_listener.last_words(pid)
        one.pidfd = descriptors.own(os.pidfd_open(pid))
        one.pid = pid
        self._present[pid] = one
        self._events.add(one.pidfd, partial(self._died, one))

    def forget(self, one: Resident) -> None:
        """Forget a process that has come, and could not be let in."""
        if self._present.get(one.pid) is one:
            del self._present[one.pid]
            self._close_pidfd(one)

    def tell_to_leave(self, pid: int) -> None:
        """Tell a process to leave the session, if it has not left yet. On any thread."""
        self._events.call(partial(self.process_listener.tell_to_leave, pid))

    def see_off(self) -> None:
        """Close all connections, as the session is over: processes that are left see that, and leave when
        their method has returned."""
        self.process_listener.close()
        while self._present:
            _, one = self._present.popitem()
            self._close_pidfd(one)

    def _left(self, pid: int, code: int) -> None:
        one = self._present.get(pid)
        if one is not None:
            one.code = code
            self._report(one)

    def _died(self, one: Resident) -> None:
        """Find out how a process has ended that is Ray's child, and report it, unless it had left before."""
        self._events.remove(one.pidfd)
        self.process_listener.last_words(one.pid)
        if self._present.get(one.pid) is not one:  # it has left just before
            return
        one.status = exit_status(one.pidfd)
        if one.status is not None:
            self._report(one)
        else:  # its parent has not reaped it yet
            threads.start_or_run(
                self._see_end, "how-it-ended", one, descriptors.duplicate(one.pidfd)
            )

    def _see_end(self, one: Resident, pidfd: int) -> None:
        try:
            one.status = status_once_reaped(pidfd, WORD_TIMEOUT)
        finally:
            os.close(pidfd)
        self._events.call(partial(self._report, one))

    def _report(self, one: Resident) -> None:
        if self._present.get(one.pid) is not one:
            return
        del self._present[one.pid]
        one.over = True
        self._close_pidfd(one)
        guarded(one.on_end)

    def _close_pidfd(self, one: Resident) -> None:
        self._events.remove(one.pidfd)
        os.close(one.pidfd)
        one.pidfd = -1
