"""Connections between hosts over TLS: what can be read on the way, and who is let in."""

import contextlib
import errno
import os
import queue
import socket
import ssl
import subprocess
import threading
import time

import pytest

from conveyor.cluster import connections as listener_module
from conveyor.cluster import handshake
from conveyor.cluster import tls as relay_module
from conveyor.cluster import tls as tls_module
from conveyor.cluster.connections import Listener
from conveyor.cluster.handshake import (
    HandshakeError,
    Identity,
    ask_admission,
    dial,
    introduce,
    new_token,
    secured,
    wrapped_in,
)
from conveyor.cluster.tls import (
    CertificateFiles,
    SessionCertificate,
    Tls,
    TlsError,
    credentials,
    make_certificate,
    relayed,
)

TOKEN = new_token()
HERE, THERE = Identity(0, "1.2.3"), Identity(1, "1.2.3")
SECRET = b"a payload that nobody on the way is to read " * 100


@pytest.fixture(scope="module")
def made():
    return make_certificate()


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """Certificates of two authorities: ``files(authority, name)`` are those of a node."""
    home = tmp_path_factory.mktemp("authorities")

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=home, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ours", "others"):
        openssl(
            "req",
            "-x509",
            *key,
            "-subj",
            f"/CN={name}",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
        )
        for node in ("here", "there", "between"):
            own = f"{name}-{node}"
            openssl(
                "req", *key, "-subj", f"/CN={own}", "-keyout", f"{own}.key", "-out", f"{own}.csr"
            )
            signed = ("-CA", f"{name}.pem", "-CAkey", f"{name}.key", "-CAcreateserial")
            openssl("x509", "-req", "-in", f"{own}.csr", *signed, "-out", f"{own}.pem")

    def files(name, node, ca=None):
        own = home / f"{name}-{node}"
        return CertificateFiles(f"{own}.pem", f"{own}.key", str(home / f"{ca or name}.pem"))

    return files


@contextlib.contextmanager
def listening(tls, **options):
    came = queue.Queue()
    listener = Listener(
        ("127.0.0.1", 0),
        TOKEN,
        HERE,
        lambda *who: came.put(who),
        tls=tls,
        time_limit=30.0,
        **options,
    )
    try:
        yield listener, came
    finally:
        listener.close()


@contextlib.contextmanager
def recording(address):
    """Passes on to ``address`` what comes, and keeps it; the other address, and what has come."""
    carried = [bytearray(), bytearray()]
    threads = []

    def carry(source, target, into):
        with contextlib.suppress(OSError):
            while some := source.recv(1 << 16):
                into += some
                target.sendall(some)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def accept():
        with contextlib.suppress(OSError):
            near, _ = server.accept()
            far = socket.create_connection(address)
            for source, target, into in ((near, far, carried[0]), (far, near, carried[1])):
                thread = threading.Thread(target=carry, args=(source, target, into), daemon=True)
                thread.start()
                threads.append(thread)

    with socket.create_server(("127.0.0.1", 0)) as server:
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield server.getsockname(), carried
        accepting.join(60)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def received(sock, size):
    sock.settimeout(60)
    data = b""
    while len(data) < size:
        some = sock.recv(1 << 16)
        assert some
        data += some
    return data


@pytest.mark.parametrize("over_tls", [False, True])
def test_nothing_of_a_payload_can_be_read_on_the_way(over_tls, made):
    tls = Tls(made) if over_tls else None
    with listening(tls) as (listener, came), recording(listener.address) as (address, carried):
        sock, _ = dial(address, TOKEN, THERE, 30, tls)
        theirs, _ = came.get(timeout=60)
        with sock, theirs:
            sock.sendall(SECRET)
            assert received(theirs, len(SECRET)) == SECRET
            theirs.sendall(SECRET[::-1])
            assert received(sock, len(SECRET)) == SECRET[::-1]
    for data, said in zip(carried, (SECRET, SECRET[::-1]), strict=True):
        assert len(data) > len(SECRET)
        # Without TLS it is there: so it would be found.
        assert (said in data) is not over_tls
        assert (said[:44] in data) is not over_tls
        assert (b"1.2.3" in data) is not over_tls


def test_who_waits_at_a_connection_over_tls_hears_of_a_host_that_says_nothing_any_more(
    made, monkeypatch
):
    """What stands for it cannot be asked: the connection itself is, at both ends."""
    secured_ones = []
    for module in (handshake, listener_module):
        relay = module.relayed
        monkeypatch.setattr(
            module, "relayed", lambda sock, relay=relay: secured_ones.append(sock) or relay(sock)
        )
    tls = Tls(made)
    with listening(tls) as (listener, came):
        sock, _ = dial(listener.address, TOKEN, THERE, 30, tls)
        theirs, _ = came.get(timeout=60)
        with sock, theirs:
            assert len(secured_ones) == 2
            for one in secured_ones:
                assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 10


def soon():
    """A deadline that nothing here comes to."""
    return time.monotonic() + 60


def strangers(listener):
    """Those that it has counted, once there are any."""
    end = soon()
    while not listener.strangers:
        assert time.monotonic() < end
        time.sleep(0.005)
    return listener.strangers


def test_who_has_no_certificate_is_refused(made):
    tls = Tls(made)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    with listening(tls) as (listener, came):
        with socket.create_connection(listener.address) as sock:
            ask_admission(sock, TOKEN, soon())
            # It sees a server, as the certificate that it shows itself is asked for last.
            secure = wrapped_in(sock, bare, server=False)
            secured(secure, soon())
            with pytest.raises((OSError, HandshakeError)):
                introduce(secure, TOKEN, THERE, soon())
            secure.close()
        assert strangers(listener) == 1
        assert "peer did not return a certificate" in listener.reasons[0]
        assert came.empty()


def test_another_sessions_certificate_is_refused_by_both(made):
    mine, other = Tls(made), Tls(make_certificate())
    with listening(mine) as (listener, came):
        with pytest.raises(HandshakeError, match=r"not one that this side takes \(self-signed"):
            dial(listener.address, TOKEN, THERE, 30, other)
        assert strangers(listener) == 1
        assert came.empty()


def test_a_token_is_needed_all_the_same(made):
    tls = Tls(made)
    with listening(tls) as (listener, came):
        with pytest.raises(HandshakeError):
            dial(listener.address, new_token(), THERE, 30, tls)
        assert strangers(listener) == 1
        assert "does not know this session's token" in listener.reasons[0]
        assert came.empty()


def test_files_of_each_node(authority):
    here, there = Tls(authority("ours", "here")), Tls(authority("ours", "there"))
    assert here.own != there.own
    with listening(here) as (listener, came):
        sock, other = dial(listener.address, TOKEN, THERE, 30, there)
        theirs, who = came.get(timeout=60)
        assert (other, who) == (HERE, THERE)
        with sock, theirs:
            sock.sendall(SECRET)
            assert received(theirs, len(SECRET)) == SECRET


@pytest.mark.parametrize(
    ("dials", "text"),
    [
        # It takes none of the listener's authority.
        (
            ("others", "there", "others"),
            r"not one that this side takes \(self-signed",
        ),
        # It would, and shows one of an authority that the listener does not take.
        (("others", "there", "ours"), r"does not let this one in: .*take this side's certificate"),
    ],
)
def test_a_wrong_authority_is_an_error_that_says_so(authority, dials, text):
    with listening(Tls(authority("ours", "here"))) as (listener, came):
        with pytest.raises(HandshakeError, match=text):
            dial(listener.address, TOKEN, THERE, 30, Tls(authority(*dials)))
        # It asks again where a reset has overtaken what the listener had to say.
        assert strangers(listener) >= 1
        assert came.empty()


def test_who_has_another_certificate_that_is_taken_cannot_stand_in_between(authority):
    """It passes on what both say. The token's proofs are of the certificates that it has not."""
    here, there = Tls(authority("ours", "here")), Tls(authority("ours", "there"))
    between = Tls(authority("ours", "between"))
    with listening(here) as (listener, came), socket.create_server(("127.0.0.1", 0)) as server:

        def stand():
            near, _ = server.accept()
            far = socket.create_connection(listener.address)
            far.sendall(near.recv(1000))
            near.sendall(far.recv(1000))
            near = wrapped_in(near, between.server, server=True)
            secured(near, soon())
            far = wrapped_in(far, between.client, server=False)
            secured(far, soon())
            for sock in (near, far):
                sock.settimeout(30)
            with contextlib.suppress(OSError), near, far:
                far.sendall(near.recv(1000))
                near.sendall(far.recv(1000))
                far.sendall(near.recv(1000))
                near.sendall(far.recv(1000))

        thread = threading.Thread(target=stand, daemon=True)
        thread.start()
        with pytest.raises(HandshakeError):
            dial(server.getsockname(), TOKEN, THERE, 30, there)
        thread.join(60)
        assert strangers(listener) == 1
        assert "does not know this session's token" in listener.reasons[0]
        assert came.empty()


def test_what_cannot_be_used_says_so(authority, tmp_path, monkeypatch):
    good = authority("ours", "here")
    with pytest.raises(TlsError, match=r"nowhere\.pem cannot be used"):
        Tls(CertificateFiles(str(tmp_path / "nowhere.pem"), good.key, good.ca))
    with pytest.raises(TlsError, match=r"with the key .* cannot be used"):
        Tls(CertificateFiles(good.certificate, authority("others", "here").key, good.ca))
    with pytest.raises(TlsError, match=r"authorities .*nowhere\.pem cannot be used"):
        Tls(CertificateFiles(good.certificate, good.key, str(tmp_path / "nowhere.pem")))
    with pytest.raises(TlsError, match=r"a variable in '\$CONVEYOR_NO_SUCH/a\.pem'"):
        Tls(CertificateFiles("$CONVEYOR_NO_SUCH/a.pem", good.key, good.ca))
    monkeypatch.setenv("CONVEYOR_TEST_HOME", os.path.dirname(good.ca))
    by_variable = f"$CONVEYOR_TEST_HOME/{os.path.basename(good.ca)}"
    Tls(CertificateFiles(good.certificate, good.key, by_variable))
    for wrong in ("yes", {"certificate": "a"}, {"certificate": 1, "key": "a", "ca": "a"}):
        with pytest.raises(ValueError, match="tls"):
            credentials(wrong)
    assert credentials(None) is credentials(False) is None
    assert isinstance(credentials(True), SessionCertificate)
    monkeypatch.setattr(tls_module, "_MAKE", ("conveyor-has-no-such-program",))
    with pytest.raises(TlsError, match="install OpenSSL"):
        make_certificate()
    monkeypatch.setattr(tls_module, "_MAKE", ("openssl", "req", "-nonsense"))
    with pytest.raises(TlsError, match="could not make a certificate"):
        make_certificate()


def test_a_key_is_in_no_file_and_no_descriptor(made, opened_since):
    opened = opened_since()
    Tls(made)
    assert not opened()


def test_a_key_with_a_passphrase_is_refused(authority, tmp_path):
    """OpenSSL asks for it at the terminal, where there is one, and waits."""
    files = authority("ours", "here")
    locked = str(tmp_path / "locked.key")
    words = ("openssl", "ec", "-in", files.key, "-aes256", "-passout", "pass:secret")
    subprocess.run([*words, "-out", locked], check=True, capture_output=True)
    with pytest.raises(TlsError, match="the key is encrypted"):
        Tls(CertificateFiles(files.certificate, locked, files.ca))


def test_a_key_is_in_nothing_that_is_printed(made):
    assert b"PRIVATE KEY" in made.pem
    assert "KEY" not in repr([made]) + str(made)


def test_strangers_that_say_nothing_do_not_pile_up(made):
    """One that is dropped for another is so, too, while it is waited for the first word of TLS."""
    came = queue.Queue()
    listener = Listener(
        ("127.0.0.1", 0), TOKEN, HERE, came.put, tls=Tls(made), time_limit=600.0, most_pending=2
    )
    silent = []
    try:
        for _ in range(8):
            silent.append(socket.create_connection(listener.address))
            ask_admission(silent[-1], TOKEN, soon())
        for sock in silent[:6]:
            sock.settimeout(60)
            assert sock.recv(1) == b""
    finally:
        listener.close()
        for sock in silent:
            sock.close()


def test_a_relay_sleeps_while_neither_side_takes_anything(made, monkeypatch):
    looks = []

    class Counted(relay_module.selectors.PollSelector):
        def select(self, timeout=None):
            looks.append(1)
            return super().select(timeout)

    monkeypatch.setattr(relay_module.selectors, "PollSelector", Counted)
    near, far = secured_pair(made)
    with far, relayed(near) as pumps:
        for sock in (far, pumps):
            sock.setblocking(False)
        # Until both take no more, and go on taking no more.
        full = time.monotonic() + 1
        while time.monotonic() < full:
            for sock in (far, pumps):
                with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError):
                    while True:
                        sock.send(bytes(1 << 14))
                        full = time.monotonic() + 1
            time.sleep(0.01)
        before = len(looks)
        time.sleep(0.5)
        assert len(looks) - before < 10


def secured_pair(made):
    """Both ends of one connection over TLS."""
    tls = Tls(made)
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
    near = wrapped_in(near, tls.client, server=False)
    far = wrapped_in(far, tls.server, server=True)
    thread = threading.Thread(target=secured, args=(far, time.monotonic() + 60))
    thread.start()
    secured(near, time.monotonic() + 60)
    thread.join()
    return near, far


def test_a_relay_takes_no_descriptor_but_its_sockets(made, monkeypatch):
    """Its thread would end with a traceback where there is none."""

    def refuse(_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(relay_module.selectors.EpollSelector, "__init__", refuse)
    near, far = secured_pair(made)
    with far, relayed(near) as pumps:
        far.settimeout(60)
        pumps.sendall(b"by way of the relay")
        assert far.recv(100) == b"by way of the relay"
