"""A Ray cluster whose nodes are in network namespaces: this process is at the first of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import wire
from namespaces import Namespace

from conveyor.runtime.context import running

#: On a busy machine Ray's processes are not to come last, nor to be taken for dead where they are slow.
_ENVIRON = {
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_gcs_rpc_server_connect_timeout_s": "60",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
}
_PORT = 6379
_START_SECONDS = 120.0


def _program(name: str) -> str:
    """The one of this interpreter, whose environment need not be activated."""
    out_of_band = os.path.dirname(sys.executable)
    return shutil.which(name, path=f"{out_of_band}:{os.environ['PATH']}") or name


class Hosts:
    """Node ``i`` has the resource ``host<i>``, is in the namespace ``spaces[i]`` and at the end of the cable
    ``wires[i]``."""

    def __init__(self, count: int, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.spaces: list[Namespace] = []
        for _ in range(count):
            self.spaces.append(Namespace())
            stack.callback(self.spaces[-1].close)
        network = wire.network(self.spaces)
        stack.callback(network.close)
        self.kind = type(network).__name__
        self.wires = [network.wire(host) for host in range(count)]
        stack.enter_context(self.spaces[0].entered())
        self._folder = tempfile.mkdtemp(prefix="netns-", dir="/tmp")
        stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        for host in range(count):
            self.start(host)
            # Nothing of Ray's may be left that still uses the cables.
            stack.callback(self.spaces[host].kill_all)

    def start(self, host: int) -> None:
        """Start Ray's node there, and wait for it."""
        log = Path(self._folder, f"node{host}.log")
        where = (
            ["--head", f"--port={_PORT}", f"--temp-dir={self._folder}", "--include-dashboard=false"]
            if host == 0
            else [f"--address={wire.address(0)}:{_PORT}"]
        )
        words = [
            *(_program("ray"), "start", *where, "--block"),
            *(f"--node-ip-address={wire.address(host)}", "--num-cpus=2"),
            *(f'--resources={{"host{host}": 10}}', "--object-store-memory=200000000"),
        ]
        with open(log, "wb") as file:
            started = subprocess.Popen(
                self.spaces[host].command(*words),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ENVIRON},
            )
        end = time.monotonic() + _START_SECONDS
        while "Ray runtime started" not in (said := log.read_text("utf-8", "replace")):
            if started.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"Ray starts no node in namespace {host}:\n{said}")
            time.sleep(0.05)
        self._started = started

    def connect(self) -> None:
        """Connect Ray here to them, as long as they are there."""
        os.environ.update(_ENVIRON)
        import ray

        ray.init(
            address=f"{wire.address(0)}:{_PORT}",
            _node_ip_address=wire.address(0),
            log_to_driver=False,
        )
        self._stack.callback(ray.shutdown)

    def reset_connections(self, host: int = 0) -> int:
        """End the connections of other hosts to what the session has on that one, with RST; how many there
        were."""
        agents = running()._engine._agents
        at = [agents._listener.address, *(one.address for one in agents._by_node.values())]
        port = dict(at)[wire.address(host)]
        ended = self.spaces[host].run(
            *("ss", "-K", "-H", "-n", "-t", "state", "established", f"( sport = :{port} )")
        )
        return len(ended.splitlines())


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    with contextlib.ExitStack() as stack:
        yield Hosts(count, stack)
