"""Tensors of devices stay where they are: others map the memory, and copy what they want of it.

To open memory costs more than to copy what little values have. To close it is worse: CUDA waits for all that
the device does for this process. What was not used for a while is closed by a thread, so that its owner's
memory is not held for longer than that.

The consumer asks at the socket at which managers' values are asked for (``managers/sending.py``). A thread of
the keeper's copies the tensors to memory of the host, and sends their bytes.

The values may not be there yet when a method returns. The note names an event that happens when they are. It
names none where they are there already: to make an event for other processes, to open it and to let it go
costs much more than to ask.
"""

from __future__ import annotations

import functools
import logging
import math
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
from conveyor.codec.tensors.staging import moved_to
from conveyor.device import Device, Event, base
from conveyor.device.base import outlast
from conveyor.direct.fetching import UnderWay, deferral
from conveyor.direct.managers.manager import in_words
from conveyor.direct.managers.transfers import (
    SENDER,
    Answer,
    Ask,
    Source,
    ask,
    readable,
    receive_one,
    send_one,
)
from conveyor.direct.store import TABLE
from conveyor.exceptions import ActorDiedError, SystemLimitError, TransportError, WaitTimeoutError
from conveyor.flag import Flag
from conveyor.runtime import context, threads
from conveyor.runtime.waiting import wait_until
from conveyor.transport.packing import Layout

if TYPE_CHECKING:
    import torch


#: Seconds after which what is not used is closed.
IDLE = 3.0
#: How many are open at most; the one that was used longest ago gives way.
MOST = 64

#: Key of opened memory: its process (slot and incarnation), and the handle.
_Key = tuple[int, int, bytes]


class _Open:
    """Memory that is open.

    used: when it was asked for last, by ``_core.monotonic()``.
    """

    __slots__ = ("memory", "used")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.used = _core.monotonic()


class Opened:
    """Cache of the memory of other processes that this process has open."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._lock = threading.RLock()  # a signal handler may fetch a value, too
        self._open: dict[_Key, _Open] = {}
        #: Flag of the thread, set when all is to be closed at once. ``None``: there is no thread.
        self._closing: Flag | None = None

    def open(self, device: Device, handle: bytes, where: Located) -> torch.Tensor:
        """The memory that ``handle`` describes, of the process that keeps ``where``.

        Raises:
            RuntimeError: it cannot be opened.
        """
        key = where.slot, where.incarnation, handle
        found = self._open.get(key)
        if found is not None:
            found.used = _core.monotonic()
            return found.memory
        try:
            memory = device.open_memory(handle)
        except RuntimeError:
            # Its address may be that of other memory, which its owner has freed, and which is open here.
            with self._lock:
                gone, self._open = self._open, {}
            if not gone:
                raise
            gone.clear()
            memory = device.open_memory(handle)
        self._keep(key, memory)
        return memory

    def _keep(self, key: _Key, memory: torch.Tensor) -> None:
        gone = None
        with self._lock:
            if self._closing is None:
                closing = Flag()
                try:
                    threads.start(self._run, "opened", closing)
                except SystemLimitError:
                    return  # nobody would close it
                self._closing = closing
            if len(self._open) >= MOST:
                longest, _ = min(self._all(), key=lambda item: item[1].used)
                gone = self._open.pop(longest, None)
            self._open[key] = _Open(memory)
        del gone  # it is closed without the lock

    def close(self) -> None:
        """Close all memory at the end of the session."""
        with self._lock:
            gone, self._open = self._open, {}
            closing, self._closing = self._closing, None
        gone.clear()
        if closing is not None:
            closing.set()

    def _run(self, closing: Flag) -> None:
        pause: float | None = IDLE
        while pause is not None and not closing.wait(pause):
            pause = self._close_idle(closing)

    def _close_idle(self, closing: Flag) -> float | None:
        """Close what was not used for a while. In how many seconds there may be more; ``None``: all is
        closed."""
        with self._lock:
            before = _core.monotonic() - IDLE
            idle = [key for key, one in self._all() if one.used <= before]
            gone = [self._open.pop(key, None) for key in idle]
            pause = min((one.used - before for _, one in self._all()), default=None)
            if pause is None and self._closing is closing:
                self._closing = None
        gone.clear()
        return pause

    def _all(self) -> list[tuple[_Key, _Open]]:
        return list(self._open.items())  # one step: a signal handler may open some, too

    def forget(self) -> None:
        """Drop the cache in a forked child. The memory is its parent's: it stays as it is, and nobody uses
        it."""
        _inherited.append(self._open)
        self._clear()


_inherited: list[object] = []

OPENED = Opened()
os.register_at_fork(after_in_child=OPENED.forget)


_host_log = logging.getLogger("conveyor")

#: Seconds between two looks whether the keeper lives.
_LOOK = 0.5


def send(connection: socket.socket, tensors: Sequence[Any], filled: Sequence[Event]) -> None:
    """Send the bytes of tensors whose values are there when all of ``filled`` has happened."""
    try:
        for event in filled:
            event.synchronize()
        memory = [_bytes_of(tensor.detach().cpu()) for tensor in tensors]
    except Exception as error:
        send_one(connection, Answer(in_words(error)))
        return
    send_one(connection, Answer(None))
    for one in memory:
        connection.sendall(one.numpy())


def fetch(where: Located, source: Source, specs: Sequence[TensorSpec], why: str) -> list[Any]:
    """Get all tensors of a value in memory of the host. ``why``: they cannot be got otherwise.

    Raises:
        ActorDiedError: the keeper has died.
        TransportError: it could not copy them.
        WaitTimeoutError: the ``get`` that needs them has no longer.
    """
    _warn_of_host_copies(where.holder, why)

    def look() -> float:
        source.check()
        left = _core.seconds_to_fetch()
        if left == 0:
            raise WaitTimeoutError(
                f"the timeout of get() is over: tensors of a device that {where.holder} keeps have not come "
                "by way of the host's memory"
            )
        return _LOOK if left is None else min(left, _LOOK)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            ask(sock, source, Ask(where.number, b""), look)
            while not readable([sock], look()):
                pass
            sock.settimeout(None)
            answer = receive_one(sock, Answer)
            if answer is None:
                raise ConnectionResetError("it has hung up")
            if answer.error is None:
                return [_receive(sock, spec, look) for spec in specs]
        except WaitTimeoutError:  # which is an OSError
            raise
        except OSError as error:
            source.check(error)
            raise _error(where, str(error)) from error
    raise _error(where, answer.error)


def _receive(sock: socket.socket, spec: TensorSpec, look: Any) -> torch.Tensor:
    import torch

    dtype = getattr(torch, spec.dtype)
    made = torch.empty(math.prod(spec.shape) * dtype.itemsize, dtype=torch.uint8)
    rest = memoryview(made.numpy())
    while rest:
        if not readable([sock], look()):
            continue
        came = sock.recv_into(rest)
        if not came:
            raise ConnectionResetError("it has hung up")
        rest = rest[came:]
    return made.view(dtype).view(spec.shape)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8)


def _error(where: Located, why: str) -> TransportError:
    me = context.current().own_actor
    return TransportError(
        f"{where.holder} could not send tensors of a device to {'the driver' if me is None else me.name} by "
        f"way of the host's memory: {why}"
    )


@functools.cache
def _warn_of_host_copies(holder: str, why: str) -> None:
    me = context.current().own_actor
    _host_log.warning(
        "tensors of a device that %s keeps come to %s by way of the host's memory, since it cannot open that "
        "device's: %s",
        holder,
        "the driver" if me is None else me.name,
        why,
    )


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
            lambda: f"a value that {where.holder} keeps",
            lambda: "tensors of a device in it do not have their values yet",
        )
    finally:
        coming.give_up()
    if not filled.query():
        raise ActorDiedError(
            f"{where.holder} has died before tensors of a device had the values that it was computing",
            where.holder,
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
        self._holder = where.slot, where.incarnation
        self._wait = UnderWay(process, where.slot, where.number, nbytes)
        try:
            DEVICE_WAITS.begin(self)
        except BaseException:
            self.give_up()
            raise

    def done(self) -> bool:
        """Whether they are there, or never will be."""
        gone: bool = self.process.process_table.gone(*self._holder)
        return gone or self._filled.query()

    def give_up(self) -> None:
        try:
            self._wait.end()
        finally:  # also where a signal handler has raised
            DEVICE_WAITS.end(self)


class DeviceWaits:
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
        """Ring the doorbell of its process when it is done. ``SystemLimitError``: there is no thread."""
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
                one.process.notify()


def _is_done(one: _Filling) -> bool:
    with suppress(Exception):  # of the device: who waits asks it, too, and is told
        return one.done()
    return True


DEVICE_WAITS = DeviceWaits()
os.register_at_fork(after_in_child=DEVICE_WAITS.forget)


_log = logging.getLogger(__name__)

#: Fetches that were interrupted: for each an event that happens when its copies are done, and the objects
#: that these use.
_still_copied: list[tuple[Event, object]] = []


class _Part(NamedTuple):
    """The tensors of a value that are on one device.

    device, identity: which.
    filled: the handle of the event that happens when their values are there; empty: they are.
    memories: the handles of the storages that they lie in.
    offsets: of each tensor its position in the value, which of the storages it lies in, and where it begins
    there.
    """

    device: Device
    identity: str
    filled: bytes
    memories: list[bytes]
    offsets: list[tuple[int, int, int]]


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
        by_device: dict[Any, list[int]] = {}
        for position, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(position)
        events: list[Event] = []
        try:
            parts = [self._part(tensors, mine, events) for mine in by_device.values()]
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
        # A snapshot is fetched by its owner, too. No process opens what it has described itself.
        stored = TABLE.find(where.number)
        mine = None if stored is None or stored.out_of_band is None else stored.out_of_band.tensors
        own = self._filled.get(where.number, ())
        made: list[Any] = [None] * len(specs)
        parts, holder = pickle.loads(note)
        for part in parts:
            try:
                source = _Theirs(part, where) if mine is None else _Mine(mine, own)
            except RuntimeError as why:
                holder.check(why)
                return _brought(fetch(where, holder, specs, str(why)), parts)
            _fetch(part, specs, made, where, source)
        return made

    def route_name(self, note: bytes) -> str:
        """Name the way: ``"host"`` where this process does not see a device."""
        parts, _ = pickle.loads(note)
        return self.name if all(map(_is_seen, parts)) else "host"

    def forget_inherited(self) -> None:
        """Let go of what was offered by the process that this one was forked from."""
        _inherited.append(self._filled)
        self._filled = {}

    def send(self, connection: socket.socket, ask: Ask, stored: Any) -> None:
        """Serve a consumer that cannot open the memory, as the process that keeps the value."""
        send(connection, stored.out_of_band.tensors, self._filled.get(ask.number, ()))

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
        offsets = []
        for position in mine:
            storage = tensors[position].untyped_storage().data_ptr()
            if storage not in seen:
                seen[storage] = len(memories)
                memories.append(device.export_memory(tensors[position]))
            begin = tensors[position].data_ptr() - storage
            offsets.append((position, seen[storage], begin))
        return _Part(
            device, device.identity(index), _filled(device, index, events), memories, offsets
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

    def bytes_of(self, _position: int, memory: int, begin: int, nbytes: int) -> Any:
        """Return the bytes of one tensor."""
        return self.memory[memory][begin : begin + nbytes]


class _Mine:
    """Tensors of this process, in the form of ``_Theirs``."""

    def __init__(self, tensors: list[Any], filled: Sequence[Event]) -> None:
        self.memory, self.filled = tensors, filled

    def bytes_of(self, position: int, _memory: int, _begin: int, _nbytes: int) -> Any:
        """Return the bytes of one tensor."""
        import torch

        return self.memory[position].detach().view(-1).view(torch.uint8)


def _fetch(
    part: _Part,
    specs: Sequence[TensorSpec],
    made: list[Any],
    where: Located,
    source: _Theirs | _Mine,
) -> None:
    device = part.device
    index = device.current_index()
    layout = Layout.of([specs[position] for position, _, _ in part.offsets])
    for filled in source.filled:
        wait_for_values(filled, where, layout.size, context.current().process)
        # The host's look says nothing to the streams of some devices.
        device.current_stream(index).wait_event(filled)
    for one in list(_still_copied):
        if one[0].query():
            with suppress(ValueError):  # another thread has seen that, too
                _still_copied.remove(one)
    target = device.empty(layout.size, index)
    for (position, memory, begin), tensor in zip(part.offsets, layout.open(target), strict=True):
        made[position] = tensor
        flat = tensor.view(-1).view(target.dtype)
        device.copy(flat, source.bytes_of(position, memory, begin, flat.numel()))
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
            for position, _, _ in part.offsets:
                tensors[position] = moved_to(tensors[position], part.device, None)
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
