"""Fetches of other nodes' memory, for the processes of this one: once for all who want the same at about the
same time.

A keeper may write to its value at any time, and a later fetch must see that. So a process that asks while a
value is on its way, or soon after, does not just get the same bytes. They are compared with the keeper's
value of that moment, for which only digests travel, and fetched again if it differs.

A value is put where it is wanted: each waiting process has made room for it, in a file.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from msgspec import Struct

from conveyor import _core, descriptors
from conveyor.cluster.handshake import HandshakeError
from conveyor.cluster.servers import DIGEST, PIECE, Supply, hear_answer, pieces, requested
from conveyor.cluster.serving import break_off, hear, hear_into
from conveyor.codec import Reader
from conveyor.exceptions import SystemLimitError
from conveyor.pauses import Pauses
from conveyor.runtime import threads
from conveyor.runtime.messages import Connection, all_of
from conveyor.runtime.remote_memory import Brought, Room, RoomAt, Wanted
from conveyor.runtime.stored_values import KeptAt
from conveyor.worker.remote_memory import Come, GiveUp, Hold, LeaseThere, ToHost, Want

#: Bytes that are copied from one file to another at a time.
_COPIED = 1 << 20


class Waiter:
    """Process that waits for a value."""

    __slots__ = ("_fd", "at", "gave_up", "progress", "refused", "tell")

    def __init__(
        self,
        room: Room | RoomAt | None,
        tell: Callable[[Brought], object],
        progress: Callable[[int], object] = lambda _: None,
    ) -> None:
        """``room``: where it is to be put; ``None``: it is told with the news. ``tell(brought)`` is called
        once, by any thread. ``progress(done)`` is told how many bytes there are."""
        self._fd = -1 if room is None else descriptors.duplicate(room.fd)
        self.at = 0 if room is None else room.at
        self.tell, self.progress = tell, progress
        #: Whether the process has given up. Once it has been told so, its room is not written to.
        self.gave_up = False
        #: The outcome for this process where its room could not be written to.
        self.refused: Brought | None = None

    @property
    def has_room(self) -> bool:
        return self._fd >= 0

    @property
    def waits(self) -> bool:
        """Whether the process still wants what comes."""
        return not self.gave_up and self.refused is None

    def put(self, piece: memoryview | bytes, at: int) -> None:
        """Write a piece of the value. If the room cannot be written to, this waiter alone has failed: the
        others go on."""
        if self._fd >= 0:
            try:
                _write(self._fd, piece, self.at + at)
            except (OSError, OverflowError) as error:
                self.refused = failure(error)
                return
        self.progress(at + len(piece))

    def read(self, size: int, at: int) -> bytes:
        """Read a part of what has been put."""
        return os.pread(self._fd, size, self.at + at)

    def done(self, brought: Brought) -> None:
        """Tell the process that the value has come, or never will. Nothing is written to the room from now
        on."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        # The receiver of the news may hold this object, and has the room: no cycle is to keep that alive.
        tell, self.tell = self.tell, lambda _: None
        tell(brought)


def failure(error: Exception) -> Brought:
    """Return what waiting processes are told after ``error``."""
    number = getattr(error, "errno", None) or errno.EIO
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Brought(None, number, why)


NOBODY_WAITS = Brought(None, errno.ECANCELED, "nobody waits for it any more")


class Flight(Struct, eq=False):
    """waiting: who gets what is on its way. late: who has come meanwhile. shared: others may want it soon
    after. file: where a copy is, that nobody writes to; -1: nowhere. keeps_until: that is kept so long for
    others; 0: it is on its way. talks: the connection over which it comes."""

    wanted: Wanted
    size: int
    waiting: list[Waiter]
    late: list[Waiter]
    shared: bool
    file: int = -1
    keeps_until: float = 0.0
    talks: socket.socket | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits for the value that is on its way."""
        return any(one.waits for one in self.waiting)

    def give_up(self, waiter: Waiter) -> bool:
        """Give up, since the waiter's process wants the value no more. Return whether it may be told at once,
        because nothing is written to its room; otherwise the writer tells it."""
        if waiter in self.late:
            self.late.remove(waiter)
            return True
        waiter.gave_up = True
        if waiter in self.waiting and not self.is_wanted and self.talks is not None:
            break_off(self.talks)
        return False

    def put(self, piece: memoryview, at: int) -> None:
        """Write a piece that has come to the file and to all who wait."""
        if self.file >= 0:
            try:
                _write(self.file, piece, at)
            except OSError:  # no memory for a copy: whoever comes later fetches it, too
                self.close()
        for one in self.waiting:
            if one.waits:
                one.put(piece, at)

    def copy(self) -> None:
        """Copy the value from the file to all who wait."""
        at = 0
        while at < self.size:
            piece = os.pread(self.file, min(_COPIED, self.size - at), at)
            if not piece:
                raise OSError(errno.EIO, "a part of the copy that was kept of it is gone")
            for one in self.waiting:
                if one.waits:
                    one.put(piece, at)
            at += len(piece)

    def small(self) -> bytes | None:
        """Return the content of the file if a waiting process has no room for it; otherwise ``None``."""
        if all(one.has_room for one in self.waiting):
            return None
        return os.pread(self.file, self.size, 0)

    def keep(self, data: bytes | None) -> None:
        """Keep a copy in a file, if there is room for one: of ``data``, or of what a waiter's room has."""
        self.open()
        if self.file < 0:
            return
        source = next((one for one in self.waiting if one.waits), None)
        try:
            if data is not None:
                _write(self.file, data, 0)
            elif source is None:  # just now: nobody has all of it
                self.close()
            else:
                for at in range(0, self.size, _COPIED):
                    _write(self.file, source.read(min(_COPIED, self.size - at), at), at)
        except OSError:
            self.close()

    def open(self) -> None:
        """Make a file for a copy, if one is to be had."""
        if self.file < 0:
            with suppress(OSError):
                self.file = descriptors.memory_file("conveyor-value")

    def close(self) -> None:
        """Have none."""
        fd, self.file = self.file, -1
        if fd >= 0:
            os.close(fd)


def _write(fd: int, piece: memoryview | bytes, at: int) -> None:
    while piece:
        done = os.pwrite(fd, piece, at)
        piece, at = piece[done:], at + done


#: How often a connection may break before a byte comes, and seconds before it is tried again: at first, and
#: at most. A keeper's host that has no room to read with does not tell when it has.
_MOST_BREAKS, _FIRST_PAUSE, _LONGEST_PAUSE = 10, 0.01, 0.1
#: Values that come from one host at the same time, each over a connection of its own; and seconds that a
#: thread waits for the next one.
_MOST_AT_ONCE, _IDLE = 4, 5.0


class _Unreachable(Exception):
    """Failure to connect to a node that is there."""


def _unreachable(why: str) -> None:
    raise _Unreachable(why)


class _Refused(Exception):
    """Failure of the keeper's node to read the value: an error of the system."""


class _NotWanted(Exception):
    """Raised when nobody waits for the value any more."""


class Source(Supply):
    """Memory of the processes of another node, as this node fetches it."""

    def __init__(
        self,
        dial: Callable[[], socket.socket],
        fly: Callable[[Source, Flight], object],
        expire: Callable[[float], float | None],
    ) -> None:
        """``dial()``: a new connection. ``fly(source, flight)`` brings one here. ``expire(now)`` lets go of
        what has been kept long enough, and says when there will be more of that, if ever."""
        super().__init__(dial, _unreachable, _MOST_AT_ONCE)
        self._fly, self._expire = fly, expire
        self._flights: deque[Flight] = deque()
        # Reentrant: a signal handler may fetch something while its thread puts a flight there.
        self._turn = threading.RLock()
        self._arrival = threading.Condition(self._turn)
        self._workers = self._resting = 0

    def put(self, flight: Flight) -> None:
        """Queue a flight, to be fetched in its turn."""
        with self._turn:
            self._flights.append(flight)
        self.look()

    def look(self) -> None:
        """Make sure that a thread fetches what is queued. If no thread can be had, the caller's thread does
        it."""
        with self._turn:
            self._arrival.notify()
            needed = len(self._flights) > self._resting and self._workers < _MOST_AT_ONCE
            if needed:
                self._workers += 1
        if needed:
            try:
                threads.start(self._work, "fetch")
            except SystemLimitError:  # no thread is to be had: whoever waits is not left alone
                with self._turn:
                    self._workers -= 1
                    nobody = not self._workers
                if nobody:
                    self._work_off()
                    self._expire(math.inf)  # there is nobody to do it later

    def close(self) -> None:
        """End all fetches: those that are queued fail."""
        super().close()
        with self._turn:
            self._arrival.notify_all()

    def _work(self) -> None:
        try:
            while self._is_worth_waiting():
                self._work_off()
        except BaseException:
            with self._turn:
                self._workers -= 1
            raise

    def _work_off(self) -> None:
        while True:
            with self._turn:
                if not self._flights:
                    return
                flight = self._flights.popleft()
            self._fly(self, flight)

    def _is_worth_waiting(self) -> bool:
        """Wait for a flight. False: none has come for some time, and nothing is kept, so the thread ends."""
        until = _core.monotonic() + _IDLE
        while True:
            now = _core.monotonic()
            kept = self._expire(now)
            with self._turn:
                if self._flights:
                    return True
                if self._closed.is_set() or (now >= until and kept is None):
                    self._workers -= 1
                    return False
                ends = [end for end in (until, kept) if end is not None and end > now]
                self._resting += 1
                try:
                    self._arrival.wait(min(ends) - now if ends else 0.0)
                finally:
                    self._resting -= 1

    def bring(self, flight: Flight) -> bytes | None:
        """Fetch the value and put it where it is wanted. Returns the value if some waiter has no room and
        no file has it. ``OSError`` if it cannot be had."""
        wanted, size, at = flight.wanted, flight.size, 0
        needs = flight.file < 0 and any(not one.has_room for one in flight.waiting)
        data = bytearray(size if needs else 0)
        piece = memoryview(bytearray(min(size, PIECE)))

        def take(sock: socket.socket) -> None:
            nonlocal at
            sock.sendall(requested(wanted, at))
            while (came := _hear(sock)) > 0:
                if came > len(piece) or came > size - at:
                    raise ConnectionError("more has come than was asked for")
                with piece[:came] as part:
                    hear_into(sock, part)
                    if needs:
                        data[at : at + came] = part
                    flight.put(part, at)
                at += came
                if not flight.is_wanted:
                    raise _NotWanted
            if at < size:
                raise ConnectionError("less has come than was asked for")

        self._ask(flight, take, lambda: at)
        return bytes(data) if needs else None

    def is_same(self, flight: Flight) -> bool:
        """Whether the keeper's value still equals the one in the flight's file."""
        came: list[bytes] = []
        kept = list(_digests(flight.wanted, flight.file))

        def take(sock: socket.socket) -> None:
            came.clear()
            sock.sendall(requested(flight.wanted, 0, digests=True))
            while (some := _hear(sock)) > 0:
                if some != DIGEST.size or len(came) == len(kept):
                    raise ConnectionError("more has come than was asked for")
                came.append(hear(sock, some))

        self._ask(flight, take, lambda: 0)
        return came == kept or not flight.size

    def _ask(
        self, flight: Flight, take: Callable[[socket.socket], None], at: Callable[[], int]
    ) -> None:
        """Have ``take`` talk over a connection, and over another one if that breaks. ``at()``: how far
        ``take`` has come."""
        breaks, before, pauses = 0, 0, Pauses(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            sock = None
            try:
                sock = self._take()
                flight.talks = sock
                if not flight.is_wanted:  # maybe before that was known
                    raise _NotWanted
                take(sock)
                flight.talks = None
                self._give_back(sock)
                return
            except _Refused as error:
                assert sock is not None
                flight.talks = None
                self._give_back(sock)
                raise OSError(error.args[0], os.strerror(error.args[0])) from None
            except _Unreachable as error:
                raise OSError(errno.EHOSTUNREACH, f"its host cannot be reached: {error}") from error
            except (OSError, HandshakeError, _NotWanted) as error:
                flight.talks = None
                self._end(sock)
                if not flight.is_wanted:
                    raise OSError(errno.ECANCELED, "nobody waits for it any more") from None
                breaks += 1
                if at() != before:
                    breaks, before = 1, at()
                    pauses.begin_anew()
                if self._closed.wait(pauses.next()):
                    raise ConnectionError(errno.ECONNRESET, f"its host is lost: {error}") from error
                if breaks >= _MOST_BREAKS:
                    text = f"the connection to its host breaks again and again: {error}"
                    raise ConnectionError(errno.ECONNABORTED, text) from error
            except BaseException:
                flight.talks = None
                self._end(sock)
                raise


def _hear(sock: socket.socket) -> int:
    error, size = hear_answer(sock)
    if error:
        raise _Refused(error)
    return size


def _digests(wanted: Wanted, file: int) -> Iterator[bytes]:
    at = 0
    for _, nbytes in pieces(wanted):
        piece = os.pread(file, nbytes, at)
        yield DIGEST.pack(_core.checksum_of(_core.ranges_of([piece])))
        at += nbytes


#: A value of at least so many bytes that is wanted again within so many seconds is kept as long as somebody
#: wants it within so many seconds; and so many values at a time.
LINGER, LINGER_FROM, _MOST_LINGERING = 1.0, 1 << 20, 8


class Fetches:
    """Fetches of the processes of this node from all other nodes."""

    def __init__(
        self,
        host_of: Callable[[int], int | None],
        dial: Callable[[int], socket.socket],
        note: Callable[[int, int, int], object],
        own: int = 0,
        kept: Callable[[], list[KeptAt]] = list,
    ) -> None:
        """``host_of(slot)``: the number of the host of the process in that slot; ``None``: it has none.
        ``dial(host)``: a new connection to that host's ``Memories``. ``note(slot, number, done)`` is told how
        many bytes there are of the value of that number, for the process in that slot. ``own``, ``kept()``:
        the slot of this host's own process, and what processes of other hosts keep, where it is one of the
        session's."""
        self._host_of, self._dial, self.kept = host_of, dial, kept
        self.note, self._own = note, own
        # Reentrant: a signal handler may fetch something while its thread does.
        self._lock = threading.RLock()
        #: How often memory has come, and how many bytes.
        self.transfers = self.bytes = 0
        self._flights: dict[Wanted, Flight] = {}
        #: Values that have come lately, and until when they count as such.
        self._lately: dict[Wanted, float] = {}
        self._sources: dict[int, Source] = {}
        self._services: set[RemoteMemoryService] = set()
        self._lost: set[int] = set()
        self._closed = False

    def fetch(
        self, wanted: Wanted, room: Room | None, tell: Callable[[Brought], object]
    ) -> Callable[[], object]:
        """See ``runtime.remote_memory.RemoteMemory``."""
        return self.bring(wanted, Waiter(room, tell, partial(self.note, self._own, wanted.number)))

    def introduce(self, process: Reader) -> bool:
        """Return false; see ``runtime.remote_memory.RemoteMemory``. A node that asks itself is the driver's,
        and knows all processes."""
        return False

    def serve(self, sock: socket.socket) -> None:
        """Fetch what a process of this host asks for over ``sock``, which is the host's from now on."""
        service = RemoteMemoryService(self, sock, self._over)
        with self._lock:
            self._services.add(service)
            closed = self._closed
        if closed or service.connection.ended:
            service.connection.hang_up()
            self._over(service)

    def bring(self, wanted: Wanted, waiter: Waiter) -> Callable[[], object]:
        """Fetch a value for ``waiter``, who is told once, by any thread. Returns the function that gives the
        wait up: the waiter is told that, too."""
        try:
            source = self._source(wanted)
        except OSError as error:
            waiter.done(failure(error))
            return lambda: None
        with self._lock:
            flight = self._flights.get(wanted)
            if flight is None:
                shared = self._lately.get(wanted, 0.0) > _core.monotonic()
                flight = self._flights[wanted] = Flight(wanted, wanted.size, [waiter], [], shared)
            elif flight.keeps_until:
                flight.keeps_until = 0.0
                flight.waiting = [waiter]
            else:
                flight.late.append(waiter)
                flight.shared = True
            begins = flight.waiting == [waiter]
        if begins:
            source.put(flight)
        else:
            source.look()
        return lambda: self._give_up(flight, waiter)

    def troubles(self) -> dict[int, str]:
        """Return why connecting to a node currently fails, by node; see :attr:`Supply.trouble`."""
        with self._lock:
            sources = list(self._sources.items())
        return {host: source.trouble for host, source in sources if source.trouble}

    def lose(self, host: int) -> None:
        """Forget a node that is lost, and let go of all copies that are kept, those of other nodes too."""
        with self._lock:
            self._lost.add(host)
            source = self._sources.pop(host, None)
        if source is not None:
            source.close()
            # The source's threads end, and nothing else would let go of its kept copies. Those of others go,
            # too.
            self._expire(math.inf)

    def close(self) -> None:
        """The session is over."""
        with self._lock:
            self._closed = True
            sources, self._sources = list(self._sources.values()), {}
            services, self._services = list(self._services), set()
        for source in sources:
            source.close()
        for service in services:
            service.connection.close()
        self._expire(math.inf)

    def _over(self, service: RemoteMemoryService) -> None:
        with self._lock:
            self._services.discard(service)

    def _give_up(self, flight: Flight, waiter: Waiter) -> None:
        with self._lock:
            at_once = flight.give_up(waiter)
        if at_once:
            waiter.done(NOBODY_WAITS)

    def _fly(self, source: Source, flight: Flight) -> None:
        """Fetch the value for all who want it by now. Runs on a thread of the source's."""
        going = True
        while going:
            try:
                brought = self._brought(source, flight)
            except Exception as failed:  # whatever it is, they wait
                flight.close()
                brought = failure(failed)
            with self._lock:
                told, flight.waiting, flight.late = flight.waiting, flight.late, []
                going = bool(flight.waiting)
                if not going:
                    self._keep(source, flight)
            for waiter in told:
                waiter.done(NOBODY_WAITS if waiter.gave_up else waiter.refused or brought)

    def _brought(self, source: Source, flight: Flight) -> Brought:
        if not flight.is_wanted:
            raise OSError(errno.ECANCELED, NOBODY_WAITS.why)
        if flight.file >= 0 and source.is_same(flight):
            flight.copy()
            return Brought(flight.small())
        flight.close()
        if flight.shared and flight.size >= LINGER_FROM:
            flight.open()
        data = source.bring(flight)
        with self._lock:
            self.transfers, self.bytes = self.transfers + 1, self.bytes + flight.size
            is_wanted = bool(flight.late)
        if is_wanted and flight.file < 0:
            flight.keep(data)
        return Brought(data)

    def _keep(self, source: Source, flight: Flight) -> None:
        """Keep a flight that nobody wants any more, since others may soon. Call with the lock."""
        now = _core.monotonic()
        for wanted in [one for one, until in self._lately.items() if until <= now]:
            del self._lately[wanted]
        if flight.size >= LINGER_FROM:
            self._lately[flight.wanted] = now + LINGER
        if flight.file < 0 or flight.size < LINGER_FROM or source.closed:
            flight.close()
            del self._flights[flight.wanted]
            return
        kept = [one for one in self._flights.values() if one.keeps_until]
        if len(kept) >= _MOST_LINGERING:
            self._drop(min(kept, key=lambda one: one.keeps_until))
        flight.keeps_until = now + LINGER

    def _drop(self, flight: Flight) -> None:
        """Drop a flight and its copy. Call with the lock."""
        flight.close()
        del self._flights[flight.wanted]

    def _expire(self, now: float) -> float | None:
        """Drop copies that have been kept long enough. Returns when the next one expires, or ``None``."""
        with self._lock:
            kept = [one for one in self._flights.values() if one.keeps_until]
            for one in kept:
                if one.keeps_until <= now:
                    self._drop(one)
            return min((one.keeps_until for one in kept if one.keeps_until > now), default=None)

    def _source(self, wanted: Wanted) -> Source:
        host = self._host_of(wanted.process[0])
        with self._lock:
            if host is None or host in self._lost:
                raise ProcessLookupError(errno.ESRCH, "its host is lost, or it has ended")
            if self._closed:
                raise ConnectionError(errno.ECONNRESET, "the session is over")
            source = self._sources.get(host)
            if source is None:
                number = host
                source = self._sources[host] = Source(
                    lambda: self._dial(number), self._fly, self._expire
                )
            return source


class RemoteMemoryService:
    """Serving end of one process's connection to its node: values that the process wants are fetched for
    it."""

    def __init__(
        self, fetches: Fetches, sock: socket.socket, over: Callable[[RemoteMemoryService], object]
    ) -> None:
        self._fetches, self._over = fetches, over
        #: For each value under way, the function that gives it up.
        self._given_up: dict[int, Callable[[], object]] = {}
        self._lease = LeaseThere()
        #: Why that has not come: nothing is written without it.
        self._refused: OSError | None = None
        self.connection = Connection(sock, "memory", self._on_message, self._on_end)

    def _on_message(self, message: ToHost, fds: list[int]) -> None:
        self.handlers[type(message)](self, message, fds)

    def _on_end(self) -> None:
        for give_up in list(self._given_up.values()):
            give_up()
        self._lease.end()
        self._over(self)

    def _hold(self, _message: Hold, fds: list[int]) -> None:
        try:
            fd = all_of(fds, 1)[0]
            self._lease.begin(socket.socket(fileno=descriptors.duplicate(fd)))
        except OSError as error:  # no descriptor is left here
            self._refused = error

    def _want(self, message: Want, fds: list[int]) -> None:
        number, came = message.number, False
        note = partial(self._fetches.note, message.slot, message.wanted.number)
        note(0)  # raises where there is no such slot

        def tell(brought: Brought) -> None:
            nonlocal came
            came = True
            self._given_up.pop(number, None)
            self.connection.send(Come(number, brought))
            self._lease.written(number)

        self._lease.writes(number)
        if self._refused is not None:
            tell(failure(self._refused))
            self.connection.soon(self.connection.hang_up)  # the next one may have it
            return
        try:
            room = None if message.at is None else RoomAt(all_of(fds, 1)[0], message.at)
            waiter = Waiter(room, tell, note)
        except OSError as error:  # no descriptor is left here, or the file has not come
            tell(failure(error))
            return
        give_up = self._fetches.bring(message.wanted, waiter)
        self._given_up[number] = give_up
        if came:  # maybe before that was noted
            self._given_up.pop(number, None)

    def _give_up(self, message: GiveUp, _fds: list[int]) -> None:
        give_up = self._given_up.get(message.number)
        if give_up is not None:
            give_up()

    #: The handler of each kind of message.
    handlers: ClassVar[
        Mapping[type[ToHost], Callable[[RemoteMemoryService, Any, list[int]], None]]
    ] = {Hold: _hold, Want: _want, GiveUp: _give_up}
