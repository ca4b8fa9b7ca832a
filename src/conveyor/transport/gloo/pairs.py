"""Process groups of two over gloo: who listens and who calls, and a connection that can be cut."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroupGloo, Store

from conveyor import descriptors
from conveyor.transport.base import Wire

#: Addresses at which a writer and a reader on one machine listen.
_ON_ONE = "127.0.0.1", "127.0.0.2"


class PairAddresses(NamedTuple):
    """Addresses of a pair of ends, as one end has them.

    addresses: where rank 0 and rank 1 of the pair listen, each at its own node's address alone. Gloo has the
        end with the greater address call the other one, so it is always rank 1 that calls.
    rank: this end's.
    """

    addresses: tuple[str, str]
    rank: int


def addresses_to(wire: Wire, other: int) -> PairAddresses:
    """Find the way from this end of ``wire`` to the one whose rank there is ``other``.

    Raises:
        ValueError: there is none.
    """
    own = wire.rank
    if not wire.hosts or wire.hosts[own].address == wire.hosts[other].address:
        return PairAddresses(_ON_ONE, 0 if own == 0 else 1)
    here = ipaddress.ip_address(wire.hosts[own].address)
    there = ipaddress.ip_address(wire.hosts[other].address)
    if here.version != there.version:
        raise ValueError(
            f"{wire.members[own]} is on a node with the address {here}, and {wire.members[other]} on one "
            f"with {there}: gloo connects two of one version of IP"
        )
    if here.packed < there.packed:
        return PairAddresses((str(here), str(there)), 0)
    return PairAddresses((str(there), str(here)), 1)


#: Seconds to wait for gloo's entries. They come within milliseconds, unless the thread is not scheduled.
_TIME_LIMIT = 30.0


class Rendezvous(Store):  # type: ignore[misc]
    """Store that keeps gloo's entries to be sent to the other end, and waits for the other end's entries.

    Gloo calls it on the thread that makes the group, without the GIL in between. The other methods are called
    on the endpoint's thread.
    """

    def __init__(self, on_written: Callable[[], object] = lambda: None) -> None:
        """``on_written`` is called on gloo's thread when gloo has written all of its entries."""
        super().__init__()
        self._on_written = on_written
        # Entered in place of the condition: that would run Python code, and a signal handler that raises in
        # there would leave the lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._ours: dict[str, bytes] = {}
        self._theirs: dict[str, bytes] = {}
        #: Gloo has written all of its entries, and looks for the other end's.
        self._written = False
        self._ended: BaseException | None = None

    def addresses(self) -> dict[str, bytes]:
        """Return the entries to send to the other end.

        Raises the error that has kept the group from being made.
        """
        with self._lock:
            there = self._changed.wait_for(lambda: self._written or self._ended, _TIME_LIMIT)
            if self._ended is not None:
                raise self._ended
            if not there:
                raise TimeoutError(f"gloo has given no address within {_TIME_LIMIT:g} s")
            return dict(self._ours)

    def meet(self, theirs: Mapping[str, bytes]) -> None:
        """Add the entries that the other end has sent."""
        with self._lock:
            self._theirs.update(theirs)
            self._changed.notify_all()

    def end(self, reason: BaseException) -> None:
        """Make all waits stop, with an error."""
        with self._lock:
            if self._ended is None:
                self._ended = reason
            self._changed.notify_all()

    def both(self) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """Return this end's entries, and the other end's."""
        with self._lock:
            return dict(self._ours), dict(self._theirs)

    # What gloo calls.

    def set(self, key: str, value: bytes) -> None:
        """Keep ``value`` for the other end."""
        with self._lock:
            self._ours[key] = bytes(value)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.wait([key])
        with self._lock:
            return self._ours.get(key) or self._theirs[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for values, for as long as it takes: the other end opens its endpoint when it does."""
        with self._lock:
            first = not self._written and any(key not in self._ours for key in keys)
            if first:
                self._written = True
                self._changed.notify_all()
        if first:
            self._on_written()
        with self._lock:
            self._changed.wait_for(lambda: self._ended is not None or self._has(keys))
            if self._ended is not None:
                raise ConnectionAbortedError("the connection is not wanted any more")

    def check(self, keys: Sequence[str]) -> bool:
        """Say whether all values are there."""
        with self._lock:
            return self._has(keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore the timeout: waits have none."""

    def has_extended_api(self) -> bool:
        """Say that there is nothing but single keys."""
        return False

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._ours or key in self._theirs for key in keys)


#: The state of a connection, as the kernel's table has it.
_ESTABLISHED = "01"
#: Length of an IPv4 address there.
_V4_DIGITS = 8
_libc = ctypes.CDLL(None)

#: Timeout of rank 1's connecting: the other end listens already, unless it is gone. Gloo gives rank 0 five
#: times as long to notice the connection.
_TO_CONNECT = timedelta(seconds=5)
#: A transfer takes as long as its reader computes. Gloo breaks a connection if a transfer times out, so none
#: does: a transfer that has to end is cut.
_NEVER = timedelta(days=100)


class Pair:
    """Group of two processes, made for one edge and one of its readers. All methods but :meth:`cut` wait, and
    are called on one thread."""

    def __init__(self, rendezvous: Rendezvous, pair_addresses: PairAddresses) -> None:
        """Connect with the other end.

        This cannot be interrupted once the rendezvous has told where the other end is. So rank 0 must not be
        told before rank 1 is connected: then nothing is left to wait for.
        """
        options = ProcessGroupGloo._Options()
        options._devices = [_device(pair_addresses.addresses[pair_addresses.rank])]
        options._timeout = _TO_CONNECT
        options._threads = 1
        self._group: Any = ProcessGroupGloo(rendezvous, pair_addresses.rank, 2, options)
        self._other = 1 - pair_addresses.rank
        self._socket = _connection(pair_addresses, *rendezvous.both())
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
        """Make waits at both ends stop at once, with an error. Any thread may call this. Gloo's own ``abort``
        does not end a wait for a process that is stopped."""
        self._is_cut = True
        self._socket.shut_down()
        work = self._work
        if work is not None:
            abort(work)

    def close(self) -> None:
        """Release the sockets and gloo's threads."""
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


def _device(address: str) -> Any:
    """Make gloo's listening socket, at that address alone, and its thread. A device serves one pair, so the
    pair's connection can be recognized by its ports."""
    try:
        # The connection must be there when the group is, whatever the environment says.
        return ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
    except TypeError:  # an older torch, which always connects at once
        return ProcessGroupGloo.create_device(hostname=address)


class _Connection:
    """Duplicate of a connected socket of gloo's, used to shut it down. It is no Python socket: the
    constructor of one may change how the shared socket waits."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptors.own(os.dup(descriptor))

    def shut_down(self) -> None:
        """End all reads and writes of the connection, at both ends. It may be down already."""
        if self._descriptor >= 0:
            _libc.shutdown(self._descriptor, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the duplicate."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _connection(
    pair_addresses: PairAddresses, ours: dict[str, bytes], theirs: dict[str, bytes]
) -> _Connection:
    """Duplicate the connection between two ends with these entries. Rank 1 has called rank 0.

    Descriptors are recognized by the kernel's data on them, and no other one is touched: closing a duplicate
    of a file, for example, would release the locks that the process has on it.
    """
    called = _listens(
        pair_addresses.addresses[0], (theirs if pair_addresses.rank else ours).values()
    )
    inodes = set(_connections(called, away=bool(pair_addresses.rank)))
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed by now
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket" and inode.strip("[]") in inodes:
                return _Connection(int(name))
    raise ConnectionError("gloo's connection is not to be found among this process's descriptors")


def _connections(called: set[tuple[str, int]], away: bool) -> Iterator[str]:
    """Find the inodes of sockets whose connection was ``called`` by address and port: at the other end
    (``away``), or at this one. A device serves one pair, so no other connection has its port."""
    table = "tcp6" if any(len(address) > _V4_DIGITS for address, _ in called) else "tcp"
    with open(f"/proc/self/net/{table}") as lines:
        next(lines)
        for line in lines:
            fields = line.split()
            address, port = fields[2 if away else 1].split(":")
            if fields[3] == _ESTABLISHED and (address, int(port, 16)) in called:
                yield fields[9]


def _listens(address: str, written: Iterable[bytes]) -> set[tuple[str, int]]:
    """Find the address and the ports at which an end listens, in the entries that gloo has written. The
    address is in the format of the kernel's table."""
    packed = ipaddress.ip_address(address).packed
    v4 = len(packed) == 4
    family, gap = (socket.AF_INET, b"") if v4 else (socket.AF_INET6, b".{4}")
    begins = re.escape(int(family).to_bytes(2, sys.byteorder))
    found = re.compile(begins + b"(..)" + gap + re.escape(packed), re.DOTALL)
    words = [packed[at : at + 4] for at in range(0, len(packed), 4)]
    known = "".join([f"{int.from_bytes(word, sys.byteorder):08X}" for word in words])
    return {(known, int.from_bytes(port, "big")) for one in written for port in found.findall(one)}


# Abort of a transfer that gloo itself forgets. If a connection ends, gloo fails the transfers that have not
# begun. It does not fail one that is half done (`Pair::signalException` passes over it), and a wait for that
# one never returns. Its C++ class has an `abort` for this, which is not exposed to Python.

#: Classes of the objects that ``ProcessGroupGloo.send`` and ``recv`` return, as in their symbols.
_CLASSES = "N4c10d16ProcessGroupGloo8SendWork", "N4c10d16ProcessGroupGloo8RecvWork"
#: Size of the header in front of the functions in a table of virtual functions.
_HEADER = 2 * ctypes.sizeof(ctypes.c_void_p)


def abort(work: Any) -> bool:
    """Make a wait for a transfer stop, now or when it begins. Any thread may call this.

    ``False``: this torch has no such function, or stores its objects in another way. Nothing was done.
    """
    # pybind11 has the address of the object right behind Python's own fields.
    address = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
    if not address:
        return False
    function = _functions().get(ctypes.c_void_p.from_address(address).value or 0)
    if function is None:
        return False
    function(ctypes.c_void_p(address))
    return True


@cache
def _functions() -> dict[int, Any]:
    """Find the functions. Each is keyed by the virtual table with which an object of its class begins."""
    found: dict[int, Any] = {}
    try:
        library = ctypes.CDLL(os.path.join(torch.__path__[0], "lib", "libtorch_cpu.so"))
        for name in _CLASSES:
            table = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{name}E"))
            function = library[f"_Z{name}5abortEv"]
            function.argtypes, function.restype = (ctypes.c_void_p,), None
            found[table + _HEADER] = function
    except (OSError, AttributeError, ValueError):
        return {}
    return found
