"""Memory of other hosts' processes, for those of this one: fetched once for all who want it at about the same
time.

Who keeps a value may write to it at any time, and whoever fetches it afterwards is to see that. So who comes
while something is on its way, or soon after it has come, does not just get that too: it is compared with what
its keeper has by then, of which only digests travel, and fetched again where that is something else.

It is put where it is wanted: each who waits has made room for it, in a file.
"""

from __future__ import annotations

import errno
import math
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from conveyor import _core, descriptors
from conveyor.codec import Reader
from conveyor.engine.net.flights import NOBODY_WAITS, Flight, Waiter, failure
from conveyor.engine.net.source import Source
from conveyor.runtime.actor.requests.far_memory import Come, GiveUp, Hold, LeaseThere, ToHost, Want
from conveyor.runtime.far_memory import Brought, Room, RoomAt, Wanted
from conveyor.runtime.kept import KeptAt
from conveyor.runtime.messages.connection import Connection
from conveyor.runtime.messages.sockets import all_of

#: What is wanted again within so many seconds is kept from then on, for others who want it, as long as
#: somebody does within so many seconds, if it has so many bytes; and so many at a time.
LINGER, LINGER_FROM, _MOST_LINGERING = 1.0, 1 << 20, 8


class Fetches:
    """What the processes of one host fetch from all others."""

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
        #: What has come lately, and until when that is so.
        self._lately: dict[Wanted, float] = {}
        self._sources: dict[int, Source] = {}
        self._services: set[FarMemoryService] = set()
        self._lost: set[int] = set()
        self._closed = False

    def fetch(
        self, wanted: Wanted, room: Room | None, tell: Callable[[Brought], object]
    ) -> Callable[[], object]:
        """See ``runtime.far_memory.FarMemory``."""
        return self.bring(wanted, Waiter(room, tell, partial(self.note, self._own, wanted.number)))

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

    def bring(self, wanted: Wanted, waiter: Waiter) -> Callable[[], object]:
        """Fetch it for one who waits, who is told of it once, by any thread. What this returns is called
        where he waits no more: he is told that, too."""
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
        """By host, see :attr:`Supply.trouble`."""
        with self._lock:
            sources = list(self._sources.items())
        return {host: source.trouble for host, source in sources if source.trouble}

    def lose(self, host: int) -> None:
        """That host is no more."""
        with self._lock:
            self._lost.add(host)
            source = self._sources.pop(host, None)
        if source is not None:
            source.close()
            # Its threads end, and nobody else would let go of what is kept of it. That of others goes, too.
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

    def _over(self, service: FarMemoryService) -> None:
        with self._lock:
            self._services.discard(service)

    def _give_up(self, flight: Flight, waiter: Waiter) -> None:
        with self._lock:
            at_once = flight.give_up(waiter)
        if at_once:
            waiter.done(NOBODY_WAITS)

    def _fly(self, source: Source, flight: Flight) -> None:
        """On a thread of the source's: bring it to all who want it by now."""
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
        """With the lock: nobody wants it any more. Others may, soon."""
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
        """With the lock: it is kept no longer."""
        flight.close()
        del self._flights[flight.wanted]

    def _expire(self, now: float) -> float | None:
        """Let go of what has been kept long enough; when there will be more of that, if ever."""
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


class FarMemoryService:
    """The host's end of one process's connection: what it wants is fetched."""

    def __init__(
        self, fetches: Fetches, sock: socket.socket, over: Callable[[FarMemoryService], object]
    ) -> None:
        self._fetches, self._over = fetches, over
        #: Of what is under way, how to have it given up.
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

    #: What is done for each kind of message.
    handlers: ClassVar[
        Mapping[type[ToHost], Callable[[FarMemoryService, Any, list[int]], None]]
    ] = {Hold: _hold, Want: _want, GiveUp: _give_up}
