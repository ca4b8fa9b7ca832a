"""Nodes that share no memory, connected over TLS."""

import contextlib
import socket
import sys
import threading

import cloudpickle
import inside
import numpy as np
import pytest
from ray_nodes import HERE, THERE, TIMEOUT, WAIT, get

import conveyor
from conveyor.cluster.tls import TlsError
from conveyor.dag import InputNode
from conveyor.engines.ray import agents
from conveyor.exceptions import ActorStartError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECRET = "a payload that nobody on the way is to read"


@conveyor.remote
class Stage:
    def echo(self, x):
        return x

    def got(self, refs):
        return conveyor.get(refs)


class Tapped(agents.Listener):
    """Other hosts come to it by way of somebody who keeps all that is said."""

    heard = bytearray()

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._to = self.address
        self._tap = socket.create_server((self.address[0], 0))
        self.address = self._tap.getsockname()
        self._carriers = []
        self._accepting = self._start(self._accept)

    def _start(self, target, *args):
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        return thread

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._tap.accept()
                far = socket.create_connection(self._to)
                for source, target in ((near, far), (far, near)):
                    self._carriers.append(self._start(self._carry, source, target))

    def _carry(self, source, target):
        with contextlib.suppress(OSError):
            while some := source.recv(1 << 16):
                self.heard += some
                target.sendall(some)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self):
        super().close()
        self._tap.shutdown(socket.SHUT_RDWR)
        for thread in (self._accepting, *self._carriers):
            thread.join(WAIT)
        self._tap.close()


@pytest.mark.parametrize("tls", [True, False])
def test_what_goes_between_nodes_is_encrypted(two_nodes, leaves_nothing, monkeypatch, tls):
    monkeypatch.setattr(agents, "Listener", Tapped)
    Tapped.heard.clear()
    with leaves_nothing():
        conveyor.init(engine="ray", shared_memory="node", node_timeout=TIMEOUT, tls=tls)
        here, there = Stage.options(**HERE).remote(), Stage.options(**THERE).remote()
        assert get(there.echo.remote(SECRET)) == SECRET
        array = np.frombuffer(SECRET.encode() * 40_000, np.uint8)
        assert np.array_equal(get(there.got.remote([conveyor.put(array)]))[0], array)
        with InputNode() as inp:
            dag = there.echo.bind(here.echo.bind(inp))
        with dag.compile() as graph:
            assert get([graph.execute(i) for i in range(8)]) == list(range(8))
            assert np.array_equal(get(graph.execute(array)), array)
            inside.pump().disconnect(1, "by the test")
            assert get(graph.execute(SECRET)) == SECRET
        conveyor.shutdown()
    assert len(Tapped.heard) > array.nbytes
    # Without TLS it is there: so it would be found.
    assert (SECRET.encode() in Tapped.heard) is not tls


def test_files_that_are_not_there_are_told(two_nodes, leaves_nothing, monkeypatch, tmp_path):
    from conveyor.cluster.tls import make_certificate

    path = tmp_path / "both.pem"
    path.write_bytes(make_certificate().pem)
    files = dict.fromkeys(("certificate", "key", "ca"), "$CONVEYOR_TEST_FILE")
    with leaves_nothing():
        with pytest.raises(TlsError, match="a variable in"):
            conveyor.init(engine="ray", tls=files)
        assert not conveyor.is_initialized()
        # The driver has it, and the other node has not.
        monkeypatch.setenv("CONVEYOR_TEST_FILE", str(path))
        conveyor.init(engine="ray", shared_memory="node", node_timeout=TIMEOUT, tls=files)
        with pytest.raises(
            ActorStartError, match=r"cannot be connected: tls: there is a variable in"
        ):
            get(Stage.options(**THERE).remote().echo.remote(1))
        assert get(Stage.options(**HERE).remote().echo.remote(1)) == 1
        conveyor.shutdown()


def test_bad_options():
    with pytest.raises(ValueError, match="tls is True"):
        conveyor.init(engine="ray", tls="yes")
    assert not conveyor.is_initialized()
