"""Pool of memory for tensors that is used again: to get memory from the system costs more than to fill it."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from contextlib import suppress
from typing import Any

#: Smaller sizes are left to the allocator, which keeps such memory itself.
_SMALLEST = 128 << 10
_HUGE_PAGE = 2 << 20


class Pool:
    """Stretches of memory, each given to one tensor of bytes at a time. A stretch returns to the pool when
    nobody holds that tensor any more, nor any tensor that lies in it, whichever thread releases it."""

    def __init__(self, keep: int) -> None:
        """``keep``: how many stretches at most wait for their next use."""
        self._keep = keep
        #: The last ones that have come back are at the end, and are the warm ones.
        self._free: list[mmap.mmap] = []
        self._closed = False

    def take(self, size: int) -> Any:
        """Return a tensor of ``size`` bytes.

        Raises:
            MemoryError: there is none.
        """
        import torch

        if size < _SMALLEST:
            return torch.empty(size, dtype=torch.uint8)
        memory = self._fitting(size) or new_memory(size)
        lease = (ctypes.c_ubyte * size).from_buffer(memory)
        weakref.finalize(lease, self._come_back, memory).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)

    def close(self) -> None:
        """Release all unused memory now, and memory in use as soon as nobody holds it."""
        self._closed = True
        self._free.clear()

    def _fitting(self, size: int) -> mmap.mmap | None:
        for memory in reversed(self._free.copy()):
            if fits(len(memory), size):
                with suppress(ValueError):  # the list has changed meanwhile
                    self._free.remove(memory)
                    return memory
        return None

    def _come_back(self, memory: mmap.mmap) -> None:
        # This may interrupt any other method here, so it takes no lock: a list's methods are atomic.
        self._free.append(memory)
        with suppress(IndexError):
            while len(self._free) > self._keep or (self._closed and self._free):
                self._free.pop(0)


def fits(there: int, size: int) -> bool:
    """Return whether a stretch of ``there`` bytes is large enough for ``size``, and not wastefully large."""
    return size <= there <= 2 * size + _HUGE_PAGE


def new_memory(size: int) -> mmap.mmap:
    """Map at least ``size`` bytes of private memory, of huge pages where they are worth it.

    Raises:
        MemoryError: there are none.
    """
    whole = -(-size // _HUGE_PAGE) * _HUGE_PAGE if size >= _HUGE_PAGE else size
    try:
        memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there is no memory for {size} bytes of tensors: {error}") from error
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
