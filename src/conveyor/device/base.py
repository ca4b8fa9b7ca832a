"""Kinds of device: what each can do, their registry by torch's names, and waiting for their events.

The model is that of CUDA. Work is *enqueued* on a stream and done in the order in which it was enqueued;
streams run side by side, and beside the host. An event is a place in a stream that other streams, the host
and other processes can wait for. Freed memory may be used again by work that is enqueued later on the stream
it was made on: code that uses it on another stream says so (:meth:`Device.keep`).

A device rings for nobody. What waits for an event inside of its driver (``Event.synchronize``) is broken off
by nothing, and an event of a process that has died may never happen. So the host asks, and sleeps between two
looks: as long as it has waited by then, from microseconds up to the longest pause. That keeps what is short
as short as it is, and a long wait costs few looks.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


#: Far less than a process can have, which is about 22,000 in CUDA, and far more than there are at a time.
_MOST = 1024

_last: deque[Event] = deque(maxlen=_MOST)


def outlast(events: Iterable[Event]) -> None:
    """Keep events that are not needed here any more, and that other processes may still wait for."""
    _last.extend(events)


class Event(ABC):
    """A place in the work of a stream. One that was never recorded has happened.

    It may be recorded again: who waited before waits for the former place.
    """

    @abstractmethod
    def record(self, stream: Stream | None = None) -> None:
        """Have the event happen when all that is enqueued on ``stream`` so far is done (``None``: on the
        current stream of the current device)."""

    @abstractmethod
    def query(self) -> bool:
        """Whether the event has happened. Does not wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """Have the host wait until the event has happened."""

    @abstractmethod
    def handle(self) -> bytes:
        """Describe the event to another process of this host (:meth:`Device.open_event`). Only for an event
        that was made with ``interprocess=True``, and as long as it lives here. Record it first: the other
        process waits for the place of the last record before its wait."""


class Stream(ABC):
    """A queue of work on one device. Two are equal if they are the same queue.

    device: the kind of device.
    index: which of them.
    """

    device: Device
    index: int

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """Have the work that is enqueued from now on begin when ``event`` has happened. The host does not
        wait."""

    @abstractmethod
    def query(self) -> bool:
        """Whether all that was enqueued is done. Does not wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """Have the host wait until all that was enqueued is done."""

    def record(self, *, interprocess: bool = False) -> Event:
        """Make an event that happens when all that is enqueued so far is done."""
        event = self.device.new_event(self.index, interprocess=interprocess)
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        """Have the work that is enqueued here from now on begin when the work on ``other`` by now is done."""
        self.wait_event(other.record())


class Device(ABC):
    """A kind of device. It is sent to the processes that get tensors of it, as what :meth:`recipe` says.

    Where ``index`` is ``None`` it is the current device of the thread.

    kind: what torch calls it: ``tensor.device.type``.
    """

    kind: str

    # Which devices there are.

    @abstractmethod
    def viable(self) -> str | None:
        """Say why none can be used in this process: ``"torch finds no GPU"``. ``None``: one can. It raises
        nothing, and may be asked anywhere, in a process without torch as well."""

    @abstractmethod
    def count(self) -> int:
        """How many there are for this process."""

    @abstractmethod
    def current_index(self) -> int:
        """Return the index of the thread's current device."""

    @abstractmethod
    def identity(self, index: int | None = None) -> str:
        """Return a name of the device that is the same in all processes of this host, whatever index it has
        there."""

    @abstractmethod
    def memory(self, index: int | None = None) -> tuple[int, int]:
        """How many bytes are free and how many there are."""

    def recipe(self) -> tuple[Callable[..., Device], tuple[Any, ...]]:
        """Describe how another process makes the device: a function that can be imported, and its arguments.
        It is called there once, unless a device of this kind is registered there already."""
        return type(self), ()

    # Streams and events.

    @abstractmethod
    def current_stream(self, index: int | None = None) -> Stream:
        """Find the stream on which the thread enqueues what it does."""

    @abstractmethod
    def new_stream(self, index: int | None = None, *, urgent: bool = False) -> Stream:
        """Make a stream. ``urgent``: its work goes before that of others where both could begin."""

    @abstractmethod
    def using(self, stream: Stream) -> AbstractContextManager[None]:
        """Have the thread enqueue what it does meanwhile on ``stream``, whose device is the current one."""

    @abstractmethod
    def new_event(self, index: int | None = None, *, interprocess: bool = False) -> Event:
        """Make an event. ``interprocess``: other processes can wait for it."""

    @abstractmethod
    def open_event(self, handle: bytes, index: int | None = None) -> Event:
        """Make the event that another process has described, for a stream of this one to wait for."""

    @abstractmethod
    def synchronize(self, index: int | None = None) -> None:
        """Have the host wait until all that was enqueued on a device is done."""

    # Memory of the device.

    @abstractmethod
    def empty(self, nbytes: int, index: int | None = None) -> torch.Tensor:
        """Make a tensor of bytes on the device, for the current stream of it.

        Raises:
            torch.OutOfMemoryError: the device has no room for it.
        """

    @abstractmethod
    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Leave a tensor's memory as it is, although it may be freed here, until all that is enqueued on
        ``stream`` by then is done. Needed wherever ``stream`` is not the one that the tensor was made on."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy on the current stream of the device that takes part; neither overlaps the other. The
        host does not wait, if what it has of them is pinned, and may touch neither until it is done."""
        target.copy_(source, non_blocking=True)

    # Memory of the host.

    @abstractmethod
    def empty_pinned(self, nbytes: int) -> torch.Tensor:
        """Make a tensor of bytes in memory of the host that the device reads and writes by itself. It is
        not used again before the copies from and to it are done."""

    @abstractmethod
    def pin(self, address: int, nbytes: int) -> None:
        """Make mapped memory of the host such memory, page by page. It must stay mapped, with the pages that
        it has, until :meth:`unpin`.

        Raises:
            RuntimeError: the device refuses.
        """

    @abstractmethod
    def unpin(self, address: int) -> None:
        """Take back what :meth:`pin` did at this address. No copy may be under way there.

        Raises:
            RuntimeError: nothing was pinned at this address.
        """

    # Other processes of this host.

    @abstractmethod
    def cannot_export(self, tensor: torch.Tensor) -> str | None:
        """Say why other processes cannot open a tensor's memory, in words to follow "it". ``None``: they
        can."""

    @abstractmethod
    def export_memory(self, tensor: torch.Tensor) -> bytes:
        """Describe all of the memory that a tensor lies in, its storage, to other processes. They open it any
        number of times. The tensor must be kept here as long as it is open there, and events say when its
        values are there.

        Raises:
            RuntimeError: the device cannot share memory of this kind.
        """

    @abstractmethod
    def open_memory(self, handle: bytes) -> torch.Tensor:
        """Map the memory that another process has described: the bytes of its storage, which stay that
        process's memory. It is let go of with the last tensor that lies in it.

        Raises:
            RuntimeError: the process has ended, or its device is none that this process can reach.
        """

    def __reduce__(self) -> tuple[Any, ...]:
        return adopt, (self.kind, *self.recipe())

    def __repr__(self) -> str:
        return f"<conveyor.device {self.kind!r}>"


_registered: dict[str, Device] = {}

#: Ours, with their modules: imported when somebody asks for them.
_ours = {"cuda": "conveyor.device.cuda"}
_made: dict[str, Device] = {}

#: Names of what is no device with memory of its own.
_NOT_DEVICES = ("cpu", "meta", "default")
#: Other names of ours.
_ALIASES = {"gpu": "cuda"}


def register(device: Device) -> None:
    """Have ``device=`` hints, values and transports know a kind of device. It is enough to do so in the
    process that began the session: others are told with the first tensor of it that they get.

    Raises:
        TypeError: it is no :class:`Device`.
        ValueError: there is one of that kind, or the kind cannot be one.
    """
    if not isinstance(device, Device):
        raise TypeError(f"a conveyor.device.Device is registered, not {device!r}")
    kind = getattr(device, "kind", None)
    if not isinstance(kind, str) or not kind.isidentifier():
        raise TypeError(f"a {type(device).__name__} has no kind: its attribute 'kind' is {kind!r}")
    if kind in _NOT_DEVICES or kind in _ALIASES:
        raise ValueError(f"{kind!r} is no kind of device that can be registered")
    if kind in kinds():
        raise ValueError(f"there is a device of the kind {kind!r} already")
    _registered[kind] = device


def unregister(kind: str) -> None:
    """Take back what :func:`register` did, in this process.

    Raises:
        ValueError: nobody has registered a device of that kind.
    """
    if _registered.pop(kind, None) is None:
        raise ValueError(f"no device was registered of the kind {kind!r}")


def kinds() -> tuple[str, ...]:
    """List all kinds: ours, then those that were registered."""
    return (*_ours, *_registered)


def get(kind: str) -> Device | None:
    """Find the device of a kind, also by another name of it (``"gpu"``). ``None``: nobody has registered it,
    or it is the host."""
    kind = _ALIASES.get(kind, kind)
    found = _registered.get(kind) or _made.get(kind)
    if found is None and kind in _ours:
        found = _made.setdefault(kind, import_module(_ours[kind]).DEVICE)
    return found


def of(tensor: torch.Tensor) -> Device | None:
    """Find the device that a tensor lies on. ``None``: it is the host, or one that nobody has registered."""
    return get(tensor.device.type)


def in_use() -> bool:
    """Whether this process may have tensors of a device. It has imported torch."""
    return bool(_registered) or bool(sys.modules["torch"].cuda.is_initialized())


def adopt(kind: str, make: Callable[..., Device], arguments: tuple[Any, ...]) -> Device:
    """Find the device of a kind, or make and register it. Called where a device comes from another
    process."""
    found = get(kind)
    if found is None:
        made = make(*arguments)
        # Making it may have registered it.
        found = get(kind) or _registered.setdefault(kind, made)
    return found


#: Seconds that somebody sleeps at first, and at most while others wait for him.
FIRST, LONGEST = 0.00002, 0.0005


def happened(event: Event) -> bool:
    """Whether an event has happened, or cannot any more since the device has failed: whoever uses the device
    is told of that."""
    with suppress(Exception):
        return event.query()
    return True


def wait_until(
    done: Callable[[], bool],
    sleep: Callable[[float], object] = time.sleep,
    *,
    first: float = FIRST,
    longest: float = LONGEST,
) -> bool:
    """Call ``done`` until it returns true, and return whether it has.

    sleep: called between two looks with the seconds until the next. What it raises ends the wait, and so does
    a true value: somebody has ended it, as ``Flag.wait`` says.
    first, longest: seconds of the first sleep and at most of one. Each is twice as long as the one before.
    """
    pause = min(first, longest)
    while not done():
        if sleep(pause):
            return False
        pause = min(2 * pause, longest)
    return True
