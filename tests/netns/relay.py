"""A network of TUN devices: a process takes the IP packets of each host and gives them to another one.

``python relay.py CONTROL SEED PATH ADDRESS [PATH ADDRESS ...]`` is that process: it makes a device in each of
the namespaces at those paths, and obeys the lines that come over the descriptor CONTROL.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # where it is the process

import wire
from namespaces import Namespace, entered
from wire import Counts, Weather

_TUN = "/dev/net/tun"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKET = 1 << 16
#: So many packets are taken from one device before the others have their turn.
_TURN = 64
DEVICE = "wire"


def refusal() -> str:
    """Why there can be no TUN devices; "" where there can."""
    try:
        os.close(os.open(_TUN, os.O_RDWR))
    except OSError as error:
        return f"{_TUN}: {error.strerror}"
    return ""


class RelayNetwork(wire.Network):
    """The hosts' side of the process."""

    def __init__(self, hosts: Sequence[Namespace], seed: int) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        places = [word for i, host in enumerate(hosts) for word in (host.path, wire.address(i))]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(seed), *places],
                pass_fds=[theirs.fileno()],
                stderr=subprocess.PIPE,
                text=True,
            )
        try:
            self._answer()
            for i, host in enumerate(hosts):
                host.run("ip", "address", "add", f"{wire.address(i)}/24", "dev", DEVICE)
                host.run("ip", "link", "set", DEVICE, "txqueuelen", "10000", "up")
        except BaseException:
            self.close()
            raise

    def put(self, host: int, way: str, weather: Weather) -> None:
        self._ask(put=[host, way, asdict(weather)])

    def counts(self, host: int, way: str) -> Counts:
        return Counts(*self._ask(counts=[host, way]))

    def _ask(self, **order: Any) -> Any:
        self._control.send(json.dumps(order).encode())
        return self._answer()

    def _answer(self) -> Any:
        answer = self._control.recv(_PACKET)
        if not answer:
            assert self._process.stderr is not None
            raise OSError(f"the relay has ended:\n{self._process.stderr.read()}")
        return json.loads(answer)

    def close(self) -> None:
        self._control.close()
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._process.wait()


class _Way:
    """One way of a cable."""

    def __init__(self) -> None:
        self.weather = wire.FINE
        self.carried = self.lost = self.overtaken = 0
        self._latest = 0.0
        #: Counts the cuts: what was on the way then is lost.
        self.cuts = 0

    def put(self, weather: Weather) -> None:
        self.cuts += weather.loss == 1.0
        self.weather = weather

    def takes(self, chance: random.Random, start: float) -> float | None:
        """When a packet is there that sets out at ``start``; ``None``: never."""
        weather = self.weather
        if weather.loss and chance.random() < weather.loss:
            self.lost += 1
            return None
        due = start + weather.delay + (weather.jitter and weather.jitter * chance.random())
        self.carried += 1
        if due < self._latest:
            self.overtaken += 1
        else:
            self._latest = due
        return due


class _Relay:
    def __init__(self, control: socket.socket, seed: int, places: Sequence[str]) -> None:
        self._control = control
        self._chance = random.Random(seed)
        self._devices = [_device(path) for path in places[::2]]
        self._to = {socket.inet_aton(at): i for i, at in enumerate(places[1::2])}
        self._ways = [{way: _Way() for way in wire.WAYS} for _ in self._devices]
        # (due, order, to, packet, [a way and its cuts]).
        self._late: list[tuple[float, int, int, bytes, list[tuple[_Way, int]]]] = []
        self._count = 0

    def run(self) -> None:
        poll = select.epoll()
        poll.register(self._control, select.EPOLLIN)
        for fd in self._devices:
            poll.register(fd, select.EPOLLIN)
        self._control.send(b"null")
        while True:
            timeout = max(0.0, self._late[0][0] - time.monotonic()) if self._late else -1
            ready = {fd for fd, _ in poll.poll(timeout)}
            ordered = self._control.fileno() in ready
            for host, fd in enumerate(self._devices):
                if fd in ready or ordered:
                    # What was sent before an order is sent in the weather that was.
                    self._take(host, fd, _PACKET if ordered else _TURN)
            if ordered and not self._obey():
                return
            self._give()

    def _obey(self) -> bool:
        order = self._control.recv(_PACKET)
        if not order:
            return False
        said = json.loads(order)
        answer = None
        if "put" in said:
            host, way, weather = said["put"]
            self._ways[host][way].put(Weather(**weather))
        else:
            host, way = said["counts"]
            found = self._ways[host][way]
            answer = [found.carried, found.lost, found.overtaken]
        self._control.send(json.dumps(answer).encode())
        return True

    def _take(self, host: int, fd: int, most: int) -> None:
        for _ in range(most):
            try:
                packet = os.read(fd, _PACKET)
            except BlockingIOError:
                return
            to = self._to.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if to is None:
                continue
            ways = [self._ways[host][wire.OUT], self._ways[to][wire.IN]]
            due: float | None = time.monotonic()
            for way in ways:
                if due is not None:
                    due = way.takes(self._chance, due)
            if due is not None:
                self._count += 1
                marks = [(way, way.cuts) for way in ways]
                heapq.heappush(self._late, (due, self._count, to, packet, marks))

    def _give(self) -> None:
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            _, _, to, packet, marks = heapq.heappop(self._late)
            if all(way.cuts == cuts for way, cuts in marks):
                os.write(self._devices[to], packet)


def _device(path: str) -> int:
    """A TUN device in the namespace at ``path``."""
    with entered(path):
        fd = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    what = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(fd, _TUNSETIFF, what)
    return fd


if __name__ == "__main__":
    _Relay(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:]).run()
