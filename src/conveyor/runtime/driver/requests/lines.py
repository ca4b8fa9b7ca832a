"""How an actor's requests come to the driver, and its answers go back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from conveyor.codec import Reader
from conveyor.runtime.driver.hosts.far_host import Handed
from conveyor.runtime.driver.processes.far_hosts import FarHosts
from conveyor.runtime.driver.processes.record import ActorRecord
from conveyor.runtime.messages.message import Message
from conveyor.runtime.messages.sockets import pickled, send_pickled
from conveyor.runtime.process import close_all

#: What goes with an answer: descriptors, which are closed when they have been sent, or what another host
#: gives in their place.
Given = list[int] | Handed


def let_go(given: Given) -> None:
    """It has been sent, or will not be."""
    if isinstance(given, list):
        close_all(given)


class RequestLine:
    """One actor's: it asks over a socket, or its host passes on what it asks. It is answered by several
    threads."""

    def __init__(self, record: ActorRecord, sock: socket.socket, abroad: FarHosts) -> None:
        self.record = record
        #: ``None`` where the process is on another host, and when the line is closed.
        self.sock: socket.socket | None = sock
        self._abroad = abroad
        # Held for one reply at a time, which may be several datagrams.
        self._sending = threading.Lock()

    def send(self, message: Message, given: Given, patience: float) -> None:
        """Send an answer. ``patience``: seconds that other replies to this actor may take; -1: any."""
        data = pickled(message)
        if self.record.host is not None:
            handed = given if isinstance(given, Handed) else None
            self._abroad.answer(self.record, data, handed, wait=patience < 0)
            return
        sock = self.sock
        if sock is None:
            raise ConnectionError("its socket is closed")
        assert isinstance(given, list)
        if not self._sending.acquire(timeout=patience):
            raise TimeoutError("it does not take the replies before this one")
        try:
            send_pickled(sock, data, given)
        finally:
            self._sending.release()


class RequestLines:
    """The lines of all actors, by their processes."""

    def __init__(self, unwatch: Callable[[int], None], abroad: FarHosts) -> None:
        """``unwatch(fd)``: a socket, which the caller watches, is about to be closed."""
        self._unwatch = unwatch
        self._abroad = abroad
        self._lock = threading.Lock()
        self._all: dict[Reader, RequestLine] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, record: ActorRecord, sock: socket.socket) -> RequestLine:
        """The line of that process, over that socket."""
        line = RequestLine(record, sock, self._abroad)
        with self._lock:
            self._all[record.reader] = line
        return line

    def of(self, process: Reader) -> RequestLine | None:
        """That process's."""
        return self._all.get(process)

    def settle(self, record: ActorRecord) -> None:
        """What it asks comes by way of its host from now on."""
        line = self.of(record.reader)
        if line is not None:
            self._close(line)

    def remove(self, record: ActorRecord) -> None:
        """There is nobody at its other end, or who is cannot be answered, and hears that."""
        with self._lock:
            line = self._all.pop(record.reader, None)
        if line is not None:
            self._close(line)
            if record.alive:
                self._abroad.cut(record)

    def close(self) -> None:
        """There is nobody at any."""
        with self._lock:
            lines, self._all = list(self._all.values()), {}
        for line in lines:
            self._close(line)

    def _close(self, line: RequestLine) -> None:
        sock, line.sock = line.sock, None
        if sock is not None:
            self._unwatch(sock.fileno())
            sock.close()
