"""The producer's part of transfers in which both ends take part.

A consumer connects to a socket of the producer's, asks, and waits there for the answer. Threads of the
producer's send meanwhile, whatever its methods do. The connection says who is still there: that it ends is
how each side learns of the other's end.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from contextlib import suppress
from typing import Any

from conveyor.codec import loads
from conveyor.direct.managers.ended import Ended
from conveyor.direct.managers.hooks import abort, in_words
from conveyor.direct.managers.wire import (
    DONE,
    Answer,
    Ask,
    of_this_user,
    readable,
    receive_one,
    send_one,
)
from conveyor.direct.table import TABLE
from conveyor.exceptions import SystemLimitError
from conveyor.flag import Flag
from conveyor.pauses import Pauses
from conveyor.runtime import threads
from conveyor.system_limits import hint

_log = logging.getLogger("conveyor")

#: Seconds that a consumer has to say what it asks for.
_PATIENCE = 30.0


class Sender:
    """Listens as long as there is a value here that can be asked for."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        #: Reentrant: values end in finalizers.
        self._lock = threading.RLock()
        self._listener: socket.socket | None = None
        #: Set when nobody can ask at the listener any more.
        self._over = Flag()
        self._values = 0

    def begin(self) -> bytes:
        """There is one value more. Where it can be asked for."""
        with self._lock:
            if self._listener is None:
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    # No file: the name is nobody's when the socket is closed.
                    listener.bind(b"\0conveyor-" + os.urandom(12).hex().encode())
                    listener.listen(128)
                    over = Flag()
                    threads.start(_listen, "sends", listener, over)
                except BaseException:
                    listener.close()
                    raise
                self._listener, self._over = listener, over
            self._values += 1
            address: bytes = self._listener.getsockname()
            return address

    def end(self) -> None:
        """There is one less."""
        with self._lock:
            self._values -= 1
            if self._values or self._listener is None:
                return
            listener, self._listener = self._listener, None
            self._over.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # the thread closes it

    def forget(self) -> None:
        """What a forked child has inherited is its parent's."""
        listener = self._listener
        self._clear()
        if listener is not None:
            listener.close()


def _listen(listener: socket.socket, over: Flag) -> None:
    """Serve those who ask until it is ``over``, which is told by ``shutdown`` as well."""
    with listener:
        pauses, told = Pauses(), False
        while True:
            try:
                asked, _ = listener.accept()
            except InterruptedError:
                continue
            except OSError as error:
                if over.is_set():
                    return
                # No descriptor, say, and nothing tells when there is one again: who asks waits in the queue.
                if not told:
                    _log.warning(
                        "process %d cannot be asked for a value just now: %s; who asks waits until it can",
                        os.getpid(),
                        hint(error) or error,
                    )
                told = True
                over.wait(pauses.next())
                continue
            pauses.begin_anew()
            told = False
            try:
                threads.start(_serve, "send", asked)
            except SystemLimitError:
                asked.close()


def _serve(asked: socket.socket) -> None:
    with asked, suppress(OSError):
        if not of_this_user(asked):
            return
        asked.settimeout(_PATIENCE)
        fields: Any = receive_one(asked)
        if fields is not None:
            asked.settimeout(None)
            _send_as_asked(asked, Ask(*fields))


def _send_as_asked(asked: socket.socket, ask: Ask) -> None:
    stored = TABLE.find(ask.number)
    if stored is None or stored.beside is None:
        send_one(asked, Answer("the value is kept no more"))
        return
    route: Any = stored.beside.route
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
