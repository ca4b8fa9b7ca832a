"""Descriptors of the library's own.

A process's own code may close all descriptors (``os.closerange``, as daemons do). Its next files have the
lowest numbers then. The library's are above them, so nothing of the library's is written to such a file, read
from it or closes it: what the library uses is ``EBADF``, an error.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket

from conveyor import _core

#: What has closed them, in words.
CLOSED = "code of this process has closed descriptors of conveyor's (os.closerange, or a number not its own)"

_FIRST = _core.FIRST_OWN_DESCRIPTOR


def own(fd: int) -> int:
    """Give ``fd`` a number of the library's own, and ``FD_CLOEXEC``. It stays as it is where the process's
    limit leaves no such number."""
    if fd >= _FIRST:
        return fd
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    except OSError:
        return fd
    os.close(fd)
    return moved


def lost(fd: int) -> bool:
    """Whether others have closed ``fd``, which is one of the library's own."""
    try:
        os.fstat(fd)
    except OSError as error:
        return error.errno == errno.EBADF
    return False


def event() -> int:
    """Make an eventfd, which does not block; the caller closes it."""
    return own(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))


def memory_file(name: str) -> int:
    """Make a file without a place in any directory; the caller closes it."""
    if hasattr(os, "memfd_create"):
        return own(os.memfd_create(name, os.MFD_CLOEXEC))
    # Pythons built for old C libraries do not have it.
    import tempfile

    with tempfile.TemporaryFile() as file:
        return duplicate(file.fileno())


def duplicate(fd: int) -> int:
    """Duplicate ``fd``; the caller closes it."""
    return own(os.dup(fd))


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Make two Unix sockets that keep messages apart and are connected to each other."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return own_socket(one), own_socket(other)


def own_socket(sock: socket.socket) -> socket.socket:
    """Give ``sock`` a number of the library's own; it is another object then."""
    timeout = sock.gettimeout()
    moved = socket.socket(sock.family, sock.type, sock.proto, fileno=own(sock.detach()))
    moved.settimeout(timeout)
    return moved


def epoll() -> select.epoll:
    """Make an epoll instance."""
    one = select.epoll()
    moved = duplicate(one.fileno())
    one.close()
    return select.epoll.fromfd(moved)
