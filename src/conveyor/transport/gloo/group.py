"""A process group of two, whose connection can be cut."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo

from conveyor.transport.gloo.abort import abort
from conveyor.transport.gloo.rendezvous import Rendezvous

#: Where each rank listens. Gloo has the end with the greater address call the other one, so it is always
#: rank 1 that calls.
_HOSTS = "127.0.0.1", "127.0.0.2"
#: The address between which both are connected, and the state of a connection, as the kernel's table has
#: them.
_LOOPBACK_HEX = f"{int.from_bytes(socket.inet_aton(_HOSTS[0]), sys.byteorder):08X}"
_ESTABLISHED = "01"
_libc = ctypes.CDLL(None)
#: An IPv4 address of the loopback interface, as the kernel's structures have it.
_ADDRESS = re.compile(rb"\x02\x00(..)\x7f\x00\x00[\x01\x02]", re.DOTALL)

#: How long rank 1 calls in vain: the other end listens, unless it is gone. Gloo gives rank 0 five times as
#: long to notice that it was called.
_TO_CONNECT = timedelta(seconds=5)
#: A transfer takes as long as its reader computes. Gloo breaks a connection on which one is late, so none
#: is: what has to end is cut.
_NEVER = timedelta(days=100)


class Pair:
    """Two processes' group, made for one edge and one of its readers. All methods but :meth:`cut` wait, and
    are called on one thread."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        """Connect with the other end. ``rank``: 0 or 1.

        It cannot be interrupted once the rendezvous has told where the other end is. So rank 0 must not be
        told before rank 1 is connected: nothing more is waited for then.
        """
        options = ProcessGroupGloo._Options()
        options._devices = [_device(_HOSTS[rank])]
        options._timeout = _TO_CONNECT
        options._threads = 1
        self._group: Any = ProcessGroupGloo(rendezvous, rank, 2, options)
        self._other = 1 - rank
        self._socket = _connection(*rendezvous.both())
        #: The transfer that is under way.
        self._work: Any = None
        self._is_cut = False

    def send(self, buffer: Any) -> None:
        """Send a tensor of bytes, and wait until the other end has taken it."""
        self._finish(self._group.send([buffer], self._other, 0))

    def receive(self, buffer: Any) -> None:
        """Fill a tensor of bytes."""
        self._finish(self._group.recv([buffer], self._other, 0))

    def cut(self) -> None:
        """Have whoever waits at either end stop at once, with an error. From any thread; gloo's own
        ``abort`` does nothing to who waits for a process that is stopped."""
        self._is_cut = True
        self._socket.shut_down()
        work = self._work
        if work is not None:
            abort(work)

    def close(self) -> None:
        """Let go of the sockets and of gloo's threads."""
        self.cut()
        self._group = None
        self._socket.close()

    def _finish(self, work: Any) -> None:
        self._work = work
        try:
            if self._is_cut:  # by who saw no transfer under way
                abort(work)
            if not work.wait(_NEVER):
                raise ConnectionError("the transfer was cut off")
        finally:
            self._work = None


def _device(host: str) -> Any:
    """Make gloo's listening socket, and its thread. A device serves one pair, so the pair's connection can
    be told by its ports."""
    try:
        # The connection must be there when the group is, whatever the environment says.
        return ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
    except TypeError:  # an older torch, which always connects at once
        return ProcessGroupGloo.create_device(hostname=host)


class _Connection:
    """A duplicate of a connected socket of gloo's, to shut it down by. It is no socket of Python's, whose
    constructor may change how the socket that it shares waits."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)

    def shut_down(self) -> None:
        """Have whoever reads or writes it at either end stop. It may be down already."""
        if self._descriptor >= 0:
            _libc.shutdown(self._descriptor, socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _connection(ours: dict[str, bytes], theirs: dict[str, bytes]) -> _Connection:
    """Duplicate the connection between two ends that listened where these addresses say. One of them has
    called the other.

    Descriptors are told by what the kernel says of them, and none but the one is touched: to close a
    duplicate of a file, say, gives back the locks that the process has on it.
    """
    inodes = set(_connections(_ports(ours.values()), _ports(theirs.values())))
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed by now
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket" and inode.strip("[]") in inodes:
                return _Connection(int(name))
    raise ConnectionError("gloo's connection is not to be found among this process's descriptors")


def _connections(ports: set[int], others: set[int]) -> Iterator[str]:
    """Find the inodes of sockets that are connected over the loopback interface, from one of ``ports`` or to
    one of ``others``."""
    with open("/proc/self/net/tcp") as table:
        next(table)
        for line in table:
            fields = line.split()
            (here, port), (there, other) = fields[1].split(":"), fields[2].split(":")
            connected = here == there == _LOOPBACK_HEX and fields[3] == _ESTABLISHED
            if connected and (int(port, 16) in ports or int(other, 16) in others):
                yield fields[9]


def _ports(addresses: Iterable[bytes]) -> set[int]:
    return {
        int.from_bytes(port, "big") for address in addresses for port in _ADDRESS.findall(address)
    }
