"""A device's memory: a file without a name, which other processes can open while this one lives."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import select
import threading
from collections import deque
from typing import Any

from accelerator.words import SLOT, Slot, Word
from conveyor import descriptors

_SLOTS = 8192
_HEADER = _SLOTS * SLOT
_ALIGN = 512

POISON = 0xFF
"""What memory has that was freed or never written: NaN, or -1."""
#: Of a block, how much of it gets that: enough to be seen.
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
        """Memory is free: no stream will do anything there."""
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
        ctypes.memset(address, POISON, min(size, _POISONED))

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
        return Word(self._base + number * SLOT)

    def alive(self) -> bool:
        """Whether the process has not ended."""
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
    """When the process was started: numbers are used again."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
