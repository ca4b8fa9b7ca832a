"""Fetches of other nodes' memory, for the processes of this one: once for all who want the same at about the
same time.

A keeper may write to its value at any time, and a later fetch must see that. So a process that asks while a
value is on its way, or soon after, does not just get the same bytes. They are compared with the keeper's
value of that moment, for which only digests travel, and fetched again if it differs.

A value is put where it is wanted: each waiting process has made a buffer for it, in a file.
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
from conveyor.runtime.remote_memory import Brought, ReceiveBuffer, ReceiveFile, Wanted
from conveyor.runtime.stored_values import StoreSnapshot
from conveyor.worker.remote_memory import Come, GiveUp, Hold, LeaseThere, ToNode, Want

#: Bytes that are copied from one file to another at a time.
_COPIED = 1 << 20


class Waiter:
    """Process that waits for a value."""

    __slots__ = ("_fd", "at", "gave_up", "progress", "refused", "tell")

    def __init__(
        self,
        buffer: ReceiveBuffer | ReceiveFile | None,
        tell: Callable[[Brought], object],
        progress: Callable[[int], object] = lambda _: None,
    ) -> None:
        """``buffer``: where it is to be put; ``None``: it is told with the news. ``tell(brought)`` is called
        once, by any thread. ``progress(done)`` is told how many bytes there are."""
        self._fd = -1 if buffer is None else descriptors.duplicate(buffer.fd)
        self.at = 0 if buffer is None else buffer.at
        self.tell, self.progress = tell, progress
        #: Whether the process has given up. Once it has been told so, its buffer is not written to.
        self.gave_up = False
        #: The outcome for this process where its buffer could not be written to.
        self.refused: Brought | None = None

    @property
    def has_buffer(self) -> bool:
        return self._fd >= 0

    @property
    def waits(self) -> bool:
        """Whether the process still wants what comes."""
        return not self.gave_up and self.refused is None

    def put(self, piece: memoryview | bytes, at: int) -> None:
        """Write a piece of the value. If the buffer cannot be written to, this waiter alone has failed: the
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
        """Tell the process that the value has come, or never will. Nothing is written to the buffer from now
        on."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        # The receiver of the news may hold this object, and has the buffer: no cycle is to keep that alive.
        tell, self.tell = self.tell, lambda _: None
        tell(brought)


def failure(error: Exception) -> Brought:
    """Return what waiting processes are told after ``error``."""
    number = getattr(error, "errno", None) or errno.EIO
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Brought(None, number, why)


NOBODY_WAITS = Brought(None, errno.ECANCELED, "nobody waits for it any more")


class Fetch(Struct, eq=False):
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
        because nothing is written to its buffer; otherwise the writer tells it."""
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
        """Return the content of the file if a waiting process has no buffer for it; otherwise ``None``."""
        if all(one.has_buffer for one in self.waiting):
            return None
        return os.pread(self.file, self.size, 0)

    def keep(self, data: bytes | None) -> None:
        """Keep a copy in a file, if there is room for one: of ``data``, or of what a waiter's buffer has."""
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
#: at most. A keeper's node that has no room to read with does not tell when it has.
_MOST_BREAKS, _FIRST_PAUSE, _LONGEST_PAUSE = 10, 0.01, 0.1
#: Values that come from one node at the same time, each over a connection of its own; and seconds that a
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
        run: Callable[[Source, Fetch], object],
        expire: Callable[[float], float | None],
    ) -> None:
        """``dial()``: a new connection. ``run(source, fetch)`` runs one. ``expire(now)`` lets go of
        what has been kept long enough, and says when there will be more of that, if ever."""
        super().__init__(dial, _unreachable, _MOST_AT_ONCE)
        self._run, self._expire = run, expire
        self._fetches: deque[Fetch] = deque()
        # Reentrant: a signal handler may fetch something while its thread puts a fetch there.
        self._queue_lock = threading.RLock()
        self._arrival = threading.Condition(self._queue_lock)
        self._workers = self._resting = 0

    def put(self, fetch: Fetch) -> None:
        """Queue a fetch, to be fetched in its turn."""
        with self._queue_lock:
            self._fetches.append(fetch)
        self.look()

    def look(self) -> None:
        """Make sure that a thread fetches what is queued. If no thread can be had, the caller's thread does
        it."""
        with self._queue_lock:
            self._arrival.notify()
            needed = len(self._fetches) > self._resting and self._workers < _MOST_AT_ONCE
            if needed:
                self._workers += 1
        if needed:
            try:
                threads.start(self._work, "fetch")
            except SystemLimitError:  # no thread is to be had: whoever waits is not left alone
                with self._queue_lock:
                    self._workers -= 1
                    nobody = not self._workers
                if nobody:
                    self._work_off()
                    self._expire(math.inf)  # there is nobody to do it later

    def close(self) -> None:
        """End all fetches: those that are queued fail."""
        super().close()
        with self._queue_lock:
            self._arrival.notify_all()

    def _work(self) -> None:
        try:
            while self._is_worth_waiting():
                self._work_off()
        except BaseException:
            with self._queue_lock:
                self._workers -= 1
            raise

    def _work_off(self) -> None:
        while True:
            with self._queue_lock:
                if not self._fetches:
                    return
                fetch = self._fetches.popleft()
            self._run(self, fetch)

    def _is_worth_waiting(self) -> bool:
        """Wait for a fetch. False: none has come for some time, and nothing is kept, so the thread ends."""
        until = _core.monotonic() + _IDLE
        while True:
            now = _core.monotonic()
            expires = self._expire(now)
            with self._queue_lock:
                if self._fetches:
                    return True
                if self._closed.is_set() or (now >= until and expires is None):
                    self._workers -= 1
                    return False
                ends = [end for end in (until, expires) if end is not None and end > now]
                self._resting += 1
                try:
                    self._arrival.wait(min(ends) - now if ends else 0.0)
                finally:
                    self._resting -= 1

    def run(self, fetch: Fetch) -> bytes | None:
        """Fetch the value and put it where it is wanted. Returns the value if some waiter has no buffer and
        no file has it. ``OSError`` if it cannot be had."""
        wanted, size, at = fetch.wanted, fetch.size, 0
        needs = fetch.file < 0 and any(not one.has_buffer for one in fetch.waiting)
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
                    fetch.put(part, at)
                at += came
                if not fetch.is_wanted:
                    raise _NotWanted
            if at < size:
                raise ConnectionError("less has come than was asked for")

        self._ask(fetch, take, lambda: at)
        return bytes(data) if needs else None

    def is_same(self, fetch: Fetch) -> bool:
        """Whether the keeper's value still equals the one in the fetch's file."""
        came: list[bytes] = []
        expected = list(_digests(fetch.wanted, fetch.file))

        def take(sock: socket.socket) -> None:
            came.clear()
            sock.sendall(requested(fetch.wanted, 0, digests=True))
            while (some := _hear(sock)) > 0:
                if some != DIGEST.size or len(came) == len(expected):
                    raise ConnectionError("more has come than was asked for")
                came.append(hear(sock, some))

        self._ask(fetch, take, lambda: 0)
        return came == expected or not fetch.size

    def _ask(
        self, fetch: Fetch, take: Callable[[socket.socket], None], at: Callable[[], int]
    ) -> None:
        """Have ``take`` talk over a connection, and over another one if that breaks. ``at()``: how far
        ``take`` has come."""
        breaks, before, pauses = 0, 0, Pauses(_FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            sock = None
            try:
                sock = self._take()
                fetch.talks = sock
                if not fetch.is_wanted:  # maybe before that was known
                    raise _NotWanted
                take(sock)
                fetch.talks = None
                self._give_back(sock)
                return
            except _Refused as error:
                assert sock is not None
                fetch.talks = None
                self._give_back(sock)
                raise OSError(error.args[0], os.strerror(error.args[0])) from None
            except _Unreachable as error:
                raise OSError(errno.EHOSTUNREACH, f"its host cannot be reached: {error}") from error
            except (OSError, HandshakeError, _NotWanted) as error:
                fetch.talks = None
                self._end(sock)
                if not fetch.is_wanted:
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
                fetch.talks = None
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
        node_of: Callable[[int], int | None],
        dial: Callable[[int], socket.socket],
        note: Callable[[int, int, int], object],
        own: int = 0,
        stored: Callable[[], list[StoreSnapshot]] = list,
    ) -> None:
        """``node_of(slot)``: the number of the node of the process in that slot; ``None``: it has none.
        ``dial(node)``: a new connection to that node's ``Memories``. ``note(slot, number, done)`` is told how
        many bytes there are of the value of that number, for the process in that slot. ``own``, ``stored()``:
        the slot of this node's own process, and what processes of other nodes keep, where it is one of the
        session's."""
        self._node_of, self._dial, self.stored = node_of, dial, stored
        self.note, self._own = note, own
        # Reentrant: a signal handler may fetch something while its thread does.
        self._lock = threading.RLock()
        #: How often memory has come, and how many bytes.
        self.transfers = self.bytes = 0
        self._fetches: dict[Wanted, Fetch] = {}
        #: Values that have come lately, and until when they count as such.
        self._lately: dict[Wanted, float] = {}
        self._sources: dict[int, Source] = {}
        self._services: set[RemoteMemoryService] = set()
        self._lost: set[int] = set()
        self._closed = False

    def fetch(
        self, wanted: Wanted, buffer: ReceiveBuffer | None, tell: Callable[[Brought], object]
    ) -> Callable[[], object]:
        """See ``runtime.remote_memory.RemoteMemory``."""
        return self.fetch_for(
            wanted, Waiter(buffer, tell, partial(self.note, self._own, wanted.number))
        )

    def introduce(self, process: Reader) -> bool:
        """Return false; see ``runtime.remote_memory.RemoteMemory``. A node that asks itself is the driver's,
        and knows all processes."""
        return False

    def serve(self, sock: socket.socket) -> None:
        """Fetch what a process of this node asks for over ``sock``, which is the node's from now on."""
        service = RemoteMemoryService(self, sock, self._over)
        with self._lock:
            self._services.add(service)
            closed = self._closed
        if closed or service.connection.ended:
            service.connection.hang_up()
            self._over(service)

    def fetch_for(self, wanted: Wanted, waiter: Waiter) -> Callable[[], object]:
        """Fetch a value for ``waiter``, who is told once, by any thread. Returns the function that gives the
        wait up: the waiter is told that, too."""
        try:
            source = self._source(wanted)
        except OSError as error:
            waiter.done(failure(error))
            return lambda: None
        with self._lock:
            fetch = self._fetches.get(wanted)
            if fetch is None:
                shared = self._lately.get(wanted, 0.0) > _core.monotonic()
                fetch = self._fetches[wanted] = Fetch(wanted, wanted.size, [waiter], [], shared)
            elif fetch.keeps_until:
                fetch.keeps_until = 0.0
                fetch.waiting = [waiter]
            else:
                fetch.late.append(waiter)
                fetch.shared = True
            begins = fetch.waiting == [waiter]
        if begins:
            source.put(fetch)
        else:
            source.look()
        return lambda: self._give_up(fetch, waiter)

    def troubles(self) -> dict[int, str]:
        """Return why connecting to a node currently fails, by node; see :attr:`Supply.trouble`."""
        with self._lock:
            sources = list(self._sources.items())
        return {node: source.trouble for node, source in sources if source.trouble}

    def lose(self, node: int) -> None:
        """Forget a node that is lost, and let go of all copies that are kept, those of other nodes too."""
        with self._lock:
            self._lost.add(node)
            source = self._sources.pop(node, None)
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

    def _give_up(self, fetch: Fetch, waiter: Waiter) -> None:
        with self._lock:
            at_once = fetch.give_up(waiter)
        if at_once:
            waiter.done(NOBODY_WAITS)

    def _run(self, source: Source, fetch: Fetch) -> None:
        """Fetch the value for all who want it by now. Runs on a thread of the source's."""
        going = True
        while going:
            try:
                brought = self._brought(source, fetch)
            except Exception as failed:  # whatever it is, they wait
                fetch.close()
                brought = failure(failed)
            with self._lock:
                waiters, fetch.waiting, fetch.late = fetch.waiting, fetch.late, []
                going = bool(fetch.waiting)
                if not going:
                    self._keep(source, fetch)
            for waiter in waiters:
                waiter.done(NOBODY_WAITS if waiter.gave_up else waiter.refused or brought)

    def _brought(self, source: Source, fetch: Fetch) -> Brought:
        if not fetch.is_wanted:
            raise OSError(errno.ECANCELED, NOBODY_WAITS.why)
        if fetch.file >= 0 and source.is_same(fetch):
            fetch.copy()
            return Brought(fetch.small())
        fetch.close()
        if fetch.shared and fetch.size >= LINGER_FROM:
            fetch.open()
        data = source.run(fetch)
        with self._lock:
            self.transfers, self.bytes = self.transfers + 1, self.bytes + fetch.size
            is_wanted = bool(fetch.late)
        if is_wanted and fetch.file < 0:
            fetch.keep(data)
        return Brought(data)

    def _keep(self, source: Source, fetch: Fetch) -> None:
        """Keep a fetch that nobody wants any more, since others may soon. Call with the lock."""
        now = _core.monotonic()
        for wanted in [one for one, until in self._lately.items() if until <= now]:
            del self._lately[wanted]
        if fetch.size >= LINGER_FROM:
            self._lately[fetch.wanted] = now + LINGER
        if fetch.file < 0 or fetch.size < LINGER_FROM or source.closed:
            fetch.close()
            del self._fetches[fetch.wanted]
            return
        cached = [one for one in self._fetches.values() if one.keeps_until]
        if len(cached) >= _MOST_LINGERING:
            self._drop(min(cached, key=lambda one: one.keeps_until))
        fetch.keeps_until = now + LINGER

    def _drop(self, fetch: Fetch) -> None:
        """Drop a fetch and its copy. Call with the lock."""
        fetch.close()
        del self._fetches[fetch.wanted]

    def _expire(self, now: float) -> float | None:
        """Drop copies that have been kept long enough. Returns when the next one expires, or ``None``."""
        with self._lock:
            cached = [one for one in self._fetches.values() if one.keeps_until]
            for one in cached:
                if one.keeps_until <= now:
                    self._drop(one)
            return min((one.keeps_until for one in cached if one.keeps_until > now), default=None)

    def _source(self, wanted: Wanted) -> Source:
        node = self._node_of(wanted.process[0])
        with self._lock:
            if node is None or node in self._lost:
                raise ProcessLookupError(errno.ESRCH, "its host is lost, or it has ended")
            if self._closed:
                raise ConnectionError(errno.ECONNRESET, "the session is over")
            source = self._sources.get(node)
            if source is None:
                number = node
                source = self._sources[node] = Source(
                    lambda: self._dial(number), self._run, self._expire
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

    def _on_message(self, message: ToNode, fds: list[int]) -> None:
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
            buffer = None if message.at is None else ReceiveFile(all_of(fds, 1)[0], message.at)
            waiter = Waiter(buffer, tell, note)
        except OSError as error:  # no descriptor is left here, or the file has not come
            tell(failure(error))
            return
        give_up = self._fetches.fetch_for(message.wanted, waiter)
        self._given_up[number] = give_up
        if came:  # maybe before that was noted
            self._given_up.pop(number, None)

    def _give_up(self, message: GiveUp, _fds: list[int]) -> None:
        give_up = self._given_up.get(message.number)
        if give_up is not None:
            give_up()

    #: The handler of each kind of message.
    handlers: ClassVar[
        Mapping[type[ToNode], Callable[[RemoteMemoryService, Any, list[int]], None]]
    ] = {Hold: _hold, Want: _want, GiveUp: _give_up}
