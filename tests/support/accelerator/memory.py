"""Memory: of a device, with its events in front; as tensors of torch; and of the host, while it is pinned."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import platform
import select
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from conveyor import descriptors
from conveyor.later import LaterModule

if TYPE_CHECKING:
    import numpy as np
    import torch
else:
    np, torch = LaterModule("numpy"), LaterModule("torch")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

# Tensors over memory of ours.

#: DLPack's name for a device that torch calls PrivateUse1.
_EXTENSION = 12


class _Managed(ctypes.Structure):
    """The head of a ``DLManagedTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


class Memory:
    """Memory that lives as long as this does, and any array or tensor in it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }


def over(memory: Memory, index: int) -> torch.Tensor:
    """Make a tensor of the bytes of ``memory`` on the simulated device of that index."""
    # NumPy's capsule ends its array wherever torch ends the storage, with the GIL or without, also while an
    # exception is on its way. A callback of ctypes does not.
    capsule = np.asarray(cast(Any, memory)).__dlpack__()
    managed = _Managed.from_address(_pointer(capsule, b"dltensor"))
    managed.device_type, managed.device_id = _EXTENSION, index
    return torch._C._from_dlpack(capsule)


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor of the CPU in a simulated device's memory. It does not keep that memory."""
    storage = tensor.untyped_storage()
    here = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    made = torch.empty(0, dtype=tensor.dtype)
    made.set_(here, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        made = made.conj()
    return torch._neg_view(made) if tensor.is_neg() else made


# Events, and what threads of several processes wait for.

_WAIT, _WAKE = 0, 1
#: The number of the system call, by the machine.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_SLOT = 8
"""Bytes of an event: how often it was recorded, and which of these times has happened last."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _sleep_on(address: int, value: int, timeout: float) -> None:
    """Sleep until somebody has called :func:`_wake` for the word, which had ``value``; a signal has come; or
    for ``timeout``."""
    if _FUTEX is None:
        raise RuntimeError(f"the simulated accelerator does not know {platform.machine()!r}")
    at_most = _Timespec(int(timeout), int(timeout % 1 * 1e9))
    _libc.syscall(
        ctypes.c_long(_FUTEX),
        ctypes.c_void_p(address),
        ctypes.c_int(_WAIT),
        ctypes.c_uint32(value),
        ctypes.byref(at_most),
        None,
        ctypes.c_uint32(0),
    )


def _wake(address: int) -> None:
    """Wake all that sleep on the word, in all processes."""
    _libc.syscall(
        ctypes.c_long(_FUTEX or 0),
        ctypes.c_void_p(address),
        ctypes.c_int(_WAKE),
        ctypes.c_int(0x7FFFFFFF),
        None,
        None,
        ctypes.c_uint32(0),
    )


class Word:
    """An event's two words: the number of its last record, and the number that has happened."""

    __slots__ = ("_done", "_recorded", "address")

    def __init__(self, address: int) -> None:
        self.address = address
        self._recorded = ctypes.c_uint32.from_address(address)
        self._done = ctypes.c_uint32.from_address(address + 4)

    @property
    def recorded(self) -> int:
        """The number of the last record."""
        return self._recorded.value

    def next(self) -> int:
        """Begin another record, and number it. Only the process that made the event does."""
        self._recorded.value += 1
        return self._recorded.value

    def happened(self, number: int) -> bool:
        """Return whether the record of this number has happened."""
        return self._done.value >= number

    def tell(self, number: int) -> None:
        """Say that the record of this number has happened."""
        self._done.value = max(number, self._done.value)
        _wake(self.address + 4)

    def sleep(self, number: int, timeout: float) -> None:
        """Sleep until something has happened, or for ``timeout``; not if that record has."""
        done = self._done.value
        if done < number:
            _sleep_on(self.address + 4, done, timeout)


class Slot:
    """The place of one event among the words; it is given back with the last reference to it."""

    def __init__(self, free: deque[int], base: int) -> None:
        self.number = free.popleft()
        self.word = Word(base + self.number * _SLOT)
        self._free = free
        self._pid = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._pid:
            self._free.append(self.number)


# A device's memory: a file without a name, which other processes can open while this one lives.

_SLOTS = 8192
_HEADER = _SLOTS * _SLOT
_ALIGN = 512

_POISON = 0xFF
"""Each byte of memory that was freed or never written, which makes NaN, or -1."""
#: How many bytes of a block get that: enough to be seen.
_POISONED = 1 << 20


class Heap:
    """The memory of one device in this process, with the words of its events in front.

    index, number: which device, as this process and as all processes count them.
    address: where it lies.
    """

    def __init__(self, index: int, number: int, size: int) -> None:
        self.index = index
        self.number = number
        self.size = size
        self._fd = descriptors.memory_file(f"simulated-memory-{index}")
        os.ftruncate(self._fd, _HEADER + size)
        self._map = mmap.mmap(self._fd, _HEADER + size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = self._base + _HEADER
        self._slots = deque(range(_SLOTS))
        self._lock = threading.RLock()
        self._free = [(0, size)]
        #: What streams are done with. It is appended to wherever a tensor ends, without the lock.
        self._returned: deque[tuple[int, int]] = deque()

    def new_slot(self) -> Slot:
        """Take the place of an event."""
        try:
            return Slot(self._slots, self._base)
        except IndexError:
            raise RuntimeError(f"a simulated device has {_SLOTS} events at most") from None

    def take(self, nbytes: int) -> int | None:
        """Find memory: its address. ``None``: there is none."""
        size = _rounded(nbytes)
        with self._lock:
            self._collect()
            for place, (offset, there) in enumerate(self._free):
                if there >= size:
                    rest = [(offset + size, there - size)] if there > size else []
                    self._free[place : place + 1] = rest
                    break
            else:
                return None
        self.poison(self.address + offset, size)
        return self.address + offset

    def give_back(self, address: int, nbytes: int) -> None:
        """Free memory where no stream will do anything any more."""
        size = _rounded(nbytes)
        self.poison(address, size)
        self._returned.append((address - self.address, size))

    def room(self) -> int:
        """Count the bytes that are free."""
        with self._lock:
            self._collect()
            return sum(size for _, size in self._free)

    def handle(self, number: int) -> bytes:
        """Describe an event, or anything else at an offset, to another process."""
        pid = os.getpid()
        node = os.fstat(self._fd).st_ino
        return pickle.dumps((self.number, pid, _began(pid), self._fd, node, number), 5)

    @staticmethod
    def poison(address: int, size: int) -> None:
        """Make values wrong that nobody may read."""
        ctypes.memset(address, _POISON, min(size, _POISONED))

    def _collect(self) -> None:
        if not self._returned:
            return
        while self._returned:
            self._free.append(self._returned.popleft())
        merged: list[tuple[int, int]] = []
        for offset, size in sorted(self._free):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free = merged


class Opened:
    """The memory of another process's device, mapped."""

    def __init__(self, handle: tuple[Any, ...]) -> None:
        _, self.pid, began, fd, node, _ = handle
        self._alive: int | None = None
        try:
            self._alive = descriptors.own(os.pidfd_open(self.pid))
            if _began(self.pid) != began:
                raise ProcessLookupError(self.pid)
            file = os.open(f"/proc/{self.pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if self._alive is not None:
                os.close(self._alive)
            raise RuntimeError(
                f"the memory of process {self.pid} cannot be opened: "
                f"{'it has ended' if isinstance(error, ProcessLookupError) else error}"
            ) from error
        try:
            if os.fstat(file).st_ino != node:
                os.close(self._alive)
                raise RuntimeError(f"the memory of process {self.pid} is another one by now")
            self._map = mmap.mmap(file, 0)
        finally:
            os.close(file)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = self._base + _HEADER

    def word(self, number: int) -> Word:
        """Find an event's."""
        return Word(self._base + number * _SLOT)

    def alive(self) -> bool:
        """Return whether the process has not ended."""
        assert self._alive is not None
        poll = select.poll()
        poll.register(self._alive, select.POLLIN)
        return not poll.poll(0)

    def check(self) -> None:
        """Raise an error if the process has ended."""
        if not self.alive():
            raise RuntimeError(
                f"process {self.pid}, which was to record an event of its device, has ended"
            )

    def __del__(self) -> None:
        if getattr(self, "_map", None) is not None and self._alive is not None:
            os.close(self._alive)


def _rounded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _ALIGN) * _ALIGN


def _began(pid: int) -> str:
    """Read when the process was started: numbers are used again."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None


# Memory of the host that is pinned.

#: As many as a pipe takes if nobody says otherwise.
_PAGES = 16
_NONBLOCK = 2
#: How often they are compared: somebody may be writing to them.
_LOOKS = 3


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Pages:
    """Some of the pages of ``nbytes`` of memory at ``address``, and whether the memory still shows them.

    A pipe refers to them, as a device would. Whatever is done to the mapping, or to the file behind it, the
    pipe has the pages that were there when they were pinned.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        page = mmap.PAGESIZE
        whole = nbytes // page
        step = max(1, -(-whole // _PAGES))
        self._addresses = [address + page * number for number in range(0, whole, step)]
        self._ends: list[int] = []
        with suppress(OSError):  # without descriptors nothing is compared
            self._ends.extend(map(descriptors.own, os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)))
        if self._addresses and self._ends:
            vectors = (_Vector * len(self._addresses))(
                *(_Vector(at, page) for at in self._addresses)
            )
            count = ctypes.c_size_t(len(vectors))
            taken = _libc.vmsplice(self._ends[1], vectors, count, _NONBLOCK)
            del self._addresses[max(taken, 0) // page :]

    def changed(self) -> bool:
        """Return whether the memory shows other pages by now."""
        return bool(self._addresses) and all(self._differ() for _ in range(_LOOKS))

    def close(self) -> None:
        """Let go of them."""
        while self._ends:
            os.close(self._ends.pop())
        self._addresses.clear()

    def _differ(self) -> bool:
        page = mmap.PAGESIZE
        nbytes = page * len(self._addresses)
        try:
            out, into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            got = _libc.tee(self._ends[0], into, ctypes.c_size_t(nbytes), _NONBLOCK)
            kept = os.read(out, nbytes) if got > 0 else b""
        finally:
            os.close(out)
            os.close(into)
        return any(
            kept[place * page : (place + 1) * page] != ctypes.string_at(at, page)
            for place, at in enumerate(self._addresses[: len(kept) // page])
        )
