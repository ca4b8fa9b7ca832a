"""What a value costs between two hosts, beside what the wire costs: ``python docs/tools/wires.py``.

Two processes of this machine, each a host of its own with a process table, arenas and a pump, over TCP on the
loopback interface. The floors are two processes with plain sockets: a ping-pong, and one stream. ZeroMQ with
CURVE is measured if pyzmq is there, and NIXL (UCX) if that is.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.hosts import Node

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "64 MB": 64 << 20}
ROUNDS = {"1 KB": 3000, "1 MB": 200, "64 MB": 12}
STREAM = 30
NIXL_TIME_LIMIT = 5.0


def _pair() -> tuple[socket.socket, socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    listener.close()
    for s in (one, other):
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


def _exactly(sock: socket.socket, into: memoryview) -> None:
    while into:
        into = into[sock.recv_into(into) :]


def _p50(once: Callable[[], Any], rounds: int) -> float:
    for _ in range(max(2, rounds // 10)):
        once()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _with_child(child: Callable[[socket.socket], None], own: Callable[[socket.socket], Any]) -> Any:
    here, there = _pair()
    process = multiprocessing.get_context("fork").Process(target=child, args=(there,))
    process.start()
    there.close()
    try:
        return own(here)
    finally:
        here.close()  # a child that waits for its end
        process.join(10)
        process.kill()


def tcp_echo(size: int, rounds: int) -> float:
    """A message of that size there and back, in seconds."""

    def child(sock: socket.socket) -> None:
        buffer = memoryview(bytearray(size))
        for _ in range(rounds + max(2, rounds // 10)):
            _exactly(sock, buffer)
            sock.sendall(buffer)

    def own(sock: socket.socket) -> float:
        buffer = memoryview(bytearray(size))

        def once() -> None:
            sock.sendall(buffer)
            _exactly(sock, buffer)

        return _p50(once, rounds)

    return float(_with_child(child, own))


def tcp_stream(size: int, count: int) -> float:
    """Bytes in a second of ``count`` messages one way."""

    def child(sock: socket.socket) -> None:
        buffer = memoryview(bytearray(size))
        for _ in range(count + 3):
            _exactly(sock, buffer)
            sock.sendall(b"x")

    def own(sock: socket.socket) -> float:
        buffer = memoryview(bytearray(size))
        answer = memoryview(bytearray(1))
        for _ in range(3):
            sock.sendall(buffer)
            _exactly(sock, answer)
        start = time.perf_counter()
        for _ in range(count):
            sock.sendall(buffer)
        for _ in range(count):
            _exactly(sock, answer)
        return size * count / (time.perf_counter() - start)

    return float(_with_child(child, own))


def _value(size: int) -> Any:
    return b"x" * size if size <= 1 << 10 else np.zeros(size, np.uint8)


def conveyor_echo(size: int, rounds: int) -> float:
    def child(sock: socket.socket) -> None:
        node = Node(1)
        node.mirror()
        node.connect(sock)
        writer, reader = node.ends()
        for n in range(rounds + max(2, rounds // 10)):
            node.send(writer, node.receive(reader), n)
        node.receive(reader)

    def own(sock: socket.socket) -> float:
        node = Node(0)
        node.mirror()
        node.connect(sock)
        writer, reader = node.ends()
        value = _value(size)

        def once() -> None:
            node.send(writer, value, 0)
            node.receive(reader)

        took = _p50(once, rounds)
        node.send(writer, None, 0)
        return took

    return float(_with_child(child, own))


def conveyor_stream(size: int, count: int) -> float:
    warm = 10  # blocks get their memory

    def child(sock: socket.socket) -> None:
        node = Node(1)
        node.mirror()
        node.connect(sock)
        writer, reader = node.ends()
        for n in range(count + warm):
            node.receive(reader)
            node.send(writer, None, n)
        node.receive(reader)

    def own(sock: socket.socket) -> float:
        node = Node(0)
        node.mirror()
        node.connect(sock)
        writer, reader = node.ends()
        value = _value(size)
        ahead = 2  # as many under way as a small depth gives: more would only fill memory

        def send(number: int) -> None:
            for n in range(number):
                node.send(writer, value, n)
                if n >= ahead:
                    node.receive(reader)
            for _ in range(min(ahead, number)):
                node.receive(reader)

        send(warm)
        start = time.perf_counter()
        send(count)
        speed = size * count / (time.perf_counter() - start)
        node.send(writer, None, 0)
        return speed

    return float(_with_child(child, own))


def zmq_echo(size: int, rounds: int) -> float:
    """PAIR sockets with CURVE over the loopback interface."""
    import zmq

    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()

    def child(sock: socket.socket) -> None:
        context = zmq.Context()
        pair = context.socket(zmq.PAIR)
        pair.curve_secretkey, pair.curve_publickey = server_secret, server_public
        pair.curve_server = True
        port = pair.bind_to_random_port("tcp://127.0.0.1")
        sock.sendall(port.to_bytes(4, "big"))
        for _ in range(rounds + max(2, rounds // 10)):
            pair.send(pair.recv(copy=False), copy=False)
        sock.recv(1)

    def own(sock: socket.socket) -> float:
        port = memoryview(bytearray(4))
        _exactly(sock, port)
        context = zmq.Context()
        pair = context.socket(zmq.PAIR)
        pair.curve_secretkey, pair.curve_publickey = client_secret, client_public
        pair.curve_serverkey = server_public
        pair.connect(f"tcp://127.0.0.1:{int.from_bytes(port, 'big')}")
        buffer = bytes(size)

        def once() -> None:
            pair.send(buffer, copy=False)
            pair.recv(copy=False)

        took = _p50(once, rounds)
        sock.sendall(b"x")
        return took

    return float(_with_child(child, own))


def nixl_echo(size: int, rounds: int) -> float:
    """Each side writes to the other's registered memory by UCX over TCP, with a note; both look for it
    without a pause, since the library has nothing to sleep on."""
    os.environ["UCX_TLS"] = "tcp,self"

    def side(sock: socket.socket, name: str) -> Callable[[], None]:
        from conveyor.transport.nixl.endpoint import make_agent

        agent = make_agent(name)
        memory = np.zeros(size, np.uint8)
        registered = agent.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
        hello = pickle.dumps((agent.name, agent.get_agent_metadata(), memory.ctypes.data))
        sock.sendall(len(hello).to_bytes(4, "big") + hello)
        length = memoryview(bytearray(4))
        _exactly(sock, length)
        theirs = memoryview(bytearray(int.from_bytes(length, "big")))
        _exactly(sock, theirs)
        other, metadata, address = pickle.loads(theirs)  # its own child's
        agent.add_remote_agent(metadata)
        here = agent.get_xfer_descs([(memory.ctypes.data, size, 0)], "DRAM")
        there = agent.get_xfer_descs([(address, size, 0)], "DRAM")
        handle = agent.initialize_xfer("WRITE", here, there, other, b"n")

        def write() -> None:
            state = agent.transfer(handle)
            end = time.monotonic() + NIXL_TIME_LIMIT
            while state != "DONE":
                state = agent.check_xfer_state(handle)
                if time.monotonic() > end:
                    raise TimeoutError("NIXL has not ended a write")

        def come() -> None:
            end = time.monotonic() + NIXL_TIME_LIMIT
            while not agent.get_new_notifs().get(other):
                if time.monotonic() > end:
                    raise TimeoutError("NIXL has not told of a write")
                os.sched_yield()

        side.keeps = agent, registered, memory, handle  # type: ignore[attr-defined]
        side.write, side.come = write, come  # type: ignore[attr-defined]
        return lambda: (write(), come())[0]

    def child(sock: socket.socket) -> None:
        side(sock, "there")
        for _ in range(rounds + max(2, rounds // 10)):
            side.come()  # type: ignore[attr-defined]
            side.write()  # type: ignore[attr-defined]
        sock.recv(1)

    def own(sock: socket.socket) -> float:
        took = _p50(side(sock, "here"), rounds)
        sock.sendall(b"x")
        return took

    return float(_with_child(child, own))


def main() -> None:
    ways: list[tuple[str, Callable[[int, int], float]]] = [
        ("plain TCP sockets", tcp_echo),
        ("Conveyor", conveyor_echo),
    ]
    try:
        import zmq  # noqa: F401

        ways.append(("ZeroMQ, CURVE", zmq_echo))
    except ImportError:
        print("pyzmq is not installed: ZeroMQ is left out", file=sys.stderr)
    if importlib.util.find_spec("nixl") is not None:
        ways.append(("NIXL (UCX over TCP)", nixl_echo))
    else:
        print("nixl is not installed: it is left out", file=sys.stderr)
    print(f"{'echo, p50':22}" + "".join(f"{name:>14}" for name in SIZES))
    for name, way in ways:
        print(f"{name:22}", end="")
        for label, size in SIZES.items():
            try:
                print(f"{way(size, ROUNDS[label]) * 1e6:11.0f} us", end="", flush=True)
            except TimeoutError:
                print(f"{'not done':>14}", end="", flush=True)
        print()
    print(f"{'64 MB one way':22}" + f"{'MB/s':>14}")
    for name, stream in (("plain TCP, one stream", tcp_stream), ("Conveyor", conveyor_stream)):
        speed = max(stream(64 << 20, STREAM) for _ in range(3))
        print(f"{name:22}{speed / 1e6:14.0f}", flush=True)


if __name__ == "__main__":
    main()
