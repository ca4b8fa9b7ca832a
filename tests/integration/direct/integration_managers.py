"""Transports as users would write them: over files, and over sockets where both ends take part.

What a value begins with says what goes wrong with it.
"""

import os
import pickle
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass

from conveyor.experimental import (
    CommunicatorMetadata,
    FetchRequest,
    TensorTransportManager,
    TensorTransportMetadata,
)

#: s; a bound for what should take milliseconds.
WAIT = 60

FAILS_TO_EXTRACT = -1
FAILS_TO_SEND = -2
#: The sender does nothing until it is aborted, or for ever.
NEVER_SENDS = -3
#: The producer's process ends while it sends.
DIES = -4
#: One tensor is missing.
TOO_FEW = -5
OTHER_SHAPE = -6
FAILS_TO_RECEIVE = -7
#: It says that it is on another device.
REMOTE = -8
#: The process ends that receives it.
KILLS = -9


def mark_of(tensors):
    first = tensors[0]
    return first.reshape(-1)[0] if getattr(first, "shape", ()) and first.shape[0] else 0


@dataclass
class Lying(TensorTransportMetadata):
    path: str = ""
    mark: int = 0


class Counting(TensorTransportManager):
    """Counts what it is asked for, in its process."""

    def __init__(self):
        self.extracted, self.freed, self.aborted, self.sent = [], [], [], 0
        self.changed = threading.Condition()

    def note(self, where, what):
        with self.changed:
            where.append(what)
            self.changed.notify_all()

    def tensor_transport_backend(self):
        return type(self).__name__

    def actor_has_tensor_transport(self, actor):
        return True

    def meta(self, obj_id, tensors, path):
        mark = mark_of(tensors)
        if mark == FAILS_TO_EXTRACT:
            raise KeyError("no room")
        self.note(self.extracted, obj_id)
        meta = [(getattr(one, "shape", None), getattr(one, "dtype", None)) for one in tensors]
        return Lying(meta, "moon" if mark == REMOTE else "cpu", path, int(mark))

    def garbage_collect(self, obj_id, meta, tensors):
        self.note(self.freed, obj_id)

    def abort_transport(self, obj_id, communicator):
        self.note(self.aborted, obj_id)


class Files(Counting):
    """One-sided."""

    folder = "/tmp"

    @staticmethod
    def is_one_sided():
        return True

    @staticmethod
    def can_abort_transport():
        return False

    def extract_tensor_transport_metadata(self, obj_id, tensors):
        meta = self.meta(obj_id, tensors, os.path.join(self.folder, obj_id))
        with open(meta.path, "wb") as file:
            pickle.dump(tensors, file)
        return meta

    def get_communicator_metadata(self, src_actor, dst_actor, backend):
        return CommunicatorMetadata()

    def recv_multiple_tensors(self, obj_id, meta, communicator, target_buffers=None):
        if meta.mark == FAILS_TO_RECEIVE:
            raise OSError("unplugged")
        if meta.mark == KILLS:
            os._exit(3)
        with open(meta.path, "rb") as file:
            tensors = pickle.load(file)
        if meta.mark == TOO_FEW:
            return tensors[1:]
        return [one[1:] for one in tensors] if meta.mark == OTHER_SHAPE else tensors

    def send_multiple_tensors(self, tensors, meta, communicator):
        raise NotImplementedError

    def garbage_collect(self, obj_id, meta, tensors):
        os.unlink(meta.path)
        super().garbage_collect(obj_id, meta, tensors)


class Started(Files):
    """One-sided, with fetches that are started and waited for. Those that are marked are never done."""

    @staticmethod
    def can_abort_transport():
        return True

    def fetch_multiple_tensors(self, obj_id, meta, communicator, target_buffers=None):
        request = FetchRequest(obj_id, None)
        if meta.mark != NEVER_SENDS:
            request.tensors = self.recv_multiple_tensors(obj_id, meta, communicator)
        return request

    def wait_fetch_complete(self, fetch_request, timeout=-1):
        if fetch_request.tensors is None:
            threading.Event().wait(None if timeout < 0 else timeout)
            raise TimeoutError
        return fetch_request.tensors


@dataclass
class ChannelPeer(CommunicatorMetadata):
    address: bytes = b""
    src: object = None
    dst: object = None


class Sockets(Counting):
    """Two-sided: the receiver listens, and the sender connects."""

    #: Values with these marks are sent in the opposite order, each after the next one.
    REORDERED = range(101, 104)

    def __init__(self):
        super().__init__()
        self.listening = {}

    @staticmethod
    def is_one_sided():
        return False

    @staticmethod
    def can_abort_transport():
        return True

    def extract_tensor_transport_metadata(self, obj_id, tensors):
        return self.meta(obj_id, tensors, "")

    def get_communicator_metadata(self, src_actor, dst_actor, backend):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(b"\0conveyor-test-" + os.urandom(8).hex().encode())
        listener.listen()
        address = listener.getsockname()
        self.listening[address] = listener
        return ChannelPeer(address, src_actor, dst_actor)

    def recv_multiple_tensors(self, obj_id, meta, communicator, target_buffers=None):
        # It stays where `abort_transport` finds it: that may come before this has begun.
        with self.listening[communicator.address] as listener:
            try:
                if meta.mark == KILLS:
                    os._exit(3)
                sender, _ = listener.accept()
            finally:
                del self.listening[communicator.address]
            with sender, sender.makefile("rb") as file:
                tensors = pickle.load(file)
        if meta.mark == FAILS_TO_RECEIVE:
            # Once all has come: a sender that cannot connect would say so, maybe before this is told.
            raise OSError("unplugged")
        return tensors[1:] if meta.mark == TOO_FEW else tensors

    def send_multiple_tensors(self, tensors, meta, communicator):
        with socket.socket(socket.AF_UNIX) as sender:
            sender.connect(communicator.address)
            if meta.mark == DIES:
                os._exit(3)
            if meta.mark == FAILS_TO_SEND:
                raise OSError("unplugged")
            if meta.mark in (NEVER_SENDS, KILLS):
                with self.changed:
                    assert self.changed.wait_for(lambda: self.aborted, WAIT)
                raise OSError("aborted")
            with self.changed:
                if meta.mark in self.REORDERED:
                    # The counter goes down from the last one.
                    turn = self.REORDERED[-1] - meta.mark
                    assert self.changed.wait_for(lambda: self.sent >= turn, WAIT)
                with sender.makefile("wb") as file:
                    pickle.dump(tensors, file)
                self.sent += 1
                self.changed.notify_all()

    def abort_transport(self, obj_id, communicator):
        listener = self.listening.get(communicator.address)
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        super().abort_transport(obj_id, communicator)


class Stubborn(Sockets):
    """Two-sided, and cannot be aborted."""

    @staticmethod
    def can_abort_transport():
        return False

    def abort_transport(self, obj_id, communicator):
        raise AssertionError("it cannot be aborted")
