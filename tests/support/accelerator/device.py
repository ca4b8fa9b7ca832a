"""The simulated accelerator as the library sees it."""

from __future__ import annotations

import mmap
import os
import pickle
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from accelerator.machine import KIND, Block, Machine, Part, blocks
from accelerator.settings import VISIBLE, Settings
from accelerator.storages import over
from accelerator.streams import ForeignEvent, SimEvent, SimStream
from conveyor.device import Device, Event, Stream
from conveyor.later import LaterModule, import_later

if TYPE_CHECKING:
    import torch
else:
    torch = LaterModule("torch")


class SimDevice(Device):
    """Simulated devices: see :func:`accelerator.install`.

    machine: what this process has of them.
    """

    kind = KIND

    def __init__(self, settings: Settings) -> None:
        self.machine = Machine(self, settings)

    def viable(self) -> str | None:
        """As the base says."""
        if not self.machine.visible:
            return f"{VISIBLE} shows it no device"
        return cannot_simulate()

    def count(self) -> int:
        """As the base says."""
        return len(self.machine.visible)

    def current_index(self) -> int:
        """As the base says."""
        return self.machine.index()

    def identity(self, index: int | None = None) -> str:
        """As the base says."""
        return f"{KIND}:{self.machine.visible[self.machine.index(index)]}"

    def memory(self, index: int | None = None) -> tuple[int, int]:
        """As the base says."""
        heap = self.machine.heap(self.machine.index(index))
        return heap.room(), heap.size

    def recipe(self) -> tuple[Callable[..., Device], tuple[Any, ...]]:
        """As the base says."""
        return _installed, (self.machine.settings,)

    def current_stream(self, index: int | None = None) -> Stream:
        """As the base says."""
        return self.machine.current_stream(index)

    def new_stream(self, index: int | None = None, *, urgent: bool = False) -> Stream:
        """As the base says. Streams do not take anything from each other, so none is more urgent."""
        return self.machine.new_stream(self.machine.index(index))

    def using(self, stream: Stream) -> AbstractContextManager[None]:
        """As the base says."""
        assert isinstance(stream, SimStream)
        return self.machine.using(stream)

    def new_event(self, index: int | None = None, *, interprocess: bool = False) -> Event:
        """As the base says."""
        return SimEvent(self.machine, self.machine.index(index), interprocess)

    def open_event(self, handle: bytes, index: int | None = None) -> Event:
        """As the base says. A stream that waits for it goes on with an error when its process ends."""
        told = pickle.loads(handle)
        _check_foreign(told[1], "an event")
        opened = self.machine.open(told)
        return ForeignEvent(opened, opened.word(told[5]))

    def synchronize(self, index: int | None = None) -> None:
        """As the base says."""
        for stream in self.machine.streams(self.machine.index(index)):
            stream.synchronize()

    def empty(self, nbytes: int, index: int | None = None) -> torch.Tensor:
        """As the base says."""
        return self.machine.allocate(nbytes, self.machine.index(index))

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """As the base says. Memory of another process is that one's to keep."""
        assert isinstance(stream, SimStream)
        block = _block_of(tensor)
        if block is not None:
            block.used_on.add(stream)

    def empty_pinned(self, nbytes: int) -> torch.Tensor:
        """As the base says."""
        memory = _Pages(-1, max(nbytes, 1))
        made = torch.frombuffer(memory, dtype=torch.uint8)
        address = made.data_ptr()
        self.machine.pin(address, nbytes or 1, ours=True)
        memory.pinned = self.machine.unpinned, address
        return made[:nbytes]

    def pin(self, address: int, nbytes: int) -> None:
        """As the base says."""
        self.machine.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        """As the base says."""
        self.machine.unpin(address)

    def cannot_export(self, tensor: torch.Tensor) -> str | None:
        """As the base says."""
        if tensor.device.type != KIND:
            return f"is on device {str(tensor.device)!r}"
        if tensor.untyped_storage().nbytes() and _block_of(tensor) is None:
            return "lies in the memory of another process already"
        return None

    def export_memory(self, tensor: torch.Tensor) -> bytes:
        """As the base says."""
        why_not = self.cannot_export(tensor)
        if why_not is not None:
            raise RuntimeError(f"a tensor cannot be exported: it {why_not}")
        storage = tensor.untyped_storage()
        heap = self.machine.heap(tensor.device.index)
        offset = storage.data_ptr() - heap.address
        return pickle.dumps((storage.nbytes(), heap.handle(offset)), 5)

    def open_memory(self, handle: bytes) -> torch.Tensor:
        """As the base says."""
        nbytes, where = pickle.loads(handle)
        told = pickle.loads(where)
        _check_foreign(told[1], "memory")
        opened = self.machine.open(told)
        index = self.machine.visible.index(told[0])
        return over(Part(self.machine, opened, opened.address + told[5], nbytes), index)


class _Pages(mmap.mmap):
    """Memory of the host that says that it is pinned no more before anybody else can get its place.

    pinned: whom it tells, and what.
    """

    pinned: tuple[deque[int], int] | None = None

    def __del__(self) -> None:
        if self.pinned is not None:
            unpinned, address = self.pinned
            unpinned.append(address)


def cannot_simulate() -> str | None:
    """Say what is missing here. ``None``: nothing."""
    for package in ("torch", "numpy"):
        if find_spec(package) is None:
            return f"{package} is not installed"
    registration = import_later("torch.utils.backend_registration")
    if not hasattr(registration, "_setup_privateuseone_for_python_backend"):
        return f"torch {torch.__version__} is too old: it has no devices in Python"
    return None


def _check_foreign(pid: int, what: str) -> None:
    """Refuse what this process has described itself, as CUDA does."""
    if pid == os.getpid():
        raise RuntimeError(f"{what} of this process itself cannot be opened in it")


def _block_of(tensor: torch.Tensor) -> Block | None:
    found = blocks.get(tensor.untyped_storage().data_ptr())
    return None if found is None else found()


def _installed(settings: Settings) -> Device:
    """Install what another process has."""
    made: Device = import_later("accelerator").install(settings)
    return made
