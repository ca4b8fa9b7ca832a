"""Handshake of two nodes. Both prove that they know the session's token, before anything else is said.

The side that dials asks for admission with its first message, before TLS too. A stranger may have overheard
it, and send it again: so the handshake follows. This module has the part of the side that dials. The side
that listens is native (``native/net/acceptor.h``): neither strangers nor a program that keeps the interpreter
busy keep a node out.

Each message has one size, so a stranger cannot make the listener read more. The side that has dialled proves
itself first. Proofs are HMAC-SHA256 over both identities, with the role of the prover: a proof is good
neither for another connection nor for the other role. Versions are compared when both have proved themselves.
Nothing is unpickled.

Later messages are neither signed nor encrypted, unless the whole connection goes over TLS. Then the proofs
cover its certificates: somebody between the nodes would show other ones.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import socket
import ssl
import struct
import sys
import time

from msgspec import Struct

from conveyor import _core, descriptors
from conveyor.cluster.tls import Tls, reason, relayed
from conveyor.exceptions import ConveyorError
from conveyor.local_sockets import hang_up
from conveyor.pauses import Pauses

#: Version of the handshake and of the pumps' messages after it.
CONNECTION_VERSION = 4

_MAGIC = b"conveyor"
_NONCE = 32
_ADMITTED = b"\1"
# magic, protocol, wire, host, python, purpose, version, nonce; `native/net/acceptor.h` has the same
_IDENTITY = struct.Struct("!8sHHIHH4x24s32s")
_VERDICT = struct.Struct("!32sB")
#: Seconds after which another try to connect is made beside the first, and how many there are.
_NEXT_TRY, _MOST_TRIES = 0.15, 8
#: Seconds before a listener is asked again that was too busy to hear, at first, and at most; that is also at
#: most this share of the time that there is. It has hung up, and so it does not tell when it has a place.
_FIRST_PAUSE, _LONGEST_PAUSE, _SHARE = 0.01, 0.5, 0.125
#: Possible reasons for the early end of a connection over TLS.
_ENDED = (
    "it has ended the connection. It may not take this side's certificate, or know another token"
)
_LATE = "the other side has not finished its handshake in time"
_FINE = 1
_GONE = "the other side has gone before it had proved itself"
_HUNG_UP = (
    "the other side has hung up on this one's proof that it knows the session's token: it knows another one "
    "(it is of another session), or has just ended"
)
#: Purposes of a connection: the pumps' messages, fetching files of a depot, or reading memory of the other
#: node's processes.
FOR_PUMPS, FOR_FETCHING, FOR_READING = 0, 1, 2


class HandshakeError(ConveyorError):
    """Refusal of a connection by one of its two sides; the text says why."""


class _GoneError(HandshakeError):
    """Raised when the other side has ended the connection."""


class _LateError(HandshakeError):
    """Raised when the other side has not done its part in time."""


class NotHeardError(HandshakeError):
    """Raised when the listener hangs up before it says anything: it has too many other connections just
    now."""


class Identity(Struct, frozen=True):
    """Identity of one side of a connection: the number of its node, what it runs, and what it connects
    for."""

    node: int
    conveyor: str
    python: tuple[int, int] = sys.version_info[:2]
    protocol: int = CONNECTION_VERSION
    wire: int = _core.WIRE_VERSION
    purpose: int = FOR_PUMPS

    def difference(self, other: Identity) -> str | None:
        """Return what keeps the two sides from working together, or ``None``."""
        for name in ("protocol", "wire", "conveyor", "python"):
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                return f"{name}: {here} on host {self.node}, {there} on host {other.node}"
        return None


def new_token() -> bytes:
    """Return a new token for one session. A process that has the token belongs to the session."""
    return secrets.token_bytes(32)


def dial(
    address: tuple[str, int],
    token: bytes,
    own: Identity,
    timeout: float,
    tls: Tls | None = None,
) -> tuple[socket.socket, Identity]:
    """Connect to the listener at ``address``, and return the connection and the other side's identity. Raises
    ``OSError`` where nobody answers, :class:`HandshakeError` where the two do not belong together. A listener
    that is too busy is asked again until the timeout."""
    deadline = _core.monotonic() + timeout
    where = f"host {address[0]}:{address[1]}"
    pauses = Pauses(_FIRST_PAUSE, min(_LONGEST_PAUSE, _SHARE * timeout))
    while True:
        sock = _connected(address, deadline)
        if sock is None:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"{where} cannot be reached: no answer in {timeout:g} s. Does a firewall drop what goes to "
                f"that port, or is there no way there? See listen_ports and listen_address of init()",
            )
        try:
            return _introduced(sock, address, token, own, deadline, tls)
        except _LateError as error:
            raise HandshakeError(
                f"{where} has been reached, but {error} ({timeout:g} s)"
            ) from error
        except (NotHeardError, ConnectionResetError, ssl.SSLEOFError) as error:
            pause = pauses.next()
            if _core.monotonic() + pause >= deadline:
                if tls is None:
                    raise
                raise _refused(address, _ENDED) from error
        time.sleep(pause)


def dial_node(
    node: int,
    address: tuple[str, int],
    token: bytes,
    own: Identity,
    timeout: float,
    tls: Tls | None = None,
) -> socket.socket:
    """Connect as :func:`dial` does, to node ``node``. ``HandshakeError`` if another node has taken its
    address."""
    sock, other = dial(address, token, own, timeout, tls)
    if other.node != node:
        hang_up(sock)
        raise HandshakeError(
            f"host {other.node} of the session is at {address[0]}:{address[1]}, where host {node} was"
        )
    return sock


def _introduced(
    sock: socket.socket,
    address: tuple[str, int],
    token: bytes,
    own: Identity,
    deadline: float,
    tls: Tls | None,
) -> tuple[socket.socket, Identity]:
    """Do the handshake of :func:`dial` on a new connection, and return the same. If the handshake fails, the
    connection is ended."""
    try:
        ask_admission(sock, token, deadline)
        if tls is None:
            return sock, introduce(sock, token, own, deadline)
        sock = secure = wrapped_in(sock, tls.client, server=False)
        secured(secure, deadline)
        binding = tls.binding(secure, listens=False)
        try:
            other = introduce(secure, token, own, deadline, binding)
        except ssl.SSLEOFError:
            raise
        except ssl.SSLError as error:  # by now it has looked at this side's certificate
            raise _refused(address, reason(error)) from error
        except (_GoneError, BrokenPipeError) as error:
            raise _refused(address, _ENDED) from error
        return relayed(secure), other
    except BaseException:
        hang_up(sock)
        raise


def hand_over(sock: socket.socket, pump: _core.HostPump, node: int) -> None:
    """Give the connection to ``node`` to the pump. If the pump does not take it, the connection is ended and
    ``OSError`` raised: the pump has been stopped, or has given the node up."""
    try:
        pump.connect(sock.fileno(), node)  # which has a duplicate
    except BaseException:
        hang_up(sock)
        raise
    sock.close()


def _refused(address: tuple[str, int], why: str) -> HandshakeError:
    return HandshakeError(f"host {address[0]}:{address[1]} does not let this one in: {why}")


def _connected(address: tuple[str, int], deadline: float) -> socket.socket | None:
    """The first of a few tries that comes about; ``None`` if none does in time. A lost packet of TCP's own
    opening is sent again after a second, which is as long as a node may stay away; another try does not wait
    for that."""
    family, kind, protocol, _, to = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    tries: list[socket.socket] = []
    found: socket.socket | None = None
    failed = 0
    poll = select.poll()  # not `select`, which takes no descriptor above 1023
    try:
        while found is None:
            if _core.monotonic() >= deadline:
                return None
            sock = descriptors.own_socket(socket.socket(family, kind, protocol))
            tries.append(sock)
            sock.setblocking(False)
            failed = sock.connect_ex(to)
            if failed not in (0, errno.EINPROGRESS):
                break
            poll.register(sock, select.POLLOUT)
            left = max(deadline - _core.monotonic(), 0.0)
            left = min(left, _NEXT_TRY) if len(tries) < _MOST_TRIES else left
            fds = {fd for fd, _ in poll.poll(left * 1000)}
            ready = [sock for sock in tries if sock.fileno() in fds]
            for sock in ready:
                failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failed == 0:
                    found = sock
            if found is None and ready:
                break
    finally:
        for sock in tries:
            if sock is not found:
                sock.close()
    if found is None:
        raise OSError(
            failed, f"host {address[0]}:{address[1]} cannot be reached: {os.strerror(failed)}"
        )
    return found


def admission(token: bytes) -> bytes:
    """Return the first message of the side that dials."""
    said = _MAGIC + secrets.token_bytes(_NONCE)
    return said + hmac.digest(token, b"conveyor admission\0" + said, "sha256")


def ask_admission(sock: socket.socket, token: bytes, deadline: float) -> None:
    """Have the listener hand this connection over to Python.

    Raises:
        NotHeardError: the listener has too many others just now.
        HandshakeError: it knows another token.
    """
    _say(sock, admission(token), deadline)
    try:
        answer = _hear(sock, len(_ADMITTED), deadline)
    except _GoneError as error:
        raise NotHeardError("the other side has no time for this one") from error
    if answer != _ADMITTED:
        raise HandshakeError(_HUNG_UP)


def introduce(
    sock: socket.socket, token: bytes, own: Identity, deadline: float, binding: bytes = b""
) -> Identity:
    """Do the part of the side that has dialled. ``binding``: see :meth:`Tls.binding`."""
    request = packed(own)
    _say(sock, request, deadline)
    try:
        answer = _hear(sock, _IDENTITY.size, deadline)
    except _GoneError as error:
        raise NotHeardError("the other side has no time for this one") from error
    _unpack(answer)  # it is one
    _say(sock, _proof(token, b"dials", binding, request, answer), deadline)
    proof, verdict = _VERDICT.unpack(_hear(sock, _VERDICT.size, deadline, _HUNG_UP))
    expected = _proof(token, b"listens", binding, request, answer, bytes([verdict]))
    if not hmac.compare_digest(proof, expected):
        raise HandshakeError("the other side does not know this session's token")
    other = _unpack(answer)
    _check(own, other)
    if verdict != _FINE:
        raise HandshakeError("the other side does not want this host")
    return other


def let_in(identity: bytes, verdict: int, own: Identity) -> Identity:
    """Return the identity of the other side, which has proved itself to the acceptor. ``HandshakeError`` if
    it was refused."""
    other = _unpack(identity)
    _check(own, other)
    if verdict != _FINE:
        raise HandshakeError(f"host {other.node} has connected, which is this one's own number")
    return other


def wrapped_in(sock: socket.socket, context: ssl.SSLContext, *, server: bool) -> ssl.SSLSocket:
    """Wrap a connection in TLS, which owns it from now on. Nothing is sent yet."""
    return context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)


def secured(wrapped: ssl.SSLSocket, deadline: float) -> None:
    """Have the handshake of TLS, which is over by the deadline, however slow. If it fails, the connection
    is ended."""
    try:
        wrapped.setblocking(False)
        while True:
            try:
                wrapped.do_handshake()
                return
            except ssl.SSLWantReadError:
                ready = _ready(wrapped, select.POLLIN, deadline)
            except ssl.SSLWantWriteError:
                ready = _ready(wrapped, select.POLLOUT, deadline)
            if not ready:
                raise _LateError(_LATE)
    except ssl.SSLEOFError:  # the other side has hung up
        hang_up(wrapped)
        raise
    except ssl.SSLError as error:
        hang_up(wrapped)
        raise HandshakeError(
            f"the other side is none of this session's: {reason(error)}"
        ) from error
    except BaseException:
        hang_up(wrapped)
        raise


def _ready(sock: ssl.SSLSocket, events: int, deadline: float) -> bool:
    poll = select.poll()
    poll.register(sock, events)
    return bool(poll.poll(_left(deadline) * 1000))


def _check(own: Identity, other: Identity) -> None:
    difference = own.difference(other)
    if difference is not None:
        raise HandshakeError(
            f"the hosts of a session run the same versions, and these do not: {difference}. Install the same "
            f"version of conveyor, and of Python, on both"
        )


def packed(own: Identity) -> bytes:
    """Return the message that says who this side is, with a new nonce."""
    version = own.conveyor.encode()[:24]
    python = own.python[0] << 8 | own.python[1]
    return _IDENTITY.pack(
        _MAGIC,
        own.protocol,
        own.wire,
        own.node,
        python,
        own.purpose,
        version,
        secrets.token_bytes(32),
    )


def _unpack(message: bytes) -> Identity:
    magic, protocol, wire, node, python, purpose, version, _ = _IDENTITY.unpack(message)
    if magic != _MAGIC:
        raise HandshakeError("something has connected that does not speak Conveyor's protocol")
    text = version.rstrip(b"\0").decode("ascii", "replace")
    return Identity(node, text, (python >> 8, python & 255), protocol, wire, purpose)


def _proof(token: bytes, role: bytes, binding: bytes, *said: bytes) -> bytes:
    context = role + (b" over TLS\0" if binding else b"\0") + binding
    return hmac.digest(token, b"conveyor handshake\0" + context + b"".join(said), "sha256")


def _left(deadline: float) -> float:
    left = deadline - _core.monotonic()
    if left <= 0:
        raise _LateError(_LATE)
    return left


def _say(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(_left(deadline))
    try:
        sock.sendall(data)
    except TimeoutError:
        _left(deadline)
        raise


def _hear(sock: socket.socket, size: int, deadline: float, gone: str = _GONE) -> bytes:
    """Receive exactly ``size`` bytes, and not one more: what follows is the pump's. ``gone``: the text of the
    error if the connection ends here."""
    data = b""
    while len(data) < size:
        sock.settimeout(_left(deadline))
        try:
            some = sock.recv(size - len(data))
        except TimeoutError:
            continue  # `_left` says so
        if not some:
            raise _GoneError(gone)
        data += some
    return data
