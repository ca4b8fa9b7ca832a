"""The simulated accelerator as torch and the library see it: the device, what stands for NCCL, kernels."""

from __future__ import annotations

import atexit
import mmap
import os
import pickle
import socket
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from accelerator.machine import KIND, VISIBLE, Block, KernelTime, Machine, Part, Settings, blocks
from accelerator.memory import over, twin
from accelerator.ops import Operations
from accelerator.streams import ForeignEvent, SimEvent, SimStream
from conveyor import descriptors, transport
from conveyor import device as devices
from conveyor.device import Device, Event, Stream
from conveyor.flag import Flag
from conveyor.later import LaterModule, import_later
from conveyor.transport.device_ipc import DeviceIpcTransport
from conveyor.transport.nccl.group import Group

if TYPE_CHECKING:
    import torch
else:
    torch = LaterModule("torch")

_lock = threading.RLock()
_installed: list[Any] = []


#: Sockets on which somebody is waited for, by what the group is known by.
_listening: dict[bytes, socket.socket] = {}
_CHUNK = 1 << 20


def install(settings: Settings | None = None) -> SimDevice:
    """Have torch know the device ``"sim"`` in this process, and register it with the library, with the
    transport ``"sim_ipc"`` over it. An actor that gets a tensor of it has it then, with the same settings;
    one that makes the first itself installs it.

    Gradients can be had on ``sim:0``, if it is installed before the first ``backward()`` of the process:
    torch counts its devices then.

    ``settings``: what it is like; ``None``: as it was installed before, or the defaults.

    Raises:
        RuntimeError: torch is missing or too old, it was installed with other settings, or the program has
            another device in its place (torch has one place for what it does not know).
    """
    with _lock:
        there = devices.get(KIND)
        if there is not None:
            if not isinstance(there, SimDevice):
                raise RuntimeError(f"the kind {KIND!r} is taken by {there!r}")
            if settings not in (None, there.machine.settings):
                raise RuntimeError(
                    f"the simulated accelerator is installed with {there.machine.settings}, and cannot be "
                    f"changed to {settings}"
                )
            return there
        why_not = cannot_simulate()
        if why_not is not None:
            raise RuntimeError(f"there can be no simulated accelerator: {why_not}")
        made = SimDevice(settings or Settings())
        _tell_torch(made)
        devices.register(made)
        transport.register(DeviceIpcTransport(made))
        # Threads must not be in the middle of an operation of torch when the interpreter ends.
        threading_atexit = getattr(threading, "_register_atexit", atexit.register)
        threading_atexit(made.machine.end)
        return made


def kernel(
    seconds: float, function: Callable[..., object] | None = None, *tensors: torch.Tensor
) -> None:
    """Enqueue a kernel that takes ``seconds`` at least, on the current stream of the tensors' device.

    ``function`` is called with tensors of the CPU that lie in the same memory as ``tensors``, which it reads
    and writes. Without one the kernel only takes time.

    Raises:
        ValueError: a tensor is on no simulated device, or they are on several.
    """
    if len({t.device for t in tensors}) > 1 or any(t.device.type != KIND for t in tensors):
        where = ", ".join(sorted({str(t.device) for t in tensors}))
        raise ValueError(f"a kernel works on tensors of one simulated device, not of {where}")
    machine = install().machine
    stream = machine.current_stream(tensors[0].device.index if tensors else None)
    here = [twin(tensor) for tensor in tensors]

    def work() -> None:
        if function is not None:
            with torch.inference_mode():
                function(*here)

    stream.enqueue(getattr(function, "__name__", "kernel"), work, seconds)


@contextmanager
def kernel_time(time: KernelTime) -> Iterator[None]:
    """Have each kernel that this thread enqueues meanwhile take a time, at least: seconds, or a function
    that gets the kernel's name (``"addmm"``) and the shapes of its tensors."""
    current = install().machine.current
    before, current.kernel_time = current.kernel_time, time
    try:
        yield
    finally:
        current.kernel_time = before


def _tell_torch(made: SimDevice) -> None:
    from torch.utils import backend_registration

    if torch._C._get_privateuse1_backend_name() not in ("privateuseone", KIND):
        taken = torch._C._get_privateuse1_backend_name()
        raise RuntimeError(
            f"torch has one place for a device that it does not know, and {taken!r} has it"
        )
    backend_registration._setup_privateuseone_for_python_backend(KIND, _Module(made))
    library = torch.library.Library("_", "IMPL")
    library.fallback(Operations(made.machine), "PrivateUse1")
    # A copy carries out what a view says of its values. Otherwise torch would copy to do so, without end.
    copies = torch.library.Library("aten", "IMPL")
    for view in ("Conjugate", "Negative"):
        copies.impl("_copy_from", torch.library.fallthrough_kernel, view)
    _installed.extend([library, copies])  # what they have registered ends with them


class _Module:
    """The module ``torch.sim``."""

    def __init__(self, made: SimDevice) -> None:
        self._device = made

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return self._device.current_index()

    def device_count(self) -> int:
        return self._device.count()

    def synchronize(self, index: int | None = None) -> None:
        self._device.synchronize(index)

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Kernels draw from the generator of the CPU."""


class SimDevice(Device):
    """The simulated devices of this process; :func:`install` makes it.

    machine: what this process has of them.
    """

    kind = KIND

    def __init__(self, settings: Settings) -> None:
        self.machine = Machine(self, settings)

    def viable(self) -> str | None:
        if not self.machine.visible:
            return f"{VISIBLE} shows it no device"
        return cannot_simulate()

    def count(self) -> int:
        return len(self.machine.visible)

    def current_index(self) -> int:
        return self.machine.index()

    def identity(self, index: int | None = None) -> str:
        return f"{KIND}:{self.machine.visible[self.machine.index(index)]}"

    def memory(self, index: int | None = None) -> tuple[int, int]:
        heap = self.machine.heap(self.machine.index(index))
        return heap.room(), heap.size

    def recipe(self) -> tuple[Callable[..., Device], tuple[Any, ...]]:
        return install, (self.machine.settings,)

    def current_stream(self, index: int | None = None) -> Stream:
        return self.machine.current_stream(index)

    def new_stream(self, index: int | None = None, *, urgent: bool = False) -> Stream:
        """Make a stream. None is more urgent: streams do not take anything from each other."""
        return self.machine.new_stream(self.machine.index(index))

    def using(self, stream: Stream) -> AbstractContextManager[None]:
        assert isinstance(stream, SimStream)
        return self.machine.using(stream)

    def new_event(self, index: int | None = None, *, interprocess: bool = False) -> Event:
        return SimEvent(self.machine, self.machine.index(index), interprocess)

    def open_event(self, handle: bytes, index: int | None = None) -> Event:
        """Open an event of another process. Once that was killed the event never happens, as in CUDA."""
        told = pickle.loads(handle)
        _check_foreign(told[1], "an event")
        opened = self.machine.open(told)
        return ForeignEvent(opened, opened.word(told[5]))

    def synchronize(self, index: int | None = None) -> None:
        for stream in self.machine.streams(self.machine.index(index)):
            stream.synchronize()

    def empty(self, nbytes: int, index: int | None = None) -> torch.Tensor:
        return self.machine.allocate(nbytes, self.machine.index(index))

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep a tensor's memory for a stream. Memory of another process is that process's to keep."""
        assert isinstance(stream, SimStream)
        block = _block_of(tensor)
        if block is not None:
            block.used_on.add(stream)

    def empty_pinned(self, nbytes: int) -> torch.Tensor:
        memory = _Pages(-1, max(nbytes, 1))
        made = torch.frombuffer(memory, dtype=torch.uint8)
        address = made.data_ptr()
        self.machine.pin(address, nbytes or 1, ours=True)
        memory.pinned = self.machine.unpinned, address
        return made[:nbytes]

    def pin(self, address: int, nbytes: int) -> None:
        self.machine.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        self.machine.unpin(address)

    def cannot_export(self, tensor: torch.Tensor) -> str | None:
        if tensor.device.type != KIND:
            return f"is on device {str(tensor.device)!r}"
        if tensor.untyped_storage().nbytes() and _block_of(tensor) is None:
            return "lies in the memory of another process already"
        return None

    def export_memory(self, tensor: torch.Tensor) -> bytes:
        why_not = self.cannot_export(tensor)
        if why_not is not None:
            raise RuntimeError(f"a tensor cannot be exported: it {why_not}")
        storage = tensor.untyped_storage()
        heap = self.machine.heap(tensor.device.index)
        offset = storage.data_ptr() - heap.address
        return pickle.dumps((storage.nbytes(), heap.handle(offset)), 5)

    def open_memory(self, handle: bytes) -> torch.Tensor:
        nbytes, where = pickle.loads(handle)
        told = pickle.loads(where)
        _check_foreign(told[1], "memory")
        opened = self.machine.open(told)
        index = self.machine.visible.index(told[0])
        return over(Part(self.machine, opened, opened.address + told[5], nbytes), index)


class _Pages(mmap.mmap):
    """Pinned memory of the host that says that it ends before anybody else can get its place.

    pinned: the queue that is told, and the address that it is told of.
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


class SimGroup(Group):
    """A group of two ranks as NCCL's: to send and to receive are kernels, each of which waits for the other.

    ``NcclTransport(install(), SimGroup, "sim_nccl")`` is the transport over it.
    """

    def __init__(self, device: Device, index: int, identity: bytes, rank: int) -> None:
        if device.kind != KIND:
            raise ValueError(f"it moves tensors of {KIND!r}, not of {device.kind!r}")
        self._identity = identity
        self._lock = threading.Lock()
        self._aborted = Flag()
        self._listener = _listening.pop(identity, None) if rank == 0 else None
        self._socket: socket.socket | None = None

    @staticmethod
    def missing() -> str | None:
        return None

    @staticmethod
    def new_identity() -> bytes:
        name = b"\0conveyor-sim-%d-%s" % (os.getpid(), uuid.uuid4().hex.encode())
        listener = descriptors.own_socket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(name)
        listener.listen(1)
        _listening[name] = listener
        return name

    def connect(self) -> None:
        if self._listener is not None:
            with self._listener:
                made = descriptors.own_socket(self._listener.accept()[0])
        else:
            made = descriptors.own_socket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                made.connect(self._identity)
            except OSError:
                made.close()
                raise
        with self._lock:
            self._socket = made
            if self._aborted.is_set():
                made.shutdown(socket.SHUT_RDWR)

    def send(self, memory: Any, stream: Stream) -> None:
        self._enqueue("send", memory, stream)

    def receive(self, memory: Any, stream: Stream) -> None:
        self._enqueue("receive", memory, stream)

    def abort(self) -> None:
        with self._lock:
            self._aborted.set()
            for one in (self._listener, self._socket):
                if one is not None:
                    with suppress(OSError):  # closed
                        one.shutdown(socket.SHUT_RDWR)

    def _enqueue(self, what: str, memory: Any, stream: Stream) -> None:
        assert isinstance(stream, SimStream)
        assert self._socket is not None
        connection, here = self._socket, memoryview(twin(memory).numpy())

        def kernel(held: Any = memory) -> None:  # its memory stays as long as it is enqueued
            at = 0
            while at < len(here):
                part = here[at : at + _CHUNK]
                try:
                    moved = connection.send(part) if what == "send" else connection.recv_into(part)
                except OSError:
                    moved = 0
                if not moved:
                    # NCCL does not notice that the other rank is gone: it waits to be aborted.
                    self._aborted.wait()
                    return
                at += moved

        stream.enqueue(f"nccl {what}", kernel)

    def __del__(self) -> None:
        for one in (self._listener, self._socket):
            if one is not None:
                one.close()
