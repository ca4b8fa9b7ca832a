"""Another host, of whose processes' memory flights bring some here."""

from __future__ import annotations

import errno
import math
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator

from conveyor import _core
from conveyor.engine.net.answering import hear, hear_into
from conveyor.engine.net.depot import Supply
from conveyor.engine.net.flights import Flight
from conveyor.engine.net.handshake import HandshakeError
from conveyor.engine.net.memories import DIGEST, PIECE, asked, hear_answer, pieces
from conveyor.exceptions import SystemLimitError
from conveyor.pauses import Pauses
from conveyor.runtime import threads
from conveyor.runtime.far_memory import Wanted

#: How often a connection may break before a byte comes, and seconds before it is tried again: at first, and
#: at most. A keeper's host that has no room to read with does not tell when it has.
_MOST_BREAKS, _FIRST_PAUSE, _LONGEST_PAUSE = 10, 0.01, 0.1
#: Values that come from one host at the same time, each over a connection of its own; and seconds that a
#: thread waits for the next one.
_MOST_AT_ONCE, _IDLE = 4, 5.0


class _Unreachable(Exception):
    """No connection comes about, though the host is there."""


def _unreachable(why: str) -> None:
    raise _Unreachable(why)


class _Refused(Exception):
    """The keeper's host cannot read it: an error of the system."""


class _NotWanted(Exception):
    """Nobody waits for it any more."""


class Source(Supply):
    """Another host's memories."""

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
        """Have it brought, in its turn."""
        with self._turn:
            self._flights.append(flight)
        self.look()

    def look(self) -> None:
        """See to it that somebody brings what there is to be brought."""
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
        """Nothing is fetched any more: all that is to come fails."""
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
        """Have it put where it is wanted. Returns it where it is small enough to be told with the news.
        ``OSError`` if it cannot be had."""
        wanted, size, at = flight.wanted, flight.size, 0
        needs = flight.file < 0 and any(not one.has_room for one in flight.waiting)
        data = bytearray(size if needs else 0)
        piece = memoryview(bytearray(min(size, PIECE)))

        def take(sock: socket.socket) -> None:
            nonlocal at
            sock.sendall(asked(wanted, at))
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
        """Whether its keeper has now what is in the flight's file."""
        came: list[bytes] = []
        kept = list(_digests(flight.wanted, flight.file))

        def take(sock: socket.socket) -> None:
            came.clear()
            sock.sendall(asked(flight.wanted, 0, digests=True))
            while (some := _hear(sock)) > 0:
                if some != DIGEST.size or len(came) == len(kept):
                    raise ConnectionError("more has come than was asked for")
                came.append(hear(sock, some))

        self._ask(flight, take, lambda: 0)
        return came == kept or not flight.size

    def _ask(
        self, flight: Flight, take: Callable[[socket.socket], None], at: Callable[[], int]
    ) -> None:
        """Have ``take`` talk over a connection, and over another one where that breaks. ``at()``: how far it
        has come."""
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
