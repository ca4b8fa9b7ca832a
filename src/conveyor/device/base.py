"""Base of all kinds of device: what a device can do, whoever makes it.

The model is that of CUDA. Work is *enqueued* on a stream and done in the order in which it was enqueued;
streams run side by side, and beside the host. An event is a place in a stream that other streams, the host
and other processes can wait for. Freed memory may be used again by work that is enqueued later on the stream
it was made on: code that uses it on another stream says so (:meth:`Device.keep`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from conveyor.later import import_later

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
        # The registry knows this class, and is imported when it is needed.
        return import_later("conveyor.device.registry").adopt, (self.kind, *self.recipe())

    def __repr__(self) -> str:
        return f"<conveyor.device {self.kind!r}>"
