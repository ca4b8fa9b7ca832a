"""The producer's part of transfers in which both ends take part.

A consumer connects to a socket of the producer's. Both prove themselves; then the consumer asks, and waits
there for the answer. Threads of the producer's send meanwhile, whatever its methods do. The connection says
who is still there: that it ends is how each side learns of the other's end.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from contextlib import suppress
from typing import Any

from conveyor.codec import loads
from conveyor.direct.managers.manager import Ended, abort, in_words
from conveyor.direct.managers.wire import (
    DONE,
    Answer,
    Ask,
    readable,
    receive_one,
    send_one,
)
from conveyor.direct.table import TABLE
from conveyor.exceptions import SystemLimitError
from conveyor.flag import Flag
from conveyor.local_sockets import LocalListener, new_key, new_name
from conveyor.runtime import threads

#: Seconds that a consumer has to say what it asks for.
_PATIENCE = 30.0


class Sender:
    """Listener for consumers, open as long as there is a value here that can be asked for."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        #: Reentrant: values end in finalizers.
        self._lock = threading.RLock()
        self._listener: LocalListener | None = None
        #: Key of the socket; whoever has a reference to a value here is given it.
        self._key = b""
        #: Set when nobody can ask at the listener any more.
        self._over = Flag()
        self._values = 0

    def begin(self) -> tuple[str, bytes]:
        """Count one value more. Returns the address where it can be asked for, and the key of that socket."""
        with self._lock:
            if self._listener is None:
                key, over = new_key(), Flag()
                listener = LocalListener(new_name(), socket.SOCK_STREAM, lambda _: key, _admit)
                try:
                    threads.start(_listen, "sends", listener, over)
                except BaseException:
                    listener.close()
                    raise
                self._listener, self._key, self._over = listener, key, over
            self._values += 1
            return self._listener.name, self._key

    def end(self) -> None:
        """Count one value less; the listener stops after the last one."""
        with self._lock:
            self._values -= 1
            if self._values or self._listener is None:
                return
            listener, self._listener = self._listener, None
            self._over.set()
        listener.stop()  # the thread closes it

    def forget(self) -> None:
        """Forget the listener in a forked child: it is the parent's."""
        listener = self._listener
        self._clear()
        if listener is not None:
            listener.forget()


def _listen(listener: LocalListener, over: Flag) -> None:
    """Serve those who ask until it is ``over``, which the listener's :meth:`stop` tells as well."""
    poll = select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    try:
        while not over.is_set():
            poll.poll()
            pause = listener.serve()
            if pause:
                over.wait(pause)
    finally:
        listener.close()


def _admit(asked: socket.socket, _number: int) -> None:
    try:
        threads.start(_serve, "send", asked)
    except SystemLimitError:
        asked.close()


def _serve(asked: socket.socket) -> None:
    with asked, suppress(OSError):
        asked.settimeout(_PATIENCE)
        ask = receive_one(asked, Ask)
        if ask is not None:
            asked.settimeout(None)
            _send_as_asked(asked, ask)


def _send_as_asked(asked: socket.socket, ask: Ask) -> None:
    stored = TABLE.find(ask.number)
    if stored is None or stored.beside is None:
        send_one(asked, Answer("the value is kept no more"))
        return
    route: Any = stored.beside.route
    route.send(asked, ask, stored)


def send_by_manager(asked: socket.socket, ask: Ask, stored: Any) -> None:
    """Have the manager of a value's route send it, while whoever has asked receives."""
    route = stored.beside.route
    manager = route.manager
    try:
        communicator = loads(ask.communicator)
        sending = _Sending(stored, communicator)
    except Exception as error:
        send_one(asked, Answer(in_words(error)))
        return
    with sending:
        ready = readable([asked, sending.over])
        if sending.over in ready:
            send_one(asked, Answer(sending.error))
        elif asked.recv(1) != DONE:
            # Whoever has asked has died, or has given up.
            abort(manager, route.name, f"{ask.number:016x}", communicator)


class _Sending:
    """A thread that sends.

    error: why it could not, when it has ended.
    """

    def __init__(self, stored: Any, communicator: Any) -> None:
        self.error: str | None = None
        self._ended = Ended()
        threads.start(self._run, "sending", stored, communicator)

    @property
    def over(self) -> int:
        """A descriptor that is readable when it has ended."""
        return self._ended.over

    def __enter__(self) -> _Sending:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.close()

    def _run(self, stored: Any, communicator: Any) -> None:
        route, note, tensors = stored.beside
        try:
            route.manager.send_multiple_tensors(list(tensors), loads(note).metadata, communicator)
        except BaseException as error:  # a thread of ours has nobody else to tell
            self.error = in_words(error)
        finally:
            self._ended.tell()


SENDER = Sender()
os.register_at_fork(after_in_child=SENDER.forget)
