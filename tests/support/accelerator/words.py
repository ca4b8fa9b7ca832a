"""Words in shared memory that threads of several processes wait for."""

from __future__ import annotations

import ctypes
import os
import platform
from collections import deque

_WAIT, _WAKE = 0, 1
#: The number of the system call, by the machine.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

SLOT = 8
"""Bytes of an event: how often it was recorded, and which of these times has happened last."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def sleep_on(address: int, value: int, timeout: float) -> None:
    """Sleep until somebody has called :func:`wake` for the word, which had ``value``; a signal has come; or
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


def wake(address: int) -> None:
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
        """Whether the record of this number has."""
        return self._done.value >= number

    def tell(self, number: int) -> None:
        """Say that the record of this number has happened."""
        self._done.value = max(number, self._done.value)
        wake(self.address + 4)

    def sleep(self, number: int, timeout: float) -> None:
        """Sleep until something has happened, or for ``timeout``; not if that record has."""
        done = self._done.value
        if done < number:
            sleep_on(self.address + 4, done, timeout)


class Slot:
    """The place of one event among the words; it is given back with the last reference to it."""

    def __init__(self, free: deque[int], base: int) -> None:
        self.number = free.popleft()
        self.word = Word(base + self.number * SLOT)
        self._free = free
        self._pid = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._pid:
            self._free.append(self.number)
