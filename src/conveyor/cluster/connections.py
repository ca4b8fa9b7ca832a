"""Connections between nodes: a listener for others', and own ones that are made again when they break.

The listener has one address, few handshakes at a time, and a count of strangers.

Nothing tells a node that it can reach another one again, so it has to try. The pump takes a node for lost
after a window without a connection (``native/net/peer.cpp``). So the pauses between the tries are parts of a
window: a node that can be reached again within the window is reached within it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from conveyor import _core
from conveyor.cluster.handshake import (
    HandshakeError,
    Identity,
    let_in,
    packed,
    secured,
    wrapped_in,
)
from conveyor.cluster.tls import Tls, relayed
from conveyor.exceptions import RuntimeStateError, SystemLimitError
from conveyor.flag import Flag
from conveyor.local_sockets import hang_up
from conveyor.pauses import Pauses
from conveyor.runtime import threads

#: Seconds for one handshake, from the connection to the end.
TIME_LIMIT = 5.0
#: Handshakes that go on at once, each in native code. With one more, the oldest is dropped: its node tries
#: again. Fewer than come at a time would push each other out just before their end.
_MOST_PENDING = 256
#: Connections that TLS is secured for at once, each on a thread.
_MOST_SECURED = 16
#: Connections that the kernel keeps until they are accepted.
_BACKLOG = 1024


class _Securing(Struct, eq=False):
    """Connection that is getting TLS. ``dropped``: it has made room for another one."""

    sock: socket.socket
    dropped: bool = False


class Listener:
    """Lets nodes of the session in, and hands their connections over: to the pump (:meth:`give_to`), or to
    ``on_node``, which is called by a thread of the listener, and owns the socket from then on.

    A native thread accepts, and does the handshake. Only those that know the token come to Python, whatever
    else connects. With TLS a thread of Python secures each connection between its admission and the
    handshake.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: bytes,
        own: Identity,
        on_node: Callable[[socket.socket, Identity], None],
        *,
        tls: Tls | None = None,
        time_limit: float = TIME_LIMIT,
        most_pending: int | None = None,
    ) -> None:
        """``address``: one of this machine; all of them at once (``""``, ``0.0.0.0``, ``::``) are refused.
        ``time_limit``: seconds for a handshake. ``most_pending``: handshakes at once,
        of each kind (256, and with TLS 16 that are being secured)."""
        if address[0] in ("", "0.0.0.0", "::"):
            raise ValueError(
                f"hosts are let in at one address, not at all that this machine has ({address[0]!r}): name "
                f"the one that the other hosts can reach"
            )
        self._own, self._on_node = own, on_node
        self._tls, self._time_limit = tls, time_limit
        self._most_pending = most_pending or _MOST_SECURED
        self._lock = threading.Lock()
        self._securing: list[_Securing] = []
        self._closed = False
        self._refused = self._pushed_out = 0
        self._reasons: deque[str] = deque(maxlen=32)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with socket.create_server(address, family=family, backlog=_BACKLOG) as server:
            self.address: tuple[str, int] = server.getsockname()[:2]
            self._acceptor = _core.Acceptor(
                server.fileno(),
                token,
                packed(own),
                tls is not None,
                time_limit,
                most_pending or _MOST_PENDING,
            )
        try:
            self._thread = threads.start(self._listen, "listener")
        except BaseException:
            self._acceptor.stop()
            raise

    @property
    def strangers(self) -> int:
        """How many have come that are no part of the session."""
        return self._refused + self._acceptor.counts()[0]

    @property
    def dropped(self) -> int:
        """How many have come while too many others were under way."""
        return self._pushed_out + self._acceptor.counts()[1]

    @property
    def let_in(self) -> int:
        """How many were let in."""
        return self._acceptor.counts()[2]

    @property
    def reasons(self) -> list[str]:
        """Reasons why the last strangers were refused."""
        with self._lock:
            self._reasons += self._acceptor.reasons()
            return list(self._reasons)

    def give_to(self, pump: _core.HostPump) -> None:
        """Have the pump take all connections that are for it, without Python."""
        self._acceptor.give_to(pump)

    def close(self) -> None:
        """Let nobody in any more, and break off handshakes that are under way."""
        with self._lock:
            self._closed = True
            for one in self._securing:
                _break_off(one.sock)
        self._acceptor.stop()
        self._thread.join()

    def _listen(self) -> None:
        poll = select.poll()  # not `select`, which takes no descriptor above 1023
        poll.register(self._acceptor.ready_fd, select.POLLIN)
        while not self._closed:
            poll.poll()
            for fd, identity, verdict in self._acceptor.take():
                sock = socket.socket(fileno=fd)
                try:
                    if identity:
                        self._take(sock, identity, verdict)
                    else:
                        self._begin(sock)
                except Exception as error:  # of this one: others are let in all the same
                    self._note(f"{type(error).__name__}: {error}")
                    hang_up(sock)

    def _take(self, sock: socket.socket, identity: bytes, verdict: int) -> None:
        try:
            other = let_in(identity, verdict, self._own)
        except HandshakeError as error:
            self._note(str(error))
            hang_up(sock)
            return
        self._on_node(sock, other)

    def _begin(self, sock: socket.socket) -> None:
        one = self._admit(sock)
        if one is None:
            hang_up(sock)
            return
        try:
            threads.start(self._secure, "handshake", one)
        except SystemLimitError:  # the system has no more threads
            with self._lock:
                self._securing.remove(one)
                self._pushed_out += 1
            hang_up(sock)

    def _admit(self, sock: socket.socket) -> _Securing | None:
        """Add a connection to those that are under way. If there are too many, the oldest is dropped: it has
        said nothing for longest."""
        with self._lock:
            if self._closed:
                self._pushed_out += 1
                return None
            one = _Securing(sock)
            alike = [o for o in self._securing if not o.dropped]
            if len(alike) >= self._most_pending:
                alike[0].dropped = True
                self._pushed_out += 1
                _break_off(alike[0].sock)
            self._securing.append(one)
            return one

    def _secure(self, one: _Securing) -> None:
        """Have TLS over a connection, and give the acceptor what stands for it."""
        assert self._tls is not None
        deadline = _core.monotonic() + self._time_limit
        plain: socket.socket | None = None
        try:
            with self._lock:  # who breaks it off finds the one that has the connection
                one.sock = secure = wrapped_in(one.sock, self._tls.server, server=True)
            secured(secure, deadline)
            binding = self._tls.binding(secure, listens=True)
            plain = relayed(secure)
        except (HandshakeError, OSError) as error:
            if not one.dropped:
                self._note(str(error))
        finally:
            with self._lock:
                self._securing.remove(one)
            if plain is None:
                hang_up(one.sock)
        if plain is not None:
            with plain:
                try:
                    self._acceptor.introduce(plain.fileno(), binding)
                except OSError as error:  # no descriptor is left
                    self._note(str(error))

    def _note(self, reason: str) -> None:
        with self._lock:
            self._refused += 1
            self._reasons.append(reason)


def _break_off(sock: socket.socket) -> None:
    """Shut a socket down, so that its readers, and those who wait for a connection, hear of the end."""
    with contextlib.suppress(OSError):
        # Not the method of a TLS socket, which takes away what another thread is using.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


#: Seconds before the second try, and at most between two; that is also at most this share of the window.
_FIRST_PAUSE, _LONGEST_PAUSE, _SHARE = 0.01, 0.5, 0.125


class _Node:
    """Node that this one connects to."""

    def __init__(self, pauses: Pauses) -> None:
        self.pauses = pauses
        #: Whether the last connection came about for both pumps.
        self.connected = False
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
        """``dial(node)`` makes a connection, or raises ``OSError`` or ``HandshakeError``. ``window``: seconds
        without one, after which a node is lost."""
        self._dial = dial
        self._longest = min(_LONGEST_PAUSE, _SHARE * window)
        self._nodes: dict[int, _Node] = {}

    def prepare(self, node: int) -> None:
        """Start the thread that will connect to ``node``. ``SystemLimitError`` if no thread can be had."""
        if node in self._nodes:
            return
        one = _Node(Pauses(_FIRST_PAUSE, self._longest))
        threads.start(self._keep, "redial", node, one)
        self._nodes[node] = one

    def begin(
        self,
        node: int,
        dial: Callable[[], object],
        tell: Callable[[Exception | None], object],
    ) -> None:
        """Have ``dial()`` make the first connection to a node that this is prepared for, which may take long.
        ``tell`` is called by another thread: with nothing, or with why there is none. There may be another
        first one then."""
        one = self._nodes[node]
        one.first = dial, tell
        one.ends.release()

    def connected(self, node: int) -> None:
        """Note that a connection to ``node`` has come about for both pumps."""
        if node in self._nodes:
            self._nodes[node].connected = True

    def broken(self, node: int) -> None:
        """Connect again, if this node makes the connections to ``node``: one of them has ended."""
        if node in self._nodes:
            self._nodes[node].ends.release()

    def lost(self, node: int) -> None:
        """Give up connecting to ``node``, which is lost."""
        if node in self._nodes:
            self._nodes[node].lost.set()
            self._nodes[node].ends.release()

    def _keep(self, node: int, one: _Node) -> None:
        while True:
            one.ends.acquire()
            first, one.first = one.first, None
            if first is not None:
                _begin(*first)
                continue
            while not one.lost.is_set():
                if one.connected:
                    one.connected = False
                    one.pauses.begin_anew()
                # A node that has given this one up lets it in, and ends each connection before the handshake.
                elif one.lost.wait(one.pauses.next()):
                    return
                try:
                    self._dial(node)
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
