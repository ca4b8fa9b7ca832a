"""Reader's endpoint of an edge over memory of a device."""

from __future__ import annotations

import logging
import os
import pickle
from collections import deque
from collections.abc import Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import Any, NamedTuple

from conveyor import _core
from conveyor.codec.tensors.staging import bring
from conveyor.device import Device, Event
from conveyor.device.base import happened, outlast, wait_until
from conveyor.flag import Flag
from conveyor.futures import Future
from conveyor.transport.base import Enqueued, Sending, TensorSpec, Wire
from conveyor.transport.device_ipc.conduit import DeviceIpcConduit
from conveyor.transport.device_ipc.leaving import Left, let_go
from conveyor.transport.device_ipc.messages import ByHost, Closed, Gone, Part, Refused, Taken
from conveyor.transport.packing import Layout

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


class _Asked(NamedTuple):
    """Transfer whose copies are not enqueued yet. ``opened`` is empty if nobody wants it any more.

    refused: the parts of a transfer that comes through host memory, since they cannot be opened.
    """

    transfer: int
    specs: Sequence[TensorSpec]
    opened: list[tuple[Part, _Opened]]
    future: Future[Any]
    refused: tuple[Part, ...] = ()


class Reader(DeviceIpcConduit):
    """Endpoint that opens the writer's staging buffers, and copies from them when they are filled."""

    def __init__(self, wire: Wire, device: Device) -> None:
        super().__init__(wire, device)
        self._writer_closed = False
        #: Opened staging buffers, by number.
        self._opened: dict[int, _Opened] = {}
        #: Transfers that were asked for, in order.
        self._asked: deque[_Asked] = deque()
        #: By transfer, the bytes that have come through host memory.
        self._come: dict[int, ByHost] = {}
        self._told = False
        #: Events of the last copies. Events that have happened are removed when ``_not_yet`` looks.
        self._copies: deque[Event] = deque()
        #: Events that the thread waits for (``_awaited``), once ``_looks`` is set.
        self._looks = Flag()
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
            self._asked.append(_Asked(transfer, specs, [], future, parts))
        else:
            self._asked.append(_Asked(transfer, specs, opened, future))
        self._go_on()
        return future

    def _refuse(
        self, transfer: int, specs: Sequence[TensorSpec], parts: Sequence[Part], why: Exception
    ) -> None:
        """Ask for a transfer through host memory, and log a warning the first time."""
        if not self._told:
            self._told = True
            _log.warning(
                "%s: tensors of %s's %r device come to %s by way of the host's memory, since it cannot open "
                "that device's: %s",
                self._wire.edge,
                self._wire.members[0],
                self._device.kind,
                self._wire.members[self._wire.rank],
                why,
            )
        sizes = [Layout.of([specs[place] for place in part.places]).size for part in parts]
        self._wire.send(Refused(transfer, tuple(sizes)))

    def drop(self, transfer: int) -> None:
        """Forget a transfer. Its turn comes as before; then the writer is told that the transfer was
        taken."""
        for place, asked in enumerate(self._asked):
            if asked.transfer == transfer:
                self._asked[place] = asked._replace(opened=[], refused=())
        self._come.pop(transfer, None)
        self._go_on()

    def progress(self) -> None:
        """Read the writer's messages, and enqueue the copies that can begin."""
        self._hear()
        self._go_on()

    def abort(self, reason: BaseException) -> None:
        """Fail all transfers that are not enqueued yet, and end the thread."""
        super().abort(reason)
        self._looks.set()
        for asked in self._asked:
            with suppress(InvalidStateError):
                asked.future.set_exception(reason)
        self._asked.clear()

    def close(self) -> None:
        """Release all opened staging buffers, once their reads are done."""
        let_go(self._wire, [left for number in list(self._opened) for left in self._forget(number)])
        self._copies.clear()
        super().close()

    def _hear(self) -> None:
        """Handle the writer's messages."""
        for _, message in self._wire.receive():
            if isinstance(message, Closed):
                self._writer_closed = True
            elif isinstance(message, ByHost):
                if message.reader == self._wire.rank and any(
                    one.refused and one.transfer == message.transfer for one in self._asked
                ):
                    self._come[message.transfer] = message
            elif isinstance(message, Gone):
                let_go(self._wire, [left for one in message.numbers for left in self._forget(one)])

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
        while self._asked:
            asked = self._asked[0]
            if asked.refused and not self._writer_closed:
                come = self._come.pop(asked.transfer, None)
                if come is None:
                    return
                self._put(self._asked.popleft(), come)
                continue
            self._awaited = self._not_yet(self._asked[0])
            if self._awaited and not _soon(self._awaited):
                if not self._has_thread:
                    self._wire.start_thread(self._look, "device-ipc-looks")
                    self._has_thread = True
                self._looks.set()
                return
            self._take(self._asked.popleft())

    def _not_yet(self, asked: _Asked) -> list[Event]:
        """Return the events that have to happen before the copies of ``asked`` are enqueued."""
        if self._writer_closed or not asked.opened:
            return []
        while self._copies and happened(self._copies[0]):
            self._copies.popleft()
        ahead = [self._copies[0]] if len(self._copies) >= _AHEAD else []
        return ahead + [one.filled for _, one in asked.opened if not happened(one.filled)]

    def _look(self) -> None:
        """Have :meth:`progress` called when the awaited events have happened. Runs as a thread."""
        while True:
            self._looks.wait()
            self._looks.clear()
            wait_until(lambda: all(map(happened, self._awaited)), self._ends.wait)
            if self._ends.is_set():
                return
            self._wire.ring()

    def _take(self, asked: _Asked) -> None:
        """Enqueue the copies of a transfer, and tell the writer."""
        made: Enqueued | Exception = Enqueued([], lambda: None)  # nobody wants it
        reads = []
        opened = [] if self._writer_closed else asked.opened
        try:
            if opened:
                index = self._device.current_index()
                made = self._copy(index, asked.specs, opened)
            for _, one in opened:
                read = self._read_event(one, index)
                read.record(self._stream(index))
                self._copies.append(read)
                reads.append(read.handle())
        except Exception as error:
            made = error
        self._tell_taken(asked.transfer, tuple(reads))
        # A writer that this message did not reach in time has said that it is closed, before it releases.
        self._hear()
        if self._writer_closed:
            who = self._wire.members[0]
            made = ConnectionError(f"{who} has let go of the tensors: its graph is torn down")
        if isinstance(made, Exception):
            asked.future.set_exception(made)
        else:
            asked.future.set_result(made)

    def _put(self, asked: _Asked, come: ByHost) -> None:
        """Pass on a transfer that has come through host memory, to the current device if this process has
        one."""
        made: list[Any] = [None] * len(asked.specs)
        failed: Exception | None = None
        try:
            if come.error is not None:
                raise ConnectionError(f"{self._wire.members[0]} could not copy it: {come.error}")
            for part, memory in zip(asked.refused, come.memory, strict=True):
                layout = Layout.of([asked.specs[place] for place in part.places])
                there = memory if self._why_none else bring(memory, self._device, None)
                for place, tensor in zip(part.places, layout.open(there), strict=True):
                    made[place] = tensor
        except Exception as error:
            failed = error
        self._tell_taken(asked.transfer, ())
        if failed is None:
            asked.future.set_result(made)
        else:
            asked.future.set_exception(failed)

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

    def _read_event(self, opened: _Opened, index: int) -> Event:
        if index not in opened.reads:
            opened.reads[index] = self._device.new_event(index, interprocess=True)
        return opened.reads[index]

    def _forget(self, number: int) -> list[Left]:
        """Forget a staging buffer, and return the objects to release once its reads are done."""
        found = self._opened.pop(number, None)
        if found is None:
            return []
        reads = tuple(found.reads.values())
        outlast(reads)
        return [Left(found, reads)]


def _soon(events: list[Event]) -> bool:
    """Return whether all events happen within a moment."""
    end = _core.monotonic() + _MOMENT
    while not all(map(happened, events)):
        if _core.monotonic() > end:
            return False
    return True
