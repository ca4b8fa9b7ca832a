"""What stands for NCCL on the simulated accelerator: a pair of ranks that move bytes on its streams."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from contextlib import suppress
from typing import Any

from accelerator.machine import KIND
from accelerator.storages import twin
from accelerator.streams import SimStream
from conveyor import descriptors
from conveyor.device import Device, Stream
from conveyor.flag import Flag
from conveyor.transport.nccl.group import Group

#: Sockets on which somebody is waited for, by what the group is known by.
_listening: dict[bytes, socket.socket] = {}
_CHUNK = 1 << 20


class SimGroup(Group):
    """A group of two ranks as NCCL's: to send and to receive are kernels, each of which waits for the other.

    ``NcclTransport(install(), SimGroup, "sim_nccl")`` is the transport over it.
    """

    def __init__(self, device: Device, index: int, identity: bytes, rank: int) -> None:
        if device.kind != KIND:
            raise ValueError(f"it moves tensors of {KIND!r}, not of {device.kind!r}")
        self._identity = identity
        self._lock = threading.Lock()
        self._aborted = Flag()
        self._listener = _listening.pop(identity, None) if rank == 0 else None
        self._socket: socket.socket | None = None

    @staticmethod
    def missing() -> str | None:
        """As the base says."""
        return None

    @staticmethod
    def new_identity() -> bytes:
        """As the base says."""
        name = b"\0conveyor-sim-%d-%s" % (os.getpid(), uuid.uuid4().hex.encode())
        listener = descriptors.own_socket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(name)
        listener.listen(1)
        _listening[name] = listener
        return name

    def connect(self) -> None:
        """As the base says."""
        if self._listener is not None:
            with self._listener:
                made = descriptors.own_socket(self._listener.accept()[0])
        else:
            made = descriptors.own_socket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                made.connect(self._identity)
            except OSError:
                made.close()
                raise
        with self._lock:
            self._socket = made
            if self._aborted.is_set():
                made.shutdown(socket.SHUT_RDWR)

    def send(self, memory: Any, stream: Stream) -> None:
        """As the base says."""
        self._enqueue("send", memory, stream)

    def receive(self, memory: Any, stream: Stream) -> None:
        """As the base says."""
        self._enqueue("receive", memory, stream)

    def abort(self) -> None:
        """As the base says."""
        with self._lock:
            self._aborted.set()
            for one in (self._listener, self._socket):
                if one is not None:
                    with suppress(OSError):  # closed
                        one.shutdown(socket.SHUT_RDWR)

    def _enqueue(self, what: str, memory: Any, stream: Stream) -> None:
        assert isinstance(stream, SimStream)
        assert self._socket is not None
        connection, here = self._socket, memoryview(twin(memory).numpy())

        def kernel(held: Any = memory) -> None:  # its memory stays as long as it is enqueued
            at = 0
            while at < len(here):
                part = here[at : at + _CHUNK]
                try:
                    moved = connection.send(part) if what == "send" else connection.recv_into(part)
                except OSError:
                    moved = 0
                if not moved:
                    # NCCL does not notice that the other rank is gone: it waits to be aborted.
                    self._aborted.wait()
                    return
                at += moved

        stream.enqueue(f"nccl {what}", kernel)

    def __del__(self) -> None:
        for one in (self._listener, self._socket):
            if one is not None:
                one.close()
