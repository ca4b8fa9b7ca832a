"""What the writer of an edge over memory of a device keeps: memory, and events of its readers."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from conveyor.transport.device_ipc import endpoint as device_ipc  # noqa: E402
from conveyor.transport.device_ipc.endpoint import Writer  # noqa: E402

pytestmark = pytest.mark.torch

MIB = 1 << 20
#: None of them fits in the place of another one.
SIZES = [21 * MIB, 9 * MIB, 3 * MIB, 64]


class Event:
    def record(self, stream=None):
        pass

    def query(self):
        return True

    def handle(self):
        return b"filled"


class Device:
    """One whose work is done at once, and which has so much room.

    opened: events of others that were opened, weakly.
    """

    kind = "fake"

    def __init__(self, room=1 << 40):
        self.room = room
        self.opened = []
        self._stream = SimpleNamespace(index=0, device=self)

    def viable(self):
        return None

    def current_stream(self, index=None):
        return self._stream

    def using(self, stream):
        return nullcontext()

    def new_event(self, index=None, *, interprocess=False):
        return Event()

    def open_event(self, handle, index=None):
        event = Event()
        self.opened.append(weakref.ref(event))
        return event

    def empty(self, nbytes, index=None):
        if nbytes > self.room:
            raise torch.OutOfMemoryError(f"{nbytes} bytes were asked for")
        self.room -= nbytes
        made = torch.empty(nbytes, dtype=torch.uint8)
        weakref.finalize(made, self._freed, nbytes)
        return made

    def _freed(self, nbytes):
        self.room += nbytes

    def export_memory(self, tensor):
        return b"memory"


class Wire:
    """One reader, which reads all at once."""

    members = ("writer", "reader")
    overlap = False

    def __init__(self):
        self.told = []
        self._taken = []

    def takes(self, transfer):
        self._taken.append((1, device_ipc.Taken(transfer, (b"read %d" % transfer,), 1)))

    def send(self, message):
        self.told.append(message)

    def receive(self):
        taken, self._taken = self._taken, []
        return taken


def made(device):
    wire = Wire()
    return wire, Writer(wire, device)


def send(wire, writer, nbytes, transfer):
    sending = writer.send([torch.zeros(nbytes, dtype=torch.uint8)], transfer)
    sent = sending.begin()
    wire.takes(transfer)
    writer.progress()
    assert sent.done()


def test_events_of_readers_go_with_their_memory():
    device = Device()
    wire, writer = made(device)
    for transfer in range(40):
        send(wire, writer, SIZES[transfer % len(SIZES)], transfer)
    assert len(device.opened) == 40
    assert sum(one() is not None for one in device.opened) <= len(SIZES)


def test_memory_that_waits_for_its_next_use_gives_way():
    device = Device(room=40 * MIB)
    wire, writer = made(device)
    for transfer, nbytes in enumerate(SIZES[:3]):
        send(wire, writer, nbytes, transfer)
    assert device.room == 7 * MIB
    send(wire, writer, 40 * MIB, 3)
    told = [one for one in wire.told if isinstance(one, device_ipc.Gone)]
    assert sorted(number for one in told for number in one.numbers) == [1, 2, 3]
    with pytest.raises(torch.OutOfMemoryError):  # there is no more than that
        writer.send([torch.zeros(41 * MIB, dtype=torch.uint8)], 4)
