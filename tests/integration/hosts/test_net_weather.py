"""Two hosts over a network that delays and stalls, and whose connections are reset.

The kernel of a test machine need not be able to lose packets, so a relay does to the stream what lost and
late packets do: every piece is late by up to 50 ms, and one in a hundred as long as TCP takes to send it
again.
"""

import contextlib
import ctypes
import multiprocessing
import os
import queue
import random
import select
import socket
import struct
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.hosts import Node
from conveyor import _core
from conveyor.cluster.connections import Listener
from conveyor.cluster.handshake import Identity, dial, new_token

TOKEN = new_token()
WINDOW = [10.0]


def entry(body, address, failed):
    try:
        body(address)
    except BaseException:
        traceback.print_exc()
        failed.set()
        raise


def handed_over(_sock, _identity):
    raise AssertionError("the pump takes its connections itself")


class Pair:
    """Host 0 here, which listens, and host 1 in a process that runs ``body`` and dials."""

    def __init__(self, body, window=10.0, between=None):
        WINDOW[0] = window
        self.node = Node(0, window=window)
        self.node.mirror()
        self.listener = Listener(("127.0.0.1", 0), TOKEN, Identity(0, "test"), handed_over)
        self.listener.give_to(self.node.pump)
        self.between = between and between(self.listener.address)
        address = (self.between or self.listener).address
        context = multiprocessing.get_context("fork")
        self.failed = context.Event()
        self.process = context.Process(target=entry, args=(body, address, self.failed))
        self.process.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.listener.close()
        self.node.stop()
        self.process.join(60)
        alive = self.process.is_alive()
        self.process.kill()
        self.process.join()
        self.process.close()
        if self.between:
            self.between.close()
        assert not alive
        assert not self.failed.is_set()


def is_remote(address):
    """Host 1, in its own process; it dials again whenever its connection has broken."""
    node = Node(1, window=WINDOW[0])
    node.mirror()

    def keep_connected():
        while True:
            try:
                sock, _ = dial(address, TOKEN, Identity(1, "test"), 60)
            except OSError:
                return  # the session is over
            node.connect(sock)
            try:
                node.wait_event(_core.HOST_DISCONNECTED, 120)
            except OSError:
                return

    threading.Thread(target=keep_connected, daemon=True).start()
    return node


def echo(address):
    node = is_remote(address)
    writer, reader = node.ends()
    number = 0
    while (value := node.receive(reader)) is not None:
        node.send(writer, value, number)
        number += 1
    node.send(writer, None, number)
    node.wait_lost()


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


def test_a_host_comes_back_while_the_interpreter_is_kept_from_all_other_threads():
    """Its connection goes from the listener to the pump without Python."""
    with Pair(echo) as pair:
        pair.node.wait_event(_core.HOST_CONNECTED)
        pair.node.pump.disconnect(1, "a test")
        for _ in range(2):  # disconnected, connected: each makes it readable
            one = (ctypes.c_int * 2)(pair.node.pump.notice_fd, select.POLLIN)
            assert ctypes.PyDLL(None).poll(one, 1, 60_000) == 1  # with the GIL
            events = [kind for kind, _, _ in pair.node.pump.events()]
            if _core.HOST_CONNECTED in events:
                break
        assert events[-1] == _core.HOST_CONNECTED
        writer, reader = pair.node.ends()
        pair.node.send(writer, "again", 0)
        assert pair.node.receive(reader) == "again"
        pair.node.send(writer, None, 1)


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
