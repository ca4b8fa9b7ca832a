"""Connections from one node to others, made again whenever they break.

Nothing tells a node that it can reach another one again, so it has to try. The pump takes a node for lost
after a window without a connection (``native/net/peer.cpp``). So the pauses between the tries are parts of a
window: a node that can be reached again within the window is reached within it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from conveyor.cluster.handshake import HandshakeError
from conveyor.exceptions import RuntimeStateError
from conveyor.flag import Flag
from conveyor.pauses import Pauses
from conveyor.runtime import threads

#: Seconds before the second try, and at most between two; that is also at most this share of the window.
_FIRST_PAUSE, _LONGEST_PAUSE, _SHARE = 0.01, 0.5, 0.125


class _Host:
    """Node that this one connects to."""

    def __init__(self, pauses: Pauses) -> None:
        self.pauses = pauses
        #: Whether the other node has greeted over the last connection.
        self.greeted = False
        #: Counts the ends of connections, or of the node itself, that the thread has not handled yet.
        self.ends = threading.Semaphore(0)
        self.lost = Flag()
        #: Until the first connection is made: the function that makes it, and the one that is told the
        #: outcome.
        self.first: tuple[Callable[[], object], Callable[[Exception | None], object]] | None = None


class Redials:
    """Connections of one node to others, made again when they break. Each other node has a thread from before
    the first connection on: later none may be had, and without a connection the node would be lost."""

    def __init__(self, dial: Callable[[int], object], window: float) -> None:
        """``dial(host)`` makes a connection, or raises ``OSError`` or ``HandshakeError``. ``window``: seconds
        without one, after which a host is lost."""
        self._dial = dial
        self._longest = min(_LONGEST_PAUSE, _SHARE * window)
        self._hosts: dict[int, _Host] = {}

    def prepare(self, host: int) -> None:
        """Start the thread that will connect to ``host``. ``SystemLimitError`` if no thread can be had."""
        if host in self._hosts:
            return
        one = _Host(Pauses(_FIRST_PAUSE, self._longest))
        threads.start(self._keep, "redial", host, one)
        self._hosts[host] = one

    def begin(
        self,
        host: int,
        dial: Callable[[], object],
        tell: Callable[[Exception | None], object],
    ) -> None:
        """Have ``dial()`` make the first connection to a host that this is prepared for, which may take long.
        ``tell`` is called by another thread: with nothing, or with why there is none. There may be another
        first one then."""
        one = self._hosts[host]
        one.first = dial, tell
        one.ends.release()

    def greeted(self, host: int) -> None:
        """Note that a connection to ``host`` has come about for both pumps."""
        if host in self._hosts:
            self._hosts[host].greeted = True

    def broken(self, host: int) -> None:
        """Connect again, if this node makes the connections to ``host``: one of them has ended."""
        if host in self._hosts:
            self._hosts[host].ends.release()

    def lost(self, host: int) -> None:
        """Give up connecting to ``host``, which is lost."""
        if host in self._hosts:
            self._hosts[host].lost.set()
            self._hosts[host].ends.release()

    def _keep(self, host: int, one: _Host) -> None:
        while True:
            one.ends.acquire()
            first, one.first = one.first, None
            if first is not None:
                _begin(*first)
                continue
            while not one.lost.is_set():
                if one.greeted:
                    one.greeted = False
                    one.pauses.begin_anew()
                # A node that has given this one up lets it in, and ends each connection before it greets.
                elif one.lost.wait(one.pauses.next()):
                    return
                try:
                    self._dial(host)
                    break
                except (OSError, HandshakeError):
                    continue
            if one.lost.is_set():
                return


def _begin(dial: Callable[[], object], tell: Callable[[Exception | None], object]) -> None:
    failed: Exception | None = None
    try:
        dial()
    except (OSError, HandshakeError) as error:
        failed = error
    except BaseException as error:
        tell(RuntimeStateError(f"{type(error).__name__}: {error}"))
        raise
    tell(failed)
