"""Endpoint of an edge whose tensors go from memory of a device to memory of a device.

The writer copies the tensors to a staging buffer: memory of the device that readers have opened. The note
names the buffer, and the event that happens when it is filled. After that event a reader copies the tensors
that it wants to memory of its own, and tells the writer which event happens when the copy is done. After that
event the writer uses the buffer again.

No stream waits for an event of the other process: if that process is killed, the event never happens, and the
stream would be stuck for good. So the CPU asks for events, and a thread does so for an event that has not
happened yet. Nothing else waits for it.

A reader that cannot open the memory, since it does not see the writer's device, asks for each transfer
through host memory: a thread of the writer copies the staging buffer to host memory, which goes over the
wire.

There are two copies, not one or none. The writer's next task may enqueue work that writes to the tensors, so
it would have to wait for the readers; and a reader's tensors must outlive the writer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from conveyor.device import Device, Stream
from conveyor.flag import Flag
from conveyor.transport.base import Conduit, Wire


class DeviceIpcConduit(Conduit):
    """Common part of the writer's and the reader's endpoint."""

    def __init__(self, wire: Wire, device: Device) -> None:
        #: Why this process has no device of the kind.
        self._why_none = device.viable()
        self._wire = wire
        self._device = device
        self._over: BaseException | None = None
        #: Set when this end was aborted.
        self._ends = Flag()
        #: With overlap, by the device, the stream on which the work of this end is enqueued.
        self._streams: dict[int, Stream] = {}

    def abort(self, reason: BaseException) -> None:
        """Keep ``reason``, and end the waiting of this end's threads."""
        self._over = reason
        self._ends.set()

    def close(self) -> None:
        """Release the streams of this end."""
        self._streams.clear()

    def _stream(self, index: int) -> Stream:
        """Return the stream to enqueue work on: a stream of this end with overlap, else the program's current
        one."""
        if not self._wire.overlap:
            return self._device.current_stream(index)
        if index not in self._streams:
            self._streams[index] = self._device.new_stream(index, urgent=True)
        return self._streams[index]

    def _enqueuing_on(self, stream: Stream) -> AbstractContextManager[None]:
        """Enqueue on ``stream``, which is from :meth:`_stream`. Without overlap that is the current stream
        already, and to set it would take a good part of the time of a small transfer."""
        return self._device.using(stream) if self._wire.overlap else nullcontext()
