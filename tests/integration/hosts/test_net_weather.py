"""Two hosts over a network that delays and stalls, and whose connections are reset.

The kernel of a test machine need not be able to lose packets, so a relay does to the stream what lost and
late packets do: every piece is late by up to 50 ms, and one in a hundred as long as TCP takes to send it
again.
"""

import contextlib
import os
import queue
import random
import socket
import struct
import threading
import time

import numpy as np
from test_net_pump import Pair, echo

SECONDS = float(os.environ.get("CONVEYOR_TEST_WEATHER_SECONDS", "8"))
RESET = float(os.environ.get("CONVEYOR_TEST_WEATHER_RESET", "2"))
JITTER, LOSS, AGAIN = 0.05, 0.01, 0.2


class Weather:
    """Stands before a listener; whoever dials it is carried there."""

    def __init__(self, to):
        self._to = to
        self._random = random.Random(3)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._lock = threading.Lock()
        self._open = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                one, _ = self._listener.accept()
                other = socket.create_connection(self._to)
            except OSError:
                return
            for sock in (one, other):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with self._lock:
                self._open |= {one, other}
            for source, target in ((one, other), (other, one)):
                pieces = queue.Queue(64)
                threading.Thread(target=self._read, args=(source, pieces), daemon=True).start()
                threading.Thread(target=self._write, args=(pieces, target), daemon=True).start()

    def _read(self, source, pieces):
        while True:
            try:
                piece = source.recv(1 << 16)
            except OSError:
                piece = b""
            late = self._random.random() * JITTER + (AGAIN if self._random.random() < LOSS else 0)
            pieces.put((time.monotonic() + late, piece))
            if not piece:
                return

    def _write(self, pieces, target):
        whole = True
        while True:
            due, piece = pieces.get()
            time.sleep(
                max(0.0, due - time.monotonic())
            )  # this is the weather, not a wait for anything
            if not piece:
                break
            try:
                target.sendall(piece)
            except OSError:
                whole = False
            if not whole:
                continue  # who reads for it is not to wait
        self._shut(target)

    def _shut(self, sock):
        with self._lock:
            self._open.discard(sock)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def reset(self):
        """All connections end with RST."""
        with self._lock:
            gone, self._open = self._open, set()
        for sock in gone:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)
            sock.close()

    def close(self):
        with contextlib.suppress(OSError):
            # To close it alone wakes no thread in accept().
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()


def test_frames_come_in_their_order_and_once_in_bad_weather():
    with Pair(echo, window=5.0, between=Weather) as pair:
        node = pair.node
        writer, reader = node.ends()
        sent, got = [], []

        def receive():
            while (value := node.receive(reader)) is not None:
                got.append(value[0])

        receiver = threading.Thread(target=receive)
        receiver.start()
        start = time.monotonic()
        resets = 0
        payload = np.zeros(100_000, np.uint8)
        while (now := time.monotonic() - start) < SECONDS or resets < 2:
            n = len(sent)
            sent.append(n)
            node.send(writer, (n, payload if n % 50 == 0 else None), n)
            # Not one that is not there yet: a machine that stands still for seconds has it come late.
            if now > RESET * (resets + 1) and node.pump.counts(1)[4] > resets:
                pair.between.reset()
                resets += 1
        node.send(writer, None, len(sent))
        receiver.join(60)
        assert not receiver.is_alive(), f"{len(got)} of {len(sent)} frames have come"
        assert got == sent
        assert len(got) > 100
        connections = node.pump.counts(1)[4]
        assert connections >= resets > 1
        print(f"{len(got)} frames in their order, {resets} resets, {connections} connections")
        pair.between.close()
