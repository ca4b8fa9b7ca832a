"""Endpoints of edges whose tensors go from memory of a device to memory of a device.

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

import functools
import logging
import os
import pickle
import queue
import select
from collections import deque
from collections.abc import Sequence
from concurrent.futures import InvalidStateError
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from conveyor import _core
from conveyor.codec.tensors.staging import moved_to
from conveyor.device import Device, Event, Stream
from conveyor.device.base import happened, outlast, wait_until
from conveyor.flag import Flag
from conveyor.futures import Future
from conveyor.transport.base import (
    Endpoint,
    Enqueued,
    Sending,
    TensorSpec,
    Wire,
)
from conveyor.transport.packing import Layout
from conveyor.transport.pool import fits


class Part(NamedTuple):
    """Tensors of a transfer that are on one device of the writer. The note is a list of parts.

    number: of their staging buffer, which ``memory`` opens.
    filled: the handle of the event.
    positions: the indices of these tensors in the transfer.
    """

    number: int
    memory: bytes
    filled: bytes
    positions: tuple[int, ...]


class Taken(NamedTuple):
    """Message that a reader has enqueued its copies of a transfer, and has finished with all transfers
    before.

    reads: the handles of the events that happen with the copies, one for each part; empty: nothing is copied.
    reader: its process.
    """

    transfer: int
    reads: tuple[bytes, ...]
    reader: int


class Refused(NamedTuple):
    """Message that a reader cannot open the memory of a transfer, and asks for its tensors through host
    memory.

    sizes: how many bytes of each part's staging buffer it needs.
    """

    transfer: int
    sizes: tuple[int, ...]


class ByHost(NamedTuple):
    """Answer to :class:`Refused`, for the reader of that rank; the other readers ignore it.

    memory: the bytes of each part's staging buffer, in host memory.
    error: why there are none, in words.
    """

    reader: int
    transfer: int
    memory: tuple[Any, ...]
    error: str | None = None


class Gone(NamedTuple):
    """Message that staging buffers were released."""

    numbers: tuple[int, ...]


class Closed(NamedTuple):
    """Message that the writer releases all of its staging buffers."""


class DeviceIpcEndpoint(Endpoint):
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


_log = logging.getLogger("conveyor")

#: Number of enqueued copies, not done yet by the device, that a reader has at most. So this many more staging
#: buffers than the edge is deep can be in use.
_AHEAD = 4
#: Seconds for which a reader polls by itself, since a thread and its wake-up would take longer.
_MOMENT = 0.00003


class _Opened(NamedTuple):
    """Staging buffer of the writer that this reader has opened.

    filled: happens when the tensors are in it.
    reads: by the device here, the event that happens when they have been read.
    """

    memory: Any
    filled: Event
    reads: dict[int, Event]


class _Requested(NamedTuple):
    """Transfer whose copies are not enqueued yet. ``opened`` is empty if nobody wants it any more.

    refused: the parts of a transfer that comes through host memory, since they cannot be opened.
    """

    transfer: int
    specs: Sequence[TensorSpec]
    opened: list[tuple[Part, _Opened]]
    future: Future[Any]
    refused: tuple[Part, ...] = ()


class Reader(DeviceIpcEndpoint):
    """Endpoint that opens the writer's staging buffers, and copies from them when they are filled."""

    def __init__(self, wire: Wire, device: Device) -> None:
        super().__init__(wire, device)
        self._writer_closed = False
        #: Opened staging buffers, by number.
        self._opened: dict[int, _Opened] = {}
        #: Transfers that were asked for, in order.
        self._requested: deque[_Requested] = deque()
        #: By transfer, the bytes that have come through host memory.
        self._come: dict[int, ByHost] = {}
        self._warned = False
        #: Events of the last copies. Events that have happened are removed when ``_not_yet`` looks.
        self._copies: deque[Event] = deque()
        #: Events that the thread waits for (``_awaited``), once ``_wake`` is set.
        self._wake = Flag()
        self._awaited: list[Event] = []
        self._has_thread = False

    def send(self, tensors: Sequence[Any], transfer: int) -> Sending:
        """Refuse: the writer sends."""
        raise RuntimeError("a reader of an edge sends nothing")

    def receive(self, specs: Sequence[TensorSpec], note: bytes, transfer: int) -> Future[Any]:
        """Ask for the tensors of a transfer. They come to the current device of this process."""
        future: Future[Any] = Future()
        if self._over is not None:
            future.set_exception(self._over)
            return future
        parts: tuple[Part, ...] = tuple(pickle.loads(note))
        try:
            opened = [(part, self._open(part)) for part in parts]
        except Exception as error:
            # A writer that has died does not answer; its death then tears the graph down.
            self._refuse(transfer, specs, parts, error)
            self._requested.append(_Requested(transfer, specs, [], future, parts))
        else:
            self._requested.append(_Requested(transfer, specs, opened, future))
        self._go_on()
        return future

    def _refuse(
        self, transfer: int, specs: Sequence[TensorSpec], parts: Sequence[Part], why: Exception
    ) -> None:
        """Ask for a transfer through host memory, and log a warning the first time."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s: tensors of %s's %r device come to %s by way of the host's memory, since it cannot open "
                "that device's: %s",
                self._wire.edge,
                self._wire.members[0],
                self._device.kind,
                self._wire.members[self._wire.rank],
                why,
            )
        sizes = [Layout.of([specs[position] for position in part.positions]).size for part in parts]
        self._wire.send(Refused(transfer, tuple(sizes)))

    def drop(self, transfer: int) -> None:
        """Forget a transfer. Its turn comes as before; then the writer is told that the transfer was
        taken."""
        for position, requested in enumerate(self._requested):
            if requested.transfer == transfer:
                self._requested[position] = requested._replace(opened=[], refused=())
        self._come.pop(transfer, None)
        self._go_on()

    def progress(self) -> None:
        """Read the writer's messages, and enqueue the copies that can begin."""
        self._hear()
        self._go_on()

    def abort(self, reason: BaseException) -> None:
        """Fail all transfers that are not enqueued yet, and end the thread."""
        super().abort(reason)
        self._wake.set()
        for requested in self._requested:
            with suppress(InvalidStateError):
                requested.future.set_exception(reason)
        self._requested.clear()

    def close(self) -> None:
        """Release all opened staging buffers, once their reads are done."""
        _let_go(
            self._wire, [left for number in list(self._opened) for left in self._forget(number)]
        )
        self._copies.clear()
        super().close()

    def _hear(self) -> None:
        """Handle the writer's messages."""
        for _, message in self._wire.receive():
            if isinstance(message, Closed):
                self._writer_closed = True
            elif isinstance(message, ByHost):
                if message.reader == self._wire.rank and any(
                    one.refused and one.transfer == message.transfer for one in self._requested
                ):
                    self._come[message.transfer] = message
            elif isinstance(message, Gone):
                _let_go(self._wire, [left for one in message.numbers for left in self._forget(one)])

    def _open(self, part: Part) -> _Opened:
        if self._why_none is not None:
            raise RuntimeError(self._why_none)
        if part.number not in self._opened:
            memory = self._device.open_memory(part.memory)
            filled = self._device.open_event(part.filled, memory.device.index)
            self._opened[part.number] = _Opened(memory, filled, {})
        return self._opened[part.number]

    def _go_on(self) -> None:
        """Enqueue the copies of filled staging buffers, in order, and have a thread wait for the next one."""
        while self._requested:
            requested = self._requested[0]
            if requested.refused and not self._writer_closed:
                come = self._come.pop(requested.transfer, None)
                if come is None:
                    return
                self._put(self._requested.popleft(), come)
                continue
            self._awaited = self._not_yet(self._requested[0])
            if self._awaited and not _soon(self._awaited):
                if not self._has_thread:
                    self._wire.start_thread(self._look, "device-ipc-looks")
                    self._has_thread = True
                self._wake.set()
                return
            self._take(self._requested.popleft())

    def _not_yet(self, requested: _Requested) -> list[Event]:
        """Return the events that have to happen before the copies of ``requested`` are enqueued."""
        if self._writer_closed or not requested.opened:
            return []
        while self._copies and happened(self._copies[0]):
            self._copies.popleft()
        ahead = [self._copies[0]] if len(self._copies) >= _AHEAD else []
        return ahead + [one.filled for _, one in requested.opened if not happened(one.filled)]

    def _look(self) -> None:
        """Have :meth:`progress` called when the awaited events have happened. Runs as a thread."""
        while True:
            self._wake.wait()
            self._wake.clear()
            wait_until(lambda: all(map(happened, self._awaited)), self._ends.wait)
            if self._ends.is_set():
                return
            self._wire.notify()

    def _take(self, requested: _Requested) -> None:
        """Enqueue the copies of a transfer, and tell the writer."""
        made: Enqueued | Exception = Enqueued([], lambda: None)  # nobody wants it
        reads = []
        opened = [] if self._writer_closed else requested.opened
        try:
            if opened:
                index = self._device.current_index()
                made = self._copy(index, requested.specs, opened)
            for _, one in opened:
                read = self._read_event(one, index)
                read.record(self._stream(index))
                self._copies.append(read)
                reads.append(read.handle())
        except Exception as error:
            made = error
        self._tell_taken(requested.transfer, tuple(reads))
        # A writer that this message did not reach in time has said that it is closed, before it releases.
        self._hear()
        if self._writer_closed:
            who = self._wire.members[0]
            made = ConnectionError(f"{who} has let go of the tensors: its graph is torn down")
        if isinstance(made, Exception):
            requested.future.set_exception(made)
        else:
            requested.future.set_result(made)

    def _put(self, requested: _Requested, come: ByHost) -> None:
        """Pass on a transfer that has come through host memory, to the current device if this process has
        one."""
        made: list[Any] = [None] * len(requested.specs)
        failed: Exception | None = None
        try:
            if come.error is not None:
                raise ConnectionError(f"{self._wire.members[0]} could not copy it: {come.error}")
            for part, memory in zip(requested.refused, come.memory, strict=True):
                layout = Layout.of([requested.specs[position] for position in part.positions])
                there = memory if self._why_none else moved_to(memory, self._device, None)
                for position, tensor in zip(part.positions, layout.open(there), strict=True):
                    made[position] = tensor
        except Exception as error:
            failed = error
        self._tell_taken(requested.transfer, ())
        if failed is None:
            requested.future.set_result(made)
        else:
            requested.future.set_exception(failed)

    def _tell_taken(self, transfer: int, reads: tuple[bytes, ...]) -> None:
        self._wire.send(Taken(transfer, reads, os.getpid()))

    def _copy(
        self, index: int, specs: Sequence[TensorSpec], opened: list[tuple[Part, _Opened]]
    ) -> Enqueued:
        """Enqueue the copies out of filled staging buffers."""
        device, stream = self._device, self._stream(index)
        made: list[Any] = [None] * len(specs)
        targets = []
        with self._enqueuing_on(stream):
            for part, (memory, _, _) in opened:
                layout = Layout.of([specs[position] for position in part.positions])
                target = device.empty(layout.size, index)
                device.copy(target, memory[: layout.size])
                targets.append(target)
                for position, tensor in zip(part.positions, layout.open(target), strict=True):
                    made[position] = tensor
        copied = stream.record() if self._wire.overlap else None

        def join() -> None:
            program = device.current_stream(index)
            if copied is not None:
                program.wait_event(copied)
            elif program == stream:
                return
            else:  # the program has chosen another one meanwhile
                program.wait_stream(stream)
            for target in targets:
                device.keep(target, program)

        return Enqueued(made, join)

    def _read_event(self, opened: _Opened, index: int) -> Event:
        if index not in opened.reads:
            opened.reads[index] = self._device.new_event(index, interprocess=True)
        return opened.reads[index]

    def _forget(self, number: int) -> list[_Left]:
        """Forget a staging buffer, and return the objects to release once its reads are done."""
        found = self._opened.pop(number, None)
        if found is None:
            return []
        reads = tuple(found.reads.values())
        outlast(reads)
        return [_Left(found, reads)]


def _soon(events: list[Event]) -> bool:
    """Return whether all events happen within a moment."""
    end = _core.monotonic() + _MOMENT
    while not all(map(happened, events)):
        if _core.monotonic() > end:
            return False
    return True


class _Transfer(NamedTuple):
    """Transfer under way: its staging buffers, and the ranks of the readers that have not taken it yet."""

    staging_buffers: list[_StagingBuffer]
    missing: set[int]
    sent: Future[None]


class Writer(DeviceIpcEndpoint):
    """Endpoint that copies tensors to staging buffers, for readers to copy from."""

    def __init__(self, wire: Wire, device: Device) -> None:
        super().__init__(wire, device)
        if self._why_none is not None:
            raise RuntimeError(f"there is no {device.kind!r} here: {self._why_none}")
        self._staging_buffers = _StagingBuffers(device)
        self._under_way: dict[int, _Transfer] = {}
        #: Requests for host memory, for the thread that copies: the reader's rank, its request, the buffers.
        self._wanted: queue.SimpleQueue[tuple[int, Refused, list[_StagingBuffer]] | None]
        self._wanted = queue.SimpleQueue()
        self._copies = False
        self._copied: deque[ByHost] = deque()

    def send(self, tensors: Sequence[Any], transfer: int) -> Sending:
        """Prepare to send tensors. Their copy is enqueued here, since the note must name an event that has
        been recorded; a transfer that is withdrawn was copied for nothing."""
        if self._over is not None:
            raise self._over
        by_device: dict[int, list[int]] = {}
        for position, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device.index or 0, []).append(position)
        staging_buffers: list[_StagingBuffer] = []
        parts: list[Part] = []

        def withdraw() -> None:
            for staging_buffer in staging_buffers:
                self._staging_buffers.give_back(staging_buffer)

        try:
            for index, mine in by_device.items():
                staging_buffer = self._fill(
                    index, [tensors[position] for position in mine], staging_buffers
                )
                args = (
                    staging_buffer.number,
                    staging_buffer.memory_handle,
                    staging_buffer.filled_handle,
                    tuple(mine),
                )
                parts.append(Part(*args))
        except BaseException:
            withdraw()
            raise

        def begin() -> Future[None]:
            sent: Future[None] = Future()
            readers = set(range(1, len(self._wire.members)))
            self._under_way[transfer] = _Transfer(staging_buffers, readers, sent)
            self._tell_gone()
            return sent

        return Sending(begin, pickle.dumps(parts, 5), withdraw)

    def receive(self, specs: Sequence[TensorSpec], note: bytes, transfer: int) -> Future[Any]:
        """Refuse: readers receive."""
        raise RuntimeError("the writer of an edge receives nothing")

    def progress(self) -> None:
        """Handle the readers' messages, and send the copies made through host memory."""
        for rank, message in self._wire.receive():
            if isinstance(message, Taken):
                self._taken(rank, message)
            elif message.transfer in self._under_way:
                self._want(rank, message)
        while self._copied:
            self._wire.send(self._copied.popleft())

    def abort(self, reason: BaseException) -> None:
        """Fail all transfers under way, and end the thread."""
        super().abort(reason)
        self._wanted.put(None)
        for transfer in self._under_way.values():
            with suppress(InvalidStateError):
                transfer.sent.set_exception(reason)

    def close(self) -> None:
        """Release all staging buffers, once the reads that readers have reported are done.

        A reader reports its reads and then looks whether this end is closed; this end says that it is closed,
        and then looks for reports. So at least one of the two knows of the other. (Each message rings a
        doorbell, which is atomic, before the look. A reader always has room for its message, since it takes
        no more transfers than its edge is deep before this end has heard of them.)
        """
        try:
            self._wire.send(Closed())
            self.progress()
        finally:
            for transfer in self._under_way.values():
                for staging_buffer in transfer.staging_buffers:
                    self._staging_buffers.give_back(staging_buffer)
            self._under_way.clear()
            _let_go(self._wire, self._staging_buffers.close())
            super().close()

    def _fill(self, index: int, tensors: list[Any], taken: list[_StagingBuffer]) -> _StagingBuffer:
        """Enqueue the copy of ``tensors`` to a staging buffer, which is added to ``taken``."""
        device, stream = self._device, self._stream(index)
        program = device.current_stream(index) if self._wire.overlap else stream
        layout = Layout.of([TensorSpec.of(tensor) for tensor in tensors])
        staging_buffer = self._staging_buffers.take(layout.size, stream)
        taken.append(staging_buffer)
        with self._enqueuing_on(stream):
            if self._wire.overlap:
                stream.wait_stream(program)
            layout.fill(staging_buffer.memory, tensors)
        if staging_buffer.stream != stream:
            device.keep(staging_buffer.memory, stream)
        staging_buffer.filled.record(stream)
        if self._wire.overlap:
            for tensor in tensors:
                device.keep(tensor, stream)
            # The next task may write to them.
            program.wait_event(staging_buffer.filled)
        return staging_buffer

    def _want(self, rank: int, refused: Refused) -> None:
        if not self._copies:
            self._wire.start_thread(self._copy_to_host, "device-ipc-copies")
            self._copies = True
        self._wanted.put((rank, refused, self._under_way[refused.transfer].staging_buffers))

    def _copy_to_host(self) -> None:
        """Copy to host memory the staging buffers that readers cannot open. Runs as a thread."""
        while (wanted := self._wanted.get()) is not None:
            rank, (transfer, sizes), staging_buffers = wanted
            filled = [staging_buffer.filled for staging_buffer in staging_buffers]
            wait_until(lambda: all(map(happened, filled)), self._ends.wait)  # noqa: B023 - called at once
            if self._ends.is_set():
                return
            try:
                memory = [
                    s.memory[:size].cpu() for s, size in zip(staging_buffers, sizes, strict=True)
                ]
                made = ByHost(rank, transfer, tuple(memory))
            except Exception as error:
                made = ByHost(rank, transfer, (), f"{type(error).__name__}: {error}")
            self._copied.append(made)
            self._wire.notify()

    def _taken(self, rank: int, message: Taken) -> None:
        """Note that a reader has taken all transfers up to this one. Its reads count even after this end was
        aborted."""
        for number in [one for one in self._under_way if one <= message.transfer]:
            transfer = self._under_way[number]
            if rank not in transfer.missing:
                continue
            transfer.missing.discard(rank)
            if number == message.transfer:
                for staging_buffer, read in zip(
                    transfer.staging_buffers, message.reads, strict=False
                ):
                    staging_buffer.read_by(message.reader, read, self._device)
            if not transfer.missing:
                del self._under_way[number]
                for staging_buffer in transfer.staging_buffers:
                    self._staging_buffers.give_back(staging_buffer)
                with suppress(InvalidStateError):  # it was aborted
                    transfer.sent.set_result(None)
        if self._over is None:
            self._tell_gone()

    def _tell_gone(self) -> None:
        gone = self._staging_buffers.gone()
        if gone:
            self._wire.send(Gone(tuple(gone)))


# Staging buffers of a writer, and their release once nobody reads them. This may take a while: to close
# another process's memory takes until the device has done all work that it was given.

#: Seconds between two looks, at first and at most: nobody waits for it.
_SHORT, _LONG = 0.001, 0.05


@dataclass(eq=False)
class _Left:
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
_waiting: list[_Left] = []


def _let_go(wire: Wire, left: list[_Left]) -> None:
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


def _wait_for(left: list[_Left]) -> None:
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
class _StagingBuffer:
    """Staging buffer: memory of the device that holds one transfer at a time.

    number: the number by which readers know it.
    memory: a tensor of bytes, made for ``stream``.
    memory_handle: the handle by which readers open the memory.
    filled: happens when the tensors are in it; readers open this event by ``filled_handle``.
    """

    number: int
    memory: Any
    stream: Stream
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
            self.opened[handle] = device.open_event(handle, self.stream.index)
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


class _StagingBuffers:
    """All staging buffers of one writer's endpoint."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made = 0
        #: Unused buffers. The last ones that have come back are at the end.
        self._free: list[_StagingBuffer] = []
        self._gone: list[int] = []

    def take(self, size: int, stream: Stream) -> _StagingBuffer:
        """Return a buffer of at least ``size`` bytes on the device of ``stream``, which nobody reads any
        more.

        Raises:
            torch.OutOfMemoryError: there is none.
            RuntimeError: the device cannot export it.
        """
        return self._fitting(size, stream) or self._new(size, stream)

    def give_back(self, staging_buffer: _StagingBuffer) -> None:
        """Take back a buffer, once all readers have named the events of their reads."""
        self._free.append(staging_buffer)
        of_its_device = [
            one for one in self._free if one.stream.index == staging_buffer.stream.index
        ]
        self._let_go([one for one in of_its_device if one.is_read()][:-_SPARE])

    def gone(self) -> list[int]:
        """Return the numbers of the buffers that were released, each once: readers release them too."""
        gone, self._gone = self._gone, []
        return gone

    def close(self) -> list[_Left]:
        """Release all buffers that nobody reads. Those that are still read are returned."""
        left = [
            _Left(staging_buffer.memory, events, reader)
            for staging_buffer in self._free
            if not staging_buffer.is_read()
            for reader, events in staging_buffer.reads.items()
        ]
        outlast([staging_buffer.filled for staging_buffer in self._free])
        self._free.clear()
        return left

    def _fitting(self, size: int, stream: Stream) -> _StagingBuffer | None:
        for staging_buffer in reversed(self._free):
            here = staging_buffer.stream.index == stream.index
            if here and fits(staging_buffer.memory.numel(), size) and staging_buffer.is_read():
                self._free.remove(staging_buffer)
                return staging_buffer
        return None

    def _let_go(self, staging_buffers: list[_StagingBuffer]) -> None:
        for one in staging_buffers:
            self._free.remove(one)
            self._gone.append(one.number)
            outlast([one.filled])

    def _new(self, size: int, stream: Stream) -> _StagingBuffer:
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
        return _StagingBuffer(self._made, memory, stream, handle, filled, filled.handle())

    def _spare_gives_way(self, index: int) -> bool:
        """Release all unused buffers on that device. Returns whether there were any."""
        spare = [one for one in self._free if one.stream.index == index and one.is_read()]
        self._let_go(spare)
        return bool(spare)

    def _memory(self, size: int, stream: Stream) -> Any:
        with self._device.using(stream):
            return self._device.empty(size, stream.index)
