"""The end of an edge whose tensors go from memory of a device to memory of a device.

The writer copies them to memory of the device that readers have opened. The note tells which, and the event
that happens when it is filled. When it has, a reader copies what it wants to memory of its own, and tells the
writer which event happens when that is done. The writer uses the memory again when it has.

No stream waits for an event of the other process: if that is killed, the event never happens, and the stream
does nothing any more. So the hosts ask for events, and a thread does where one has not happened yet. Nobody
else waits for it.

A reader that cannot open the memory, since it does not see the writer's device, asks for each transfer by way
of the host: a thread of the writer's copies the stretch to memory of the host, which goes over the wire.

There are two copies, and not one or none. What the writer's next task enqueues may write to the tensors, so
it would have to wait for the readers; and what a reader holds must be there when the writer is not.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from conveyor.device import Device, Stream
from conveyor.flag import Flag
from conveyor.transport.base import Conduit, Wire


class DeviceIpcConduit(Conduit):
    """What both ends have."""

    def __init__(self, wire: Wire, device: Device) -> None:
        #: Why this process has no device of the kind.
        self._why_none = device.viable()
        self._wire = wire
        self._device = device
        self._over: BaseException | None = None
        #: It is set when this end is over.
        self._ends = Flag()
        #: With overlap, by the device, where the work of this end is enqueued.
        self._streams: dict[int, Stream] = {}

    def abort(self, reason: BaseException) -> None:
        """As for :class:`Conduit`."""
        self._over = reason
        self._ends.set()

    def close(self) -> None:
        """As for :class:`Conduit`."""
        self._streams.clear()

    def _stream(self, index: int) -> Stream:
        """Where work is enqueued: beside the program's with overlap, else as a part of it."""
        if not self._wire.overlap:
            return self._device.current_stream(index)
        if index not in self._streams:
            self._streams[index] = self._device.new_stream(index, urgent=True)
        return self._streams[index]

    def _enqueuing_on(self, stream: Stream) -> AbstractContextManager[None]:
        """Have what is enqueued go to the stream of :meth:`_stream`. Without overlap it does already, and to
        say so would take a good part of the time of a small transfer."""
        return self._device.using(stream) if self._wire.overlap else nullcontext()
