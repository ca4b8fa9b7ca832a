"""Memory of other hosts' processes, for those of this one: fetched once for all who want it at about the same
time.

Who keeps a value may write to it at any time, and whoever fetches it afterwards is to see that. So who comes
while something is on its way, or soon after it has come, does not just get that too: it is compared with what
its keeper has by then, of which only digests travel, and fetched again where that is something else.
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from msgspec import Struct

from conveyor import _core
from conveyor.codec import Reader
from conveyor.engine.net.depot import Supply, hear, hear_into
from conveyor.engine.net.handshake import HandshakeError
from conveyor.engine.net.memories import DIGEST, asked, hear_answer, pieces
from conveyor.exceptions import SystemLimitError
from conveyor.runtime import threads
from conveyor.runtime.actor.far_memory import Come, ToHost, Want, brought
from conveyor.runtime.far_memory import Brought, Wanted
from conveyor.runtime.kept import KeptAt
from conveyor.runtime.refs.connection import SHARE_FROM, Connection

#: What has come is kept for so many seconds, for others who want it, if it has so many bytes; and so many at
#: a time. Their pages are shared with whoever has got them, so that costs nothing while they are in use.
LINGER, LINGER_FROM, _MOST_LINGERING = 1.0, 1 << 20, 8
#: Seconds before a connection that has broken is tried again, and how often it may break before a byte comes.
_PAUSE, _MOST_BREAKS = 0.05, 10

#: Is called with a file, which it may duplicate, and the bytes in it; or an error of the system, and a text.
_Tell = Callable[[int, int, int, str], object]


class _Flight(Struct, eq=False):
    """waiting: who gets what is on its way. late: who has come meanwhile. lingers: it has come, and is kept
    for others; until it is told not to."""

    waiting: list[_Tell]
    late: list[_Tell]
    lingers: bool = False


class Fetches:
    """Of one host, from all others."""

    def __init__(
        self,
        host_of: Callable[[int], int | None],
        dial: Callable[[int], socket.socket],
        kept: Callable[[], list[KeptAt]] = list,
    ) -> None:
        """``host_of(slot)``: the number of the host of the process in that slot; ``None``: it has none.
        ``dial(host)``: a new connection to that host's ``Memories``. ``kept()``: what processes of other
        hosts keep, where this host's own process is one of the session's."""
        self._host_of, self._dial, self.kept = host_of, dial, kept
        self._lock = threading.Lock()
        #: Rung where one that lingers is to go on.
        self._more = threading.Condition(self._lock)
        #: How often memory has come, and how many bytes.
        self.transfers = self.bytes = 0
        self._flights: dict[Wanted, _Flight] = {}
        self._sources: dict[int, _Source] = {}
        self._services: set[FarMemoryService] = set()
        self._lost: set[int] = set()
        self._closed = False

    def fetch(self, wanted: Wanted, tell: Callable[[Brought], object]) -> None:
        """See ``runtime.far_memory.FarMemory``."""
        self.bring(
            wanted,
            lambda fd, size, error, why: tell(
                Brought(None, error, why) if error else brought(fd, size, None)
            ),
        )

    def introduce(self, process: Reader) -> bool:
        """See ``runtime.far_memory.FarMemory``. A host that asks itself is the driver's, which knows all."""
        return False

    def serve(self, sock: socket.socket) -> None:
        """See ``runtime.far_memory.HostsMemory``."""
        service = FarMemoryService(self, sock, self._over)
        with self._lock:
            self._services.add(service)
            closed = self._closed
        if closed or service.connection.ended:
            service.connection.hang_up()
            self._over(service)

    def bring(self, wanted: Wanted, tell: _Tell) -> None:
        """Fetch it; ``tell`` is called once, by any thread."""
        with self._lock:
            flight = self._flights.get(wanted)
            if flight is not None:
                flight.late.append(tell)
                self._more.notify_all()
                return
            flight = self._flights[wanted] = _Flight([tell], [])
        try:
            threads.start(self._fly, "fetch", wanted, flight)
        except SystemLimitError:  # no thread is to be had
            self._fly(wanted, flight, 0.0)

    def lose(self, host: int) -> None:
        """That host is no more."""
        with self._lock:
            self._lost.add(host)
            source = self._sources.pop(host, None)
        if source is not None:
            source.close()

    def close(self) -> None:
        """The session is over."""
        with self._lock:
            self._closed = True
            sources, self._sources = list(self._sources.values()), {}
            services, self._services = list(self._services), set()
            self._more.notify_all()
        for source in sources:
            source.close()
        for service in services:
            service.connection.close()

    def _over(self, service: FarMemoryService) -> None:
        with self._lock:
            self._services.discard(service)

    def _fly(self, wanted: Wanted, flight: _Flight, linger: float | None = None) -> None:
        fd, size, going = -1, wanted.size, True
        while going:
            error, why = 0, ""
            try:
                fd = self._again(wanted, size, fd)
            except Exception as failed:  # whatever it is, they wait
                fd = -1
                error = getattr(failed, "errno", None) or errno.EIO
                why = getattr(failed, "strerror", None) or str(failed) or type(failed).__name__
            for tell in flight.waiting:
                tell(fd, size, error, why)
            with self._lock:
                if fd >= 0 and size >= LINGER_FROM:
                    self._linger(flight, LINGER if linger is None else linger)
                flight.waiting, flight.late = flight.late, []
                going = bool(flight.waiting)
                if not going:
                    del self._flights[wanted]
        if fd >= 0:
            os.close(fd)

    def _again(self, wanted: Wanted, size: int, before: int) -> int:
        """A file with what is wanted: ``before``, which is nobody's afterwards, if that has it."""
        try:
            source = self._source(wanted)
            if before >= 0 and source.is_same(wanted, size, before):
                before, same = -1, before
                return same
            fd = source.bring(wanted, size)
        finally:
            if before >= 0:
                os.close(before)
        with self._lock:
            self.transfers, self.bytes = self.transfers + 1, self.bytes + size
        return fd

    def _linger(self, flight: _Flight, seconds: float) -> None:
        """With the lock, which is free meanwhile: until somebody wants it, or for so long."""
        others = [one for one in self._flights.values() if one.lingers]
        if len(others) >= _MOST_LINGERING:
            others[0].lingers = False
            self._more.notify_all()
        flight.lingers = True
        self._more.wait_for(
            lambda: bool(flight.late) or self._closed or not flight.lingers, seconds
        )
        flight.lingers = False

    def _source(self, wanted: Wanted) -> _Source:
        host = self._host_of(wanted.process[0])
        with self._lock:
            if host is None or host in self._lost:
                raise ProcessLookupError(errno.ESRCH, "its host is lost, or it has ended")
            if self._closed:
                raise ConnectionError(errno.ECONNRESET, "the session is over")
            source = self._sources.get(host)
            if source is None:
                number = host
                source = self._sources[host] = _Source(lambda: self._dial(number), _unreachable)
            return source


class _Unreachable(Exception):
    """No connection comes about, though the host is there."""


def _unreachable(why: str) -> None:
    raise _Unreachable(why)


class _Refused(Exception):
    """The keeper's host cannot read it: an error of the system."""


class _Source(Supply):
    """Another host's memories."""

    def bring(self, wanted: Wanted, size: int) -> int:
        """A file with it. ``OSError`` if it cannot be had."""
        fd = os.memfd_create("conveyor-value", os.MFD_CLOEXEC)
        try:
            if not size:
                self._receive(wanted, memoryview(b""))
                return fd
            os.posix_fallocate(fd, 0, size)
            with mmap.mmap(fd, size) as memory, memoryview(memory) as room:
                self._receive(wanted, room)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _receive(self, wanted: Wanted, room: memoryview) -> None:
        at = 0

        def take(sock: socket.socket) -> None:
            nonlocal at
            sock.sendall(asked(wanted, at))
            while (came := _hear(sock)) > 0:
                if came > len(room) - at:
                    raise ConnectionError("more has come than was asked for")
                hear_into(sock, room[at : at + came])
                at += came
            if at < len(room):
                raise ConnectionError("less has come than was asked for")

        self._ask(take, lambda: at)

    def is_same(self, wanted: Wanted, size: int, fd: int) -> bool:
        """Whether its keeper has now what is in that file."""
        came: list[bytes] = []

        def take(sock: socket.socket) -> None:
            came.clear()
            sock.sendall(asked(wanted, 0, digests=True))
            while (some := _hear(sock)) > 0:
                came.append(hear(sock, some))

        self._ask(take, lambda: 0)
        if not size:
            return True
        at, expected = 0, list(pieces(wanted))
        if len(came) != len(expected):
            return False
        with mmap.mmap(fd, size) as memory, memoryview(memory) as room:
            for (_, nbytes), digest in zip(expected, came, strict=True):
                with room[at : at + nbytes] as piece:
                    if DIGEST.pack(_core.checksum_of(_core.ranges_of([piece]))) != digest:
                        return False
                at += nbytes
        return True

    def _ask(self, take: Callable[[socket.socket], None], at: Callable[[], int]) -> None:
        """Have ``take`` talk over a connection, and over another one where that breaks. ``at()``: how far it
        has come."""
        breaks, before = 0, 0
        while True:
            sock = None
            try:
                sock = self._take()
                take(sock)
                self._give_back(sock)
                return
            except _Refused as error:
                assert sock is not None
                self._give_back(sock)
                raise OSError(error.args[0], os.strerror(error.args[0])) from None
            except _Unreachable as error:
                raise OSError(errno.EHOSTUNREACH, f"its host cannot be reached: {error}") from error
            except (OSError, HandshakeError) as error:
                self._end(sock)
                breaks, before = breaks + 1 if at() == before else 1, at()
                if self._closed.wait(_PAUSE):
                    raise ConnectionError(errno.ECONNRESET, f"its host is lost: {error}") from error
                if breaks >= _MOST_BREAKS:
                    text = f"the connection to its host breaks again and again: {error}"
                    raise ConnectionError(errno.ECONNABORTED, text) from error
            except BaseException:
                self._end(sock)
                raise


def _hear(sock: socket.socket) -> int:
    error, size = hear_answer(sock)
    if error:
        raise _Refused(error)
    return size


class FarMemoryService:
    """The host's end of one process's connection: what it wants is fetched."""

    def __init__(
        self, fetches: Fetches, sock: socket.socket, over: Callable[[FarMemoryService], object]
    ) -> None:
        self._fetches, self._over = fetches, over
        self.connection = Connection(sock, "memory", self._on_message, lambda: over(self))

    def _on_message(self, message: ToHost, fds: list[int]) -> None:
        self.handlers[type(message)](self, message, fds)

    def _want(self, message: Want, _fds: list[int]) -> None:
        def tell(fd: int, size: int, error: int, why: str) -> None:
            data: bytes | None = None
            file: _core.Snapshot | None = None  # which takes it along
            try:
                if not error and size < SHARE_FROM:
                    data = os.pread(fd, size, 0)
                elif not error:
                    file = _core.Snapshot.received(0, 0, size, None, fd)
            except (OSError, MemoryError) as failed:
                error = getattr(failed, "errno", None) or errno.ENOMEM
                why = str(failed)
            self.connection.send(Come(message.number, size, data, error, why), file)

        self._fetches.bring(message.wanted, tell)

    #: What is done for each kind of message.
    handlers: ClassVar[
        Mapping[type[ToHost], Callable[[FarMemoryService, Any, list[int]], None]]
    ] = {Want: _want}
