"""TLS before the pump: a thread carries bytes between the TLS connection and a pair of sockets."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl

from conveyor import descriptors
from conveyor.cluster.answering import watch_life
from conveyor.runtime import threads

_PIECE = 256 << 10


def relayed(secure: ssl.SSLSocket) -> socket.socket:
    """Return a plain socket that stands for ``secure``, which the relay owns now. Either's end ends the
    other."""
    # The pump sends what belongs together at once, and knows no more of the network than the pair.
    secure.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    watch_life(secure)
    own, pumps = map(descriptors.own_socket, socket.socketpair())
    try:
        threads.start(_relay, "tls", secure, own)
    except OSError:  # the system has no more threads
        own.close()
        pumps.close()
        raise
    return pumps


def _relay(secure: ssl.SSLSocket, plain: socket.socket) -> None:
    """Carry bytes both ways in this one thread, since only one thread at a time may use an SSL object."""
    to_secure, to_plain = bytearray(), bytearray()
    secure.setblocking(False)
    plain.setblocking(False)
    with (
        contextlib.closing(secure),
        contextlib.closing(plain),
        selectors.PollSelector() as waiting,  # which takes no descriptor
    ):
        waiting.register(secure, selectors.EVENT_READ)
        waiting.register(plain, selectors.EVENT_READ)
        try:
            while True:
                moved = False
                # No more is read than has been passed on: whoever is slow slows the other down.
                if not to_plain:
                    with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                        some = secure.recv(_PIECE)
                        if not some:
                            return
                        to_plain += some
                        moved = True
                if not to_secure:
                    with contextlib.suppress(BlockingIOError):
                        some = plain.recv(_PIECE)
                        if not some:
                            return
                        to_secure += some
                        moved = True
                if to_plain:
                    with contextlib.suppress(BlockingIOError):
                        del to_plain[: plain.send(to_plain)]
                        moved = True
                if to_secure:
                    with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                        # The same bytes again, where it could not be sent: OpenSSL has begun with them.
                        del to_secure[: secure.send(bytes(to_secure))]
                        moved = True
                if moved:
                    continue
                _wait_for(waiting, secure, bool(to_plain), bool(to_secure))
                _wait_for(waiting, plain, bool(to_secure), bool(to_plain))
                waiting.select()
        except OSError:
            return  # the pump, or the other host, hears of it by the end of its own
        finally:
            # To close them is not enough where a forked child has copies of them.
            for sock in (secure, plain):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


def _wait_for(
    waiting: selectors.BaseSelector, sock: socket.socket, is_full: bool, has_some: bool
) -> None:
    """``is_full``: what is read from ``sock`` has nowhere to go; ``has_some``: something is to be written."""
    # Nothing is read while that is so, and what is waited for all the same would be told of again and again.
    reads = 0 if is_full else selectors.EVENT_READ
    writes = selectors.EVENT_WRITE if has_some else 0
    if reads | writes:
        if sock in waiting.get_map():
            waiting.modify(sock, reads | writes)
        else:
            waiting.register(sock, reads | writes)
    elif sock in waiting.get_map():
        waiting.unregister(sock)
