"""Staging buffers for tensors of a device that are being sent, and their release once nobody reads them.

This may take a while: to close another process's memory takes until the device has done all work that it was
given.
"""

from __future__ import annotations

import functools
import os
import select
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from conveyor.device import Device, Event, Stream
from conveyor.device.base import happened, outlast, wait_until
from conveyor.transport.base import Wire
from conveyor.transport.pool import fits

#: Seconds between two looks, at first and at most: nobody waits for it.
_SHORT, _LONG = 0.001, 0.05


@dataclass(eq=False)
class Left:
    """Object that may still be read.

    what: the object.
    reads: the events that happen when it has been read.
    reader: the process whose events these are. ``None``: this one.
    """

    what: object
    reads: Sequence[Event]
    reader: int | None = None

    def is_read(self) -> bool:
        """Return whether nobody reads it: all reads are done, or the reading process is dead."""
        return all(map(happened, self.reads)) or (
            self.reader is not None and _has_ended(self.reader)
        )


#: Objects for which no thread could be started.
_waiting: list[Left] = []


def let_go(wire: Wire, left: list[Left]) -> None:
    """Release ``left`` when nobody reads it. The list belongs to this function from then on."""
    with suppress(IndexError):  # until there is none; another thread may take some
        while True:
            left.append(_waiting.pop())
    if not left:
        return
    try:
        wire.start_thread(functools.partial(_wait_for, left), "device-ipc-ends")
    except OSError:
        _waiting.extend(left)


def _wait_for(left: list[Left]) -> None:
    def none_is_left() -> bool:
        left[:] = [one for one in left if not one.is_read()]
        return not left

    wait_until(none_is_left, first=_SHORT, longest=_LONG)


def _has_ended(pid: int) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:  # no descriptor is free
        return False
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(process)


#: Number of staging buffers of one device that are kept for their next use.
_SPARE = 3


@dataclass(eq=False)
class StagingBuffer:
    """Staging buffer: memory of the device that holds one transfer at a time.

    number: the number by which readers know it.
    memory: a tensor of bytes, made for the stream ``home``.
    memory_handle: the handle by which readers open the memory.
    filled: happens when the tensors are in it; readers open this event by ``filled_handle``.
    """

    number: int
    memory: Any
    home: Stream
    memory_handle: bytes
    filled: Event
    filled_handle: bytes
    #: By the process of each reader, its events, which happen when it has read this.
    reads: dict[int, list[Event]] = field(default_factory=dict)
    #: All events of readers that were opened for this, by handle. A reader releases them with the buffer.
    opened: dict[bytes, Event] = field(default_factory=dict)

    def read_by(self, reader: int, handle: bytes, device: Device) -> None:
        """Note the event that happens when the process ``reader`` has read this buffer. ``handle`` opens
        it."""
        if handle not in self.opened:
            self.opened[handle] = device.open_event(handle, self.home.index)
        self.reads.setdefault(reader, []).append(self.opened[handle])

    def is_read(self) -> bool:
        """Return whether all enqueued reads of this buffer are done. The CPU asks, and no stream waits: in
        CUDA, a stream that waits for an event of a killed process waits for ever."""
        self.reads = {
            reader: events
            for reader, events in self.reads.items()
            if not all(map(happened, events))
        }
        return not self.reads


class StagingBuffers:
    """All staging buffers of one writer's endpoint."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made = 0
        #: Unused buffers. The last ones that have come back are at the end.
        self._free: list[StagingBuffer] = []
        self._gone: list[int] = []

    def take(self, size: int, stream: Stream) -> StagingBuffer:
        """Return a buffer of at least ``size`` bytes on the device of ``stream``, which nobody reads any
        more.

        Raises:
            torch.OutOfMemoryError: there is none.
            RuntimeError: the device cannot export it.
        """
        return self._fitting(size, stream) or self._new(size, stream)

    def give_back(self, staging_buffer: StagingBuffer) -> None:
        """Take back a buffer, once all readers have named the events of their reads."""
        self._free.append(staging_buffer)
        of_its_device = [one for one in self._free if one.home.index == staging_buffer.home.index]
        self._let_go([one for one in of_its_device if one.is_read()][:-_SPARE])

    def gone(self) -> list[int]:
        """Return the numbers of the buffers that were released, each once: readers release them too."""
        gone, self._gone = self._gone, []
        return gone

    def close(self) -> list[Left]:
        """Release all buffers that nobody reads. Those that are still read are returned."""
        left = [
            Left(staging_buffer.memory, events, reader)
            for staging_buffer in self._free
            if not staging_buffer.is_read()
            for reader, events in staging_buffer.reads.items()
        ]
        outlast([staging_buffer.filled for staging_buffer in self._free])
        self._free.clear()
        return left

    def _fitting(self, size: int, stream: Stream) -> StagingBuffer | None:
        for staging_buffer in reversed(self._free):
            here = staging_buffer.home.index == stream.index
            if here and fits(staging_buffer.memory.numel(), size) and staging_buffer.is_read():
                self._free.remove(staging_buffer)
                return staging_buffer
        return None

    def _let_go(self, staging_buffers: list[StagingBuffer]) -> None:
        for one in staging_buffers:
            self._free.remove(one)
            self._gone.append(one.number)
            outlast([one.filled])

    def _new(self, size: int, stream: Stream) -> StagingBuffer:
        device = self._device
        try:
            memory = self._memory(size, stream)
        except RuntimeError:  # torch.OutOfMemoryError, say
            if not self._spare_gives_way(stream.index):
                raise
            memory = self._memory(size, stream)
        filled = device.new_event(stream.index, interprocess=True)
        filled.record(stream)
        handle = device.export_memory(memory)
        self._made += 1
        return StagingBuffer(self._made, memory, stream, handle, filled, filled.handle())

    def _spare_gives_way(self, index: int) -> bool:
        """Release all unused buffers on that device. Returns whether there were any."""
        spare = [one for one in self._free if one.home.index == index and one.is_read()]
        self._let_go(spare)
        return bool(spare)

    def _memory(self, size: int, stream: Stream) -> Any:
        with self._device.using(stream):
            return self._device.empty(size, stream.index)
