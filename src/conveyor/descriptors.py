"""Descriptors of the library's own.

A process's own code may close all descriptors (``os.closerange``, as daemons do). Its next files have the
lowest numbers then. The library's are above them, so nothing of the library's is written to such a file, read
from it or closes it: what the library uses is ``EBADF``, an error.
"""

from __future__ import annotations

import errno
import os
import select
import socket

from conveyor import _core

# Of the native core: no signal handler can raise between the opening of a descriptor and its assignment.
own = _core.own_descriptor
event = _core.event_descriptor
memory_file = _core.memory_file
duplicate = _core.duplicate_descriptor


def lost(fd: int) -> bool:
    """Whether other code has closed ``fd``, one of the library's own. False for -1, which is no
    descriptor."""
    if fd < 0:
        return False
    try:
        os.fstat(fd)
    except OSError as error:
        return error.errno == errno.EBADF
    return False


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Make two Unix sockets that keep messages apart and are connected to each other."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return own_socket(one), own_socket(other)


def own_socket(sock: socket.socket) -> socket.socket:
    """Give ``sock`` a number of the library's own, and return the new socket object."""
    timeout = sock.gettimeout()
    moved = socket.socket(sock.family, sock.type, sock.proto, own(sock.detach()))
    moved.settimeout(timeout)
    return moved


def epoll() -> select.epoll:
    """Make an epoll instance."""
    return select.epoll.fromfd(_core.epoll_descriptor())
