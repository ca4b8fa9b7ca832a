"""pyzmq PAIR sockets over ipc, with pickle 5's buffers as frames of their own."""

from __future__ import annotations

import pickle
import tempfile
from typing import Any

import zmq

from benchmarks.systems.forked import ForkedSystem, Link, Receive, Send

LARGE = 64 << 10  # pyzmq's own threshold for sending without a copy


class ZmqLink(Link):
    def __init__(self, address: str) -> None:
        self._address = address
        self._socket: zmq.Socket[bytes] | None = None

    def _open(self) -> zmq.Socket[bytes]:
        self._socket = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        return self._socket

    def sender(self) -> Send:
        socket = self._open()
        socket.bind(self._address)

        def send(value: Any) -> None:
            buffers: list[pickle.PickleBuffer] = []
            head = pickle.dumps(value, 5, buffer_callback=buffers.append)
            if buffers or len(head) >= LARGE:
                socket.send_multipart([head, *(b.raw() for b in buffers)], copy=False)
            else:
                socket.send(head)

        return send

    def receiver(self) -> Receive:
        socket = self._open()
        socket.connect(self._address)

        def receive() -> Any:
            head = socket.recv()
            if not socket.rcvmore:
                return pickle.loads(head)
            frames = socket.recv_multipart(copy=False)
            return pickle.loads(head, buffers=[frame.buffer for frame in frames])

        return receive

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


class ZmqSystem(ForkedSystem):
    name = "zmq"

    def open(self) -> None:
        self._folder = tempfile.mkdtemp()
        self._count = 0

    def link(self) -> Link:
        self._count += 1
        return ZmqLink(f"ipc://{self._folder}/{self._count}")
