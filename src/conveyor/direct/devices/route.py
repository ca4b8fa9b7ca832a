"""Tensors of devices stay where they are: others map the memory, and copy what they want of it.

The values may not be there yet when a method returns. The note names an event that happens when they are. It
names none where they are there already: to make an event for other processes, to open it and to let it go
costs much more than to ask.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from conveyor import _core
from conveyor import device as devices
from conveyor.codec.direct import Located, Route
from conveyor.codec.faults import NotThere
from conveyor.codec.out_of_band import TensorSpec
from conveyor.codec.tensors.collected import Collected
from conveyor.codec.tensors.staging import bring
from conveyor.device import Device, Event, base
from conveyor.device.base import outlast
from conveyor.direct.awaiting import deferral
from conveyor.direct.devices import by_host
from conveyor.direct.devices.opened import OPENED
from conveyor.direct.managers.sending import SENDER
from conveyor.direct.managers.wire import Ask, Source
from conveyor.direct.table import TABLE
from conveyor.direct.under_way import UnderWay
from conveyor.exceptions import ActorDiedError
from conveyor.flag import Flag
from conveyor.runtime import context, threads
from conveyor.runtime.waiting.patience import wait_until
from conveyor.transport.packing import Layout

if TYPE_CHECKING:
    import torch


#: Seconds for which who needs the values asks by himself: a thread costs about as much.
_MOMENT = 0.3e-3


def wait_for_values(filled: Event, where: Located, nbytes: int, process: Any) -> None:
    """Return when the values are there, which is when ``filled`` has happened. ``nbytes``: how many those
    are.

    Raises:
        NotThere: they are not yet, and this is for an await.
        ActorDiedError: the process that was computing them has died.
        WaitTimeoutError: the ``get`` that needs them has no longer.
        SystemLimitError: there is no thread that could wait.
    """
    key = _Filling, where.number, nbytes
    stock = deferral.stock
    coming = None if stock is None else cast("_Filling | None", stock.get(key))
    if coming is None:
        if _soon(filled):
            return
        coming = _Filling(filled, where, nbytes, process)
        if stock is not None:
            stock[key] = coming
    if stock is not None:
        if not coming.done():
            raise NotThere(coming.done)
        del stock[key]
    try:
        wait_until(
            process.inbox,
            coming.done,
            _core.seconds_to_fetch(),
            lambda: f"a value that {where.keeper} keeps",
            lambda: "tensors of a device in it do not have their values yet",
        )
    finally:
        coming.give_up()
    if not filled.query():
        raise ActorDiedError(
            f"{where.keeper} has died before tensors of a device had the values that it was computing",
            where.keeper,
        )


def _soon(filled: Event) -> bool:
    end = _core.monotonic() + _MOMENT

    def sleep(seconds: float) -> bool:
        if _core.monotonic() > end:
            return True
        time.sleep(seconds)
        return False

    return base.wait_until(filled.query, sleep)


class _Filling:
    """Wait for the values of a device."""

    def __init__(self, filled: Event, where: Located, nbytes: int, process: Any) -> None:
        self._filled = filled
        self.process = process
        self._maker = where.slot, where.incarnation
        self._wait = UnderWay(process, where.slot, where.number, nbytes)
        try:
            LOOKS.begin(self)
        except BaseException:
            self.give_up()
            raise

    def done(self) -> bool:
        """Whether they are there, or never will be."""
        gone: bool = self.process.board.gone(*self._maker)
        return gone or self._filled.query()

    def give_up(self) -> None:
        try:
            self._wait.end()
        finally:  # also where a signal handler has raised
            LOOKS.end(self)


class Looks:
    """Thread for all waits for device values in this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start afresh; also in a forked child, where the waits are its parent's."""
        self._lock = threading.RLock()  # a signal handler may fetch a value, too
        # Single steps change it.
        self._all: dict[_Filling, None] = {}
        self._has_thread = False
        #: Set when there is another wait.
        self._more = Flag()

    def begin(self, one: _Filling) -> None:
        """Ring the bell of its process when it is done. ``SystemLimitError``: there is no thread."""
        self._all[one] = None
        with self._lock:
            if not self._has_thread:
                threads.start(self._run, "device-fills")
                self._has_thread = True
        self._more.set()

    def end(self, one: _Filling) -> None:
        self._all.pop(one, None)

    def _run(self) -> None:
        pause = base.FIRST
        while True:
            self._look()
            with self._lock:
                if not self._all:
                    self._has_thread = False
                    return
            pause = base.FIRST if self._more.wait(pause) else min(2 * pause, base.LONGEST)
            self._more.clear()

    def _look(self) -> None:
        for one in list(self._all):
            if _is_done(one):
                self.end(one)
                one.process.ring()


def _is_done(one: _Filling) -> bool:
    with suppress(Exception):  # of the device: who waits asks it, too, and is told
        return one.done()
    return True


LOOKS = Looks()
os.register_at_fork(after_in_child=LOOKS.forget)


_log = logging.getLogger(__name__)

#: Fetches that were interrupted: for each an event that happens when its copies are done, and the objects
#: that these use.
_still_copied: list[tuple[Event, object]] = []

_inherited: list[object] = []


class _Part(NamedTuple):
    """The tensors of a value that are on one device.

    device, identity: which.
    filled: the handle of the event that happens when their values are there; empty: they are.
    memories: the handles of the storages that they lie in.
    lying: of each tensor its place in the value, which of the storages it lies in, and where it begins there.
    """

    device: Device
    identity: str
    filled: bytes
    memories: list[bytes]
    lying: list[tuple[int, int, int]]


class Devices(Route):
    """Memory of devices that other processes of this host open."""

    name = "ipc"

    def __init__(self) -> None:
        #: Events of each value that is kept here, for which others may wait.
        self._filled: dict[int, list[Event]] = {}

    def collected(self) -> Collected:
        """See :meth:`Route.collected`."""
        return _Exportable(_accepted)

    def offer(self, number: int, tensors: list[Any]) -> bytes | None:
        """See :meth:`Route.offer`."""
        places: dict[Any, list[int]] = {}
        for place, tensor in enumerate(tensors):
            places.setdefault(tensor.device, []).append(place)
        events: list[Event] = []
        try:
            parts = [self._part(tensors, mine, events) for mine in places.values()]
        except RuntimeError as error:
            _tell_once(str(error))
            return None
        source = Source.here(*SENDER.begin())
        try:
            note = pickle.dumps((parts, source), 5)
        except BaseException:
            SENDER.end()
            raise
        self._filled[number] = events
        return note

    def fetch(self, where: Located, specs: Sequence[TensorSpec], note: bytes) -> list[Any]:
        """Fetch the tensors. They come to the current device of this process; to memory of the host where it
        has none.

        Raises:
            ActorDiedError, TransportError: as :func:`by_host.fetch`.
            NotThere, ActorDiedError, WaitTimeoutError, SystemLimitError: as :func:`wait_for_values`.
        """
        # A snapshot is fetched by its maker, too. No process opens what it has described itself.
        kept = TABLE.find(where.number)
        mine = None if kept is None or kept.beside is None else kept.beside.tensors
        own = self._filled.get(where.number, ())
        made: list[Any] = [None] * len(specs)
        parts, keeper = pickle.loads(note)
        for part in parts:
            try:
                source = _Theirs(part, where) if mine is None else _Mine(mine, own)
            except RuntimeError as why:
                keeper.check(why)
                return _brought(by_host.fetch(where, keeper, specs, str(why)), parts)
            _fetch(part, specs, made, where, source)
        return made

    def way(self, note: bytes) -> str:
        """Name the way: ``"host"`` where this process does not see a device."""
        parts, _ = pickle.loads(note)
        return self.name if all(map(_is_seen, parts)) else "host"

    def forget_inherited(self) -> None:
        """Let go of what was offered by the process that this one was forked from."""
        _inherited.append(self._filled)
        self._filled = {}

    def send(self, asked: socket.socket, ask: Ask, stored: Any) -> None:
        """Serve a consumer that cannot open the memory, as the process that keeps the value."""
        by_host.send(asked, stored.beside.tensors, self._filled.get(ask.number, ()))

    def forget(self, number: int, note: bytes, tensors: list[Any]) -> None:
        """See :meth:`Route.forget`."""
        events = self._filled.pop(number, None)
        if events is not None:  # else it was offered by the process that this was forked from
            SENDER.end()
            outlast(events)

    @staticmethod
    def _part(tensors: list[Any], mine: list[int], events: list[Event]) -> _Part:
        first = tensors[mine[0]]
        device = devices.of(first)
        assert device is not None
        index = first.device.index
        memories: list[bytes] = []
        seen: dict[int, int] = {}
        lying = []
        for place in mine:
            storage = tensors[place].untyped_storage().data_ptr()
            if storage not in seen:
                seen[storage] = len(memories)
                memories.append(device.export_memory(tensors[place]))
            begin = tensors[place].data_ptr() - storage
            lying.append((place, seen[storage], begin))
        return _Part(
            device, device.identity(index), _filled(device, index, events), memories, lying
        )

    def __reduce__(self) -> str:
        return "DEVICES"


def _filled(device: Device, index: int, events: list[Event]) -> bytes:
    """The handle of an event that is added to ``events``, and happens with what is enqueued by now; empty:
    all of that is done."""
    stream = device.current_stream(index)
    if stream.query():
        return b""
    filled = device.new_event(index, interprocess=True)
    filled.record(stream)
    events.append(filled)
    return filled.handle()


class _Exportable(Collected):
    def wants(self, tensor: torch.Tensor) -> bool:
        device = devices.of(tensor)
        return device is not None and device.cannot_export(tensor) is None


def _accepted(_tensor: Any) -> None:
    return None


class _Theirs:
    """Tensors of another process, opened here.

    filled: events that happen when their values are there.
    memory: the memory to copy from, which stays as it is meanwhile.
    """

    def __init__(self, part: _Part, where: Located) -> None:
        """Raise ``RuntimeError`` if this process cannot open them."""
        device = part.device
        why_none = device.viable()
        if why_none is not None:
            raise RuntimeError(why_none)
        self.memory = [OPENED.open(device, handle, where) for handle in part.memories]
        index = device.current_index()
        self.filled = [device.open_event(part.filled, index)] if part.filled else []

    def bytes_of(self, _place: int, memory: int, begin: int, nbytes: int) -> Any:
        """Return the bytes of one tensor."""
        return self.memory[memory][begin : begin + nbytes]


class _Mine:
    """Tensors of this process, in the form of ``_Theirs``."""

    def __init__(self, tensors: list[Any], filled: Sequence[Event]) -> None:
        self.memory, self.filled = tensors, filled

    def bytes_of(self, place: int, _memory: int, _begin: int, _nbytes: int) -> Any:
        """Return the bytes of one tensor."""
        import torch

        return self.memory[place].detach().view(-1).view(torch.uint8)


def _fetch(
    part: _Part,
    specs: Sequence[TensorSpec],
    made: list[Any],
    where: Located,
    source: _Theirs | _Mine,
) -> None:
    device = part.device
    index = device.current_index()
    layout = Layout.of([specs[place] for place, _, _ in part.lying])
    for filled in source.filled:
        wait_for_values(filled, where, layout.size, context.current().process)
        # The host's look says nothing to the streams of some devices.
        device.current_stream(index).wait_event(filled)
    for one in list(_still_copied):
        if one[0].query():
            with suppress(ValueError):  # another thread has seen that, too
                _still_copied.remove(one)
    target = device.empty(layout.size, index)
    for (place, memory, begin), tensor in zip(part.lying, layout.open(target), strict=True):
        made[place] = tensor
        flat = tensor.view(-1).view(target.dtype)
        device.copy(flat, source.bytes_of(place, memory, begin, flat.numel()))
    # What was opened may be let go of, and the frame with it, when this is done.
    copied = device.current_stream(index).record()
    try:
        copied.synchronize()
    except BaseException:
        _still_copied.append((copied, (source.memory, target)))
        raise


def _is_seen(part: _Part) -> bool:
    device = part.device
    seen = range(device.count()) if device.viable() is None else ()
    return any(device.identity(index) == part.identity for index in seen)


def _brought(tensors: list[Any], parts: Sequence[_Part]) -> list[Any]:
    """Put tensors of the host on the devices of this process that they are for, if it has such."""
    for part in parts:
        if part.device.viable() is None:
            for place, _, _ in part.lying:
                tensors[place] = bring(tensors[place], part.device, None)
    return tensors


@functools.cache
def _tell_once(why: str) -> None:
    _log.warning(
        "process %d copies tensors of devices to the host when they are returned, since others cannot open "
        "their memory: %s",
        os.getpid(),
        why,
    )


DEVICES = Devices()
os.register_at_fork(after_in_child=DEVICES.forget_inherited)
