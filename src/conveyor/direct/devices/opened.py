"""Memory of devices that other processes have described, kept open from one fetch to the next.

To open memory costs more than to copy what little values have. To close it is worse: CUDA waits for all that
the device does for this process. What was not used for a while is closed by a thread, so that its maker's
memory is not held for longer than that.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from conveyor import _core
from conveyor.codec.direct import Located
from conveyor.device import Device
from conveyor.exceptions import SystemLimitError
from conveyor.flag import Flag
from conveyor.runtime import threads

if TYPE_CHECKING:
    import torch

#: Seconds after which what is not used is closed.
IDLE = 3.0
#: How many are open at most; the one that was used longest ago gives way.
MOST = 64

#: Key of opened memory: its process (slot and incarnation), and the handle.
_Key = tuple[int, int, bytes]


class _Open:
    """Memory that is open.

    used: when it was asked for last, by ``_core.monotonic()``.
    """

    __slots__ = ("memory", "used")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.used = _core.monotonic()


class Opened:
    """Cache of the memory of other processes that this process has open."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._lock = threading.RLock()  # a signal handler may fetch a value, too
        self._open: dict[_Key, _Open] = {}
        #: Flag of the thread, set when all is to be closed at once. ``None``: there is no thread.
        self._closing: Flag | None = None

    def open(self, device: Device, handle: bytes, where: Located) -> torch.Tensor:
        """The memory that ``handle`` describes, of the process that keeps ``where``.

        Raises:
            RuntimeError: it cannot be opened.
        """
        key = where.slot, where.incarnation, handle
        found = self._open.get(key)
        if found is not None:
            found.used = _core.monotonic()
            return found.memory
        try:
            memory = device.open_memory(handle)
        except RuntimeError:
            # Its address may be that of other memory, which its maker has freed, and which is open here.
            with self._lock:
                gone, self._open = self._open, {}
            if not gone:
                raise
            gone.clear()
            memory = device.open_memory(handle)
        self._keep(key, memory)
        return memory

    def _keep(self, key: _Key, memory: torch.Tensor) -> None:
        gone = None
        with self._lock:
            if self._closing is None:
                closing = Flag()
                try:
                    threads.start(self._run, "opened", closing)
                except SystemLimitError:
                    return  # nobody would close it
                self._closing = closing
            if len(self._open) >= MOST:
                longest, _ = min(self._all(), key=lambda item: item[1].used)
                gone = self._open.pop(longest, None)
            self._open[key] = _Open(memory)
        del gone  # it is closed without the lock

    def close(self) -> None:
        """Close all memory at the end of the session."""
        with self._lock:
            gone, self._open = self._open, {}
            closing, self._closing = self._closing, None
        gone.clear()
        if closing is not None:
            closing.set()

    def _run(self, closing: Flag) -> None:
        pause: float | None = IDLE
        while pause is not None and not closing.wait(pause):
            pause = self._close_idle(closing)

    def _close_idle(self, closing: Flag) -> float | None:
        """Close what was not used for a while. In how many seconds there may be more; ``None``: all is
        closed."""
        with self._lock:
            before = _core.monotonic() - IDLE
            idle = [key for key, one in self._all() if one.used <= before]
            gone = [self._open.pop(key, None) for key in idle]
            pause = min((one.used - before for _, one in self._all()), default=None)
            if pause is None and self._closing is closing:
                self._closing = None
        gone.clear()
        return pause

    def _all(self) -> list[tuple[_Key, _Open]]:
        return list(self._open.items())  # one step: a signal handler may open some, too

    def forget(self) -> None:
        """Drop the cache in a forked child. The memory is its parent's: it stays as it is, and nobody uses
        it."""
        _inherited.append(self._open)
        self._clear()


_inherited: list[object] = []

OPENED = Opened()
os.register_at_fork(after_in_child=OPENED.forget)
