"""TLS between the nodes of a session: which certificate each of them shows, and which it takes.

Either the session has one certificate of its own: it is made at the start, given to each node as the token
is, and the only one that is accepted. Or each node has files with its certificate, its key, and the
authorities that it accepts. In both cases the proofs of the token cover the two certificates
(:mod:`conveyor.cluster.handshake`), so somebody else with an accepted certificate cannot stand between two
nodes.

The pump knows no TLS: a thread carries bytes between the TLS connection and a pair of sockets.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import socket
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from msgspec import Struct

from conveyor import descriptors
from conveyor.cluster.serving import watch_liveness
from conveyor.exceptions import ConveyorError
from conveyor.runtime import threads
from conveyor.system_limits import explained

#: The keys of `tls`, where it names files.
_FILES = ("certificate", "key", "ca")
#: OpenSSL's flag to accept a certificate whatever the time is.
_NO_CHECK_TIME = 0x200000
#: The session ends before; and hosts do not look at it, since their clocks may differ.
_DAYS = "3650"
_MAKE = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
    *("-nodes", "-sha256", "-days", _DAYS, "-subj", "/CN=a session of Conveyor"),
    *("-keyout", "-", "-out", "-"),
)
_MAKE_SECONDS = 30.0


class TlsError(ConveyorError):
    """Failure to use TLS as it was asked for; the text says why."""


class SessionCertificate(Struct, frozen=True):
    """Certificate made for one session, the only one that its nodes take. ``pem``: the certificate, and its
    key."""

    pem: bytes

    def __repr__(self) -> str:
        return "SessionCertificate(pem=...)"  # what is printed, or raised, has no key in it


class CertificateFiles(Struct, frozen=True):
    """Paths of the certificate files on each node. Environment variables in them are replaced by those of
    that node."""

    certificate: str
    key: str
    ca: str


Credentials = SessionCertificate | CertificateFiles


def credentials(tls: object) -> Credentials | None:
    """Return what the option ``tls`` says, or ``None`` for no TLS. ``True`` makes a certificate."""
    if tls is None or tls is False:
        return None
    if tls is True:
        return make_certificate()
    if not isinstance(tls, Mapping) or set(tls) != set(_FILES):
        raise ValueError(
            "tls is True (a certificate is made for the session), or the paths of files that each node has: "
            f'{{"certificate": ..., "key": ..., "ca": ...}}, not {tls!r}'
        )
    for name in _FILES:
        if not isinstance(tls[name], (str, os.PathLike)):
            raise ValueError(f"tls[{name!r}] must be a path, not {tls[name]!r}")
    return CertificateFiles(*(os.fspath(tls[name]) for name in _FILES))


def make_certificate() -> SessionCertificate:
    """Make a new key, and a certificate of it. Neither is ever in a file."""
    try:
        with explained("make a certificate"):
            made = subprocess.run(
                _MAKE,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=_MAKE_SECONDS,
            )
    except FileNotFoundError as error:
        raise TlsError(
            "tls=True has the program `openssl` make a certificate for the session, and there is none: "
            'install OpenSSL, or give tls={"certificate": ..., "key": ..., "ca": ...}, the paths of files '
            "that each node has"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise TlsError(f"`openssl req` has made no certificate in {_MAKE_SECONDS:g} s") from error
    if made.returncode != 0:
        said = made.stderr.decode(errors="replace").strip()
        raise TlsError(f"`openssl req` could not make a certificate for the session: {said}")
    return SessionCertificate(made.stdout)


class Tls:
    """TLS contexts and certificate of one node. Raises ``TlsError`` where its files are not as they should
    be."""

    def __init__(self, given: Credentials) -> None:
        if isinstance(given, CertificateFiles):
            files = {name: _expanded(getattr(given, name)) for name in _FILES}
            certificate, key, ca = (files[name] for name in _FILES)
            self.own = _digest_of_file(certificate)
            self.server = _context(ssl.PROTOCOL_TLS_SERVER, certificate, key, ca)
            self.client = _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, ca)
            return
        self.own = _digest(given.pem)
        with _memory_file(given.pem) as path:
            self.server = _context(ssl.PROTOCOL_TLS_SERVER, path, None, path)
            self.client = _context(ssl.PROTOCOL_TLS_CLIENT, path, None, path)
        for context in (self.server, self.client):
            context.verify_flags |= _NO_CHECK_TIME

    def binding(self, sock: ssl.SSLSocket, *, listens: bool) -> bytes:
        """Return the certificates of both sides as digests, that of the side that has dialled first. Both
        sides see the same; somebody between them would change it."""
        shown = sock.getpeercert(binary_form=True)
        assert shown is not None  # none is not taken
        other = hashlib.sha256(shown).digest()
        return other + self.own if listens else self.own + other


def reason(error: ssl.SSLError) -> str:
    """Describe an error of a TLS connection."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not one that this side takes ({error.verify_message}): on all nodes the "
            f'certificate has to be of an authority that "ca" of the others names'
        )
    said = (error.reason or str(error)).lower().replace("_", " ")
    return (
        f"TLS says: {said}. Either it speaks no TLS, or it does not take this side's certificate, which has "
        f'to be of an authority that "ca" of the other node names'
    )


def _context(protocol: int, certificate: str, key: str | None, ca: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    # Nothing older knows this protocol, and with it who learns the key later can read nothing of before.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The proofs of the token say whose certificate it has to be; nodes have addresses and no names.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED

    def no_passphrase() -> NoReturn:
        # Else OpenSSL asks for it at the terminal, and waits.
        raise ValueError(
            "the key is encrypted, and there is nobody to say its passphrase: decrypt it"
        )

    try:
        context.load_cert_chain(certificate, key, no_passphrase)
    except (OSError, ValueError) as error:
        raise TlsError(
            f"tls: the certificate {certificate} with the key {key} cannot be used: {error}"
        ) from error
    try:
        context.load_verify_locations(ca)
    except (OSError, ValueError) as error:
        raise TlsError(
            f"tls: the certificates of authorities {ca} cannot be used: {error}"
        ) from error
    return context


def _expanded(path: str) -> str:
    found = os.path.expandvars(os.path.expanduser(path))
    if "$" in found:
        raise TlsError(f"tls: there is a variable in {path!r} that this node's environment has not")
    return found


def _digest_of_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return _digest(file.read())
    except (OSError, ValueError) as error:
        raise TlsError(f"tls: the certificate {path} cannot be used: {error}") from error


def _digest(pem: bytes) -> bytes:
    """Return the digest of the first certificate, which is the one that is shown."""
    head, foot = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
    begin, end = pem.find(head), pem.find(foot)
    if not 0 <= begin < end:
        raise ValueError("there is no certificate in it")
    text = pem[begin : end + len(foot)].decode("ascii", "replace")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text)).digest()


@contextmanager
def _memory_file(content: bytes) -> Iterator[str]:
    """The path, in this process alone, of a file that is on no disk."""
    fd = descriptors.memory_file("conveyor-certificate")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


_PIECE = 256 << 10


def relayed(secure: ssl.SSLSocket) -> socket.socket:
    """Return a plain socket that stands for ``secure``, which the relay owns now. Either's end ends the
    other."""
    # The pump sends what belongs together at once, and knows no more of the network than the pair.
    secure.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    watch_liveness(secure)
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
