"""Writer's endpoint of an edge over memory of a device."""

from __future__ import annotations

import pickle
import queue
from collections import deque
from collections.abc import Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import Any, NamedTuple

from conveyor.device import Device
from conveyor.device.base import happened, wait_until
from conveyor.futures import Future
from conveyor.transport.base import Sending, TensorSpec, Wire
from conveyor.transport.device_ipc.conduit import DeviceIpcConduit
from conveyor.transport.device_ipc.leaving import let_go
from conveyor.transport.device_ipc.messages import ByHost, Closed, Gone, Part, Refused, Taken
from conveyor.transport.device_ipc.stretches import Stretch, Stretches
from conveyor.transport.packing import Layout


class _Transfer(NamedTuple):
    """Transfer under way: its staging buffers, and the ranks of the readers that have not taken it yet."""

    stretches: list[Stretch]
    missing: set[int]
    sent: Future[None]


class Writer(DeviceIpcConduit):
    """Endpoint that copies tensors to staging buffers, for readers to copy from."""

    def __init__(self, wire: Wire, device: Device) -> None:
        super().__init__(wire, device)
        if self._why_none is not None:
            raise RuntimeError(f"there is no {device.kind!r} here: {self._why_none}")
        self._stretches = Stretches(device)
        self._under_way: dict[int, _Transfer] = {}
        #: Requests for host memory, for the thread that copies: the reader's rank, its request, the buffers.
        self._wanted: queue.SimpleQueue[tuple[int, Refused, list[Stretch]] | None]
        self._wanted = queue.SimpleQueue()
        self._copies = False
        self._copied: deque[ByHost] = deque()

    def send(self, tensors: Sequence[Any], transfer: int) -> Sending:
        """Prepare to send tensors. Their copy is enqueued here, since the note must name an event that has
        been recorded; a transfer that is withdrawn was copied for nothing."""
        if self._over is not None:
            raise self._over
        places: dict[int, list[int]] = {}
        for place, tensor in enumerate(tensors):
            places.setdefault(tensor.device.index or 0, []).append(place)
        stretches: list[Stretch] = []
        parts: list[Part] = []

        def withdraw() -> None:
            for stretch in stretches:
                self._stretches.give_back(stretch)

        try:
            for index, mine in places.items():
                stretch = self._fill(index, [tensors[place] for place in mine], stretches)
                told = stretch.number, stretch.memory_handle, stretch.filled_handle, tuple(mine)
                parts.append(Part(*told))
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
                for stretch in transfer.stretches:
                    self._stretches.give_back(stretch)
            self._under_way.clear()
            let_go(self._wire, self._stretches.close())
            super().close()

    def _fill(self, index: int, tensors: list[Any], taken: list[Stretch]) -> Stretch:
        """Enqueue the copy of ``tensors`` to a staging buffer, which is added to ``taken``."""
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

    def _want(self, rank: int, refused: Refused) -> None:
        if not self._copies:
            self._wire.start_thread(self._copy_to_host, "device-ipc-copies")
            self._copies = True
        self._wanted.put((rank, refused, self._under_way[refused.transfer].stretches))

    def _copy_to_host(self) -> None:
        """Copy to host memory the staging buffers that readers cannot open. Runs as a thread."""
        while (wanted := self._wanted.get()) is not None:
            rank, (transfer, sizes), stretches = wanted
            filled = [stretch.filled for stretch in stretches]
            wait_until(lambda: all(map(happened, filled)), self._ends.wait)  # noqa: B023 - called at once
            if self._ends.is_set():
                return
            try:
                memory = [s.memory[:size].cpu() for s, size in zip(stretches, sizes, strict=True)]
                made = ByHost(rank, transfer, tuple(memory))
            except Exception as error:
                made = ByHost(rank, transfer, (), f"{type(error).__name__}: {error}")
            self._copied.append(made)
            self._wire.ring()

    def _taken(self, rank: int, message: Taken) -> None:
        """Note that a reader has taken all transfers up to this one. Its reads count even after this end was
        aborted."""
        for number in [one for one in self._under_way if one <= message.transfer]:
            transfer = self._under_way[number]
            if rank not in transfer.missing:
                continue
            transfer.missing.discard(rank)
            if number == message.transfer:
                for stretch, read in zip(transfer.stretches, message.reads, strict=False):
                    stretch.read_by(message.reader, read, self._device)
            if not transfer.missing:
                del self._under_way[number]
                for stretch in transfer.stretches:
                    self._stretches.give_back(stretch)
                with suppress(InvalidStateError):  # it was aborted
                    transfer.sent.set_result(None)
        if self._over is None:
            self._tell_gone()

    def _tell_gone(self) -> None:
        gone = self._stretches.gone()
        if gone:
            self._wire.send(Gone(tuple(gone)))
