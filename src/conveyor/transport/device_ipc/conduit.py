"""The end of an edge whose tensors go from memory of a device to memory of a device.

The writer copies them to memory of the device that readers have opened. The note tells which, and the event
that happens when it is filled. A reader has a stream wait for that event, copies what it wants to memory of
its own, and tells the writer which event happens when it has. Neither end's host waits for anything.

There are two copies, and not one or none. What the writer's next task enqueues may write to the tensors, so
it would have to wait for the readers; and what a reader holds must be there when the writer is not.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import InvalidStateError
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

from conveyor.device import Device, Event, Stream
from conveyor.flag import Flag
from conveyor.futures import Future
from conveyor.transport.base import Conduit, Enqueued, Sending, TensorSpec, Wire
from conveyor.transport.device_ipc.stretches import Stretch, Stretches
from conveyor.transport.packing import Layout

#: A writer that dies is known to be dead, and its graph to be torn down, within milliseconds. Until then
#: nobody is told that its memory cannot be opened, which would say less.
_GRACE = 1.0


class _Part(NamedTuple):
    """The tensors of a transfer that are on one device of the writer.

    number: of their stretch, which ``memory`` opens.
    filled: the handle of the event.
    places: which tensors of the transfer they are.
    """

    number: int
    memory: bytes
    filled: bytes
    places: tuple[int, ...]


class _Taken(NamedTuple):
    """A reader has enqueued its copies of a transfer, and of all before. ``read`` is the handle of the event
    that happens with them; ``None``: there was nothing to copy."""

    transfer: int
    read: bytes | None


class _Gone(NamedTuple):
    """Stretches that are no more."""

    numbers: tuple[int, ...]


class _Closed(NamedTuple):
    """The writer lets go of all of its stretches."""


class _Transfer(NamedTuple):
    """One that is under way at the writer: who has not taken it yet."""

    stretches: list[Stretch]
    missing: set[int]
    sent: Future[None]


class DeviceIpcConduit(Conduit):
    """Either end."""

    def __init__(self, wire: Wire, device: Device) -> None:
        why_not = device.viable()
        if why_not is not None:
            raise RuntimeError(f"there is no {device.kind!r} here: {why_not}")
        self._wire = wire
        self._device = device
        self._over: BaseException | None = None
        #: It is set when this end is over.
        self._ends = Flag()
        self._writer_closed = False
        #: With overlap, by the device, where the work of this end is enqueued.
        self._streams: dict[int, Stream] = {}
        # Of the writer.
        self._stretches = Stretches(device)
        self._under_way: dict[int, _Transfer] = {}
        self._reads: dict[bytes, Event] = {}
        # Of a reader: by number, what it has opened, with the event; its own events by the device.
        self._opened: dict[int, tuple[Any, Event]] = {}
        self._read: dict[int, Event] = {}
        #: What was opened, is gone, and may still be read: with the event behind that.
        self._leaving: list[tuple[Event, Any]] = []

    def send(self, tensors: Sequence[Any], transfer: int) -> Sending:
        """As for :class:`Conduit`. The copy is enqueued here, since the note must tell of an event that has
        been recorded; what is withdrawn has been copied for nothing."""
        if self._over is not None:
            raise self._over
        places: dict[int, list[int]] = {}
        for place, tensor in enumerate(tensors):
            places.setdefault(tensor.device.index or 0, []).append(place)
        stretches: list[Stretch] = []
        parts: list[_Part] = []

        def withdraw() -> None:
            for stretch in stretches:
                self._stretches.give_back(stretch)

        try:
            for index, mine in places.items():
                stretch = self._fill(index, [tensors[place] for place in mine], stretches)
                told = stretch.number, stretch.memory_handle, stretch.filled_handle, tuple(mine)
                parts.append(_Part(*told))
        except BaseException:
            withdraw()
            raise

        def begin() -> Future[None]:
            sent: Future[None] = Future()
            readers = set(range(1, len(self._wire.members)))
            self._under_way[transfer] = _Transfer(stretches, readers, sent)
            self._tell_gone()
            return sent

        return Sending(begin, pickle.dumps(parts, 5), withdraw)

    def receive(self, specs: Sequence[TensorSpec], note: bytes, transfer: int) -> Future[Any]:
        """As for :class:`Conduit`. The tensors come to the current device of this process."""
        asked: Future[Any] = Future()
        if self._over is not None:
            asked.set_exception(self._over)
            return asked
        self._let_go()
        index = self._device.current_index()
        try:
            opened = [(part, *self._open(part)) for part in pickle.loads(note)]
        except Exception as error:
            self._wire.send(_Taken(transfer, None))
            words = f"the memory of {self._wire.members[0]} cannot be opened: {error}"
            self._fail_later(asked, ConnectionError(words))
            return asked
        made: Enqueued | Exception
        try:
            made = self._copy(index, specs, opened)
        except Exception as error:
            made = error
        # Whatever was enqueued is before it.
        read = self._read_event(index)
        read.record(self._stream(index))
        self._wire.send(_Taken(transfer, read.handle()))
        # A writer that has not been told in time says so before it lets go.
        self._hear()
        if self._writer_closed:
            who = self._wire.members[0]
            made = ConnectionError(f"{who} has let go of the tensors: its graph is torn down")
        if isinstance(made, Exception):
            asked.set_exception(made)
        else:
            asked.set_result(made)
        return asked

    def progress(self) -> None:
        """As for :class:`Conduit`."""
        self._hear()
        self._let_go()

    def _hear(self) -> None:
        """Take what the other ends have told."""
        for rank, message in self._wire.receive():
            if isinstance(message, _Taken):
                self._taken(rank, message)
            elif isinstance(message, _Closed):
                self._writer_closed = True
            else:
                for number in message.numbers:
                    self._forget(number)

    def abort(self, reason: BaseException) -> None:
        """As for :class:`Conduit`."""
        self._over = reason
        self._ends.set()
        for transfer in self._under_way.values():
            with suppress(InvalidStateError):
                transfer.sent.set_exception(reason)

    def close(self) -> None:
        """As for :class:`Conduit`."""
        if self._wire.rank == 0:
            self._close_writer()
        for number in list(self._opened):
            self._forget(number)
        _leaving.extend(self._leaving)
        self._leaving.clear()
        self._let_go()
        self._streams.clear()
        self._reads.clear()

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

    # The writer.

    def _close_writer(self) -> None:
        """Let go of all stretches, behind the reads of whoever has told of them.

        A reader tells of its reads and looks then whether this end is closed; this end says that it is, and
        looks then what it has been told. So one of the two knows of the other. (Each word rings a bell, which
        is atomic, before the look. A reader has room for its word, since it takes no more transfers than its
        edge is deep before this end has heard of them.)
        """
        try:
            self._wire.send(_Closed())
            self._hear()
        finally:
            for transfer in self._under_way.values():
                for stretch in transfer.stretches:
                    self._stretches.give_back(stretch)
            self._under_way.clear()
            self._stretches.close()

    def _fill(self, index: int, tensors: list[Any], taken: list[Stretch]) -> Stretch:
        """Enqueue the copy of ``tensors`` to a stretch, which is added to ``taken``."""
        device, stream = self._device, self._stream(index)
        program = device.current_stream(index) if self._wire.overlap else stream
        layout = Layout.of([TensorSpec.of(tensor) for tensor in tensors])
        stretch = self._stretches.take(layout.size, stream)
        taken.append(stretch)
        with self._enqueuing_on(stream):
            if self._wire.overlap:
                stream.wait_stream(program)
            layout.fill(stretch.memory, tensors)
        if stretch.home != stream:
            device.keep(stretch.memory, stream)
        stretch.filled.record(stream)
        if self._wire.overlap:
            for tensor in tensors:
                device.keep(tensor, stream)
            # The next task may write to them.
            program.wait_event(stretch.filled)
        return stretch

    def _taken(self, rank: int, message: _Taken) -> None:
        """A reader has all transfers up to this one. Also when this end is over, its reads are waited for."""
        for number in [one for one in self._under_way if one <= message.transfer]:
            transfer = self._under_way[number]
            if rank not in transfer.missing:
                continue
            transfer.missing.discard(rank)
            for stretch in transfer.stretches:
                if message.read is not None:
                    stretch.reads.append(self._read_of(message.read, stretch.home.index))
            if not transfer.missing:
                del self._under_way[number]
                for stretch in transfer.stretches:
                    self._stretches.give_back(stretch)
                with suppress(InvalidStateError):  # it was aborted
                    transfer.sent.set_result(None)
        if self._over is None:
            self._tell_gone()

    def _read_of(self, handle: bytes, index: int) -> Event:
        """Open a reader's event, once."""
        if handle not in self._reads:
            self._reads[handle] = self._device.open_event(handle, index)
        return self._reads[handle]

    def _tell_gone(self) -> None:
        gone = self._stretches.gone()
        if gone:
            self._wire.send(_Gone(tuple(gone)))

    # A reader.

    def _open(self, part: _Part) -> tuple[Any, Event]:
        if part.number not in self._opened:
            memory = self._device.open_memory(part.memory)
            filled = self._device.open_event(part.filled, memory.device.index)
            self._opened[part.number] = memory, filled
        return self._opened[part.number]

    def _copy(
        self, index: int, specs: Sequence[TensorSpec], opened: list[tuple[_Part, Any, Event]]
    ) -> Enqueued:
        """Enqueue the copies."""
        device, stream = self._device, self._stream(index)
        made: list[Any] = [None] * len(specs)
        targets = []
        with self._enqueuing_on(stream):
            for part, memory, filled in opened:
                stream.wait_event(filled)
                layout = Layout.of([specs[place] for place in part.places])
                target = device.empty(layout.size, index)
                device.copy(target, memory[: layout.size])
                targets.append(target)
                for place, tensor in zip(part.places, layout.open(target), strict=True):
                    made[place] = tensor
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

    def _read_event(self, index: int) -> Event:
        if index not in self._read:
            self._read[index] = self._device.new_event(index, interprocess=True)
        return self._read[index]

    def _fail_later(self, asked: Future[Any], error: BaseException) -> None:
        def fail() -> None:
            self._ends.wait(_GRACE)
            with suppress(InvalidStateError):
                asked.set_exception(error)

        self._wire.start_thread(fail, "device-ipc")

    def _forget(self, number: int) -> None:
        """Let go of a stretch once its reads are done."""
        found = self._opened.pop(number, None)
        if found is not None:
            self._leaving.extend([(event, found) for event in self._read.values()])

    def _let_go(self) -> None:
        for those in (self._leaving, _leaving):
            those[:] = [one for one in those if not one[0].query()]


#: Of conduits that are closed, what may still be read.
_leaving: list[tuple[Event, Any]] = []
