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
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from conveyor import device as devices
from conveyor.codec.direct import Located, Route
from conveyor.codec.parcels import TensorSpec
from conveyor.codec.tensors.beside import Collected
from conveyor.device import Device, Event
from conveyor.device.lasting import outlast
from conveyor.direct.devices.filled import wait_for_values
from conveyor.direct.devices.opened import OPENED
from conveyor.direct.table import TABLE
from conveyor.exceptions import TransportError
from conveyor.runtime import context
from conveyor.transport.packing import Layout

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

#: Of each fetch that was interrupted an event that happens when its copies are done, and what these use.
_still_copied: list[tuple[Event, object]] = []


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
        #: Of each value that is kept here, events that others may wait for.
        self._filled: dict[int, list[Event]] = {}

    def collected(self) -> Collected:
        """As the base says."""
        return _Exportable(_accepted)

    def offer(self, number: int, tensors: list[Any]) -> bytes | None:
        """As the base says."""
        places: dict[Any, list[int]] = {}
        for place, tensor in enumerate(tensors):
            places.setdefault(tensor.device, []).append(place)
        events: list[Event] = []
        try:
            parts = [self._part(tensors, mine, events) for mine in places.values()]
        except RuntimeError as error:
            _tell_once(str(error))
            return None
        self._filled[number] = events
        return pickle.dumps(parts, 5)

    def fetch(self, where: Located, specs: Sequence[TensorSpec], note: bytes) -> list[Any]:
        """As the base says. They come to the current device of this process.

        Raises:
            TransportError: this process has no such device, or cannot reach it.
            NotThere, ActorDiedError, WaitTimeoutError, SystemLimitError: as :func:`wait_for_values`.
        """
        # A snapshot is fetched by its maker, too. No process opens what it has described itself.
        kept = TABLE.find(where.number)
        mine = None if kept is None or kept.beside is None else kept.beside.tensors
        own = self._filled.get(where.number, ())
        made: list[Any] = [None] * len(specs)
        for part in pickle.loads(note):
            _check_here(part.device, where)
            source = _Theirs(part, where) if mine is None else _Mine(mine, own)
            _fetch(part, specs, made, where, source)
        return made

    def forget(self, number: int, note: bytes, tensors: list[Any]) -> None:
        """As the base says."""
        outlast(self._filled.pop(number, ()))

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
    memory: what stays as it is while it is copied from.
    """

    def __init__(self, part: _Part, where: Located) -> None:
        device = part.device
        try:
            self.memory = [OPENED.open(device, handle, where) for handle in part.memories]
            index = device.current_index()
            self.filled = [device.open_event(part.filled, index)] if part.filled else []
        except RuntimeError as error:
            raise TransportError(
                f"this process cannot open memory of {where.keeper}'s {device.kind} device {part.identity}, "
                f"where a value lies: {error}. It must see that device, too; otherwise return the value "
                "without tensor_transport="
            ) from error

    def bytes_of(self, _place: int, memory: int, begin: int, nbytes: int) -> Any:
        """Those of one tensor."""
        return self.memory[memory][begin : begin + nbytes]


class _Mine:
    """The same of this process's own."""

    def __init__(self, tensors: list[Any], filled: Sequence[Event]) -> None:
        self.memory, self.filled = tensors, filled

    def bytes_of(self, place: int, _memory: int, _begin: int, _nbytes: int) -> Any:
        """Those of one tensor."""
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


def _check_here(device: Device, where: Located) -> None:
    why_not = device.viable()
    if why_not is not None:
        raise TransportError(
            f"a value that {where.keeper} has kept has tensors on a device of the kind {device.kind!r}, and "
            f"this process has none ({why_not}): return it without tensor_transport=, or with its tensors "
            "moved by .cpu()"
        )


@functools.cache
def _tell_once(why: str) -> None:
    _log.warning(
        "process %d copies tensors of devices to the host when they are returned, since others cannot open "
        "their memory: %s",
        os.getpid(),
        why,
    )


DEVICES = Devices()
