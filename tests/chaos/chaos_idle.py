"""What memory is there when nothing is held, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

from chaos_around import Wrong

MB = 1 << 20
#: s after which the memory of large values that nobody holds has gone back, and those that are granted.
BACK_WITHIN = 10.0
GRACE = 5.0
#: What a session may keep: bytes of arenas for each of its processes.
KEPT = MB

_libc = ctypes.CDLL(None)


def shared(pids: Sequence[int]) -> int:
    """Bytes of the arenas of processes ``pids`` that have memory behind them."""
    files: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            entries = os.listdir(f"/proc/{pid}/fd")
        except OSError:  # it has ended
            continue
        for entry in entries:
            path = f"/proc/{pid}/fd/{entry}"
            try:
                if "conveyor-arena" in os.readlink(path):
                    status = os.stat(path)
                    files[status.st_dev, status.st_ino] = 512 * status.st_blocks
            except OSError:  # it was closed meanwhile
                continue
    return sum(files.values())


def wait_until_back(pids: Sequence[int]) -> tuple[float, int]:
    """Wait for the memory of ``pids``, which do nothing and hold nothing, to go back. How many seconds
    it took, and what is left."""
    began = time.monotonic()
    while (left := shared(pids)) > KEPT * len(pids):
        seconds = time.monotonic() - began
        if seconds > BACK_WITHIN + GRACE:
            each = {pid: shared([pid]) for pid in pids}
            raise Wrong(
                f"{left >> 10} KiB of shared memory are still there {seconds:.0f} s after the last "
                f"value was dropped; in the descriptors of each process: {each}"
            )
        gc.collect()
        time.sleep(0.05)
    return time.monotonic() - began, left


def in_use() -> tuple[int, int]:
    """Of this process: bytes that malloc has given out, and how many blocks Python's allocator has. What
    both keep for later is left out: it depends on the worst moment, and on how what was used lay."""
    gc.collect()
    if not hasattr(_libc, "malloc_info"):  # it is glibc's
        return 0, sys.getallocatedblocks()
    return _given_out(), sys.getallocatedblocks()


def _given_out() -> int:
    memory = os.memfd_create("malloc_info", os.MFD_CLOEXEC)
    with open(memory, "rb") as said:
        _libc.fdopen.restype = ctypes.c_void_p
        stream = ctypes.c_void_p(_libc.fdopen(os.dup(memory), b"w"))
        _libc.malloc_info(0, stream)
        _libc.fclose(stream)
        said.seek(0)
        root = ElementTree.fromstring(said.read())

    def total(of: ElementTree.Element, kind: str, name: str) -> int:
        found = (e for e in of.findall(kind) if e.get("type") == name)
        return sum(int(e.get("size", 0)) for e in found)

    free = total(root, "total", "fast") + total(root, "total", "rest")
    return total(root, "system", "current") + total(root, "total", "mmap") - free
