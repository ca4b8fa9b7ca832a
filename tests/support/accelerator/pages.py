"""Pages of the host that a device has pinned: whether they are still those that the memory shows.

A pipe refers to some of them, as a device would. Whatever is done to the mapping, or to the file behind it,
the pipe has the pages that were there when they were pinned.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress

from conveyor import descriptors

#: As many as a pipe takes if nobody says otherwise.
_PAGES = 16
_NONBLOCK = 2
#: How often they are compared: somebody may be writing to them.
_LOOKS = 3

_libc = ctypes.CDLL(None, use_errno=True)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Pages:
    """Some of the pages of ``nbytes`` of memory, which begins at ``address``."""

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
        """Whether the memory shows other pages by now."""
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
