"""The floor for payloads: one warm memcpy and the reader's sweep, in one process."""

from __future__ import annotations

from typing import Any

from benchmarks.model import Topology
from benchmarks.systems.base import Path, System
from benchmarks.worker import PAGE, sweep


class MemcpySystem(System):
    name = "memcpy"

    def path(self, topology: Topology) -> Path:
        import numpy as np

        def out_of_band(view: Any) -> Any:
            """A buffer that begins where ``view`` does within a page.

            One that begins 16 bytes further takes ten times as long for what fits the cache (each
            load then seems to depend on the store before it), and malloc likes to return such.
            """
            spare = np.empty(view.nbytes + PAGE, view.dtype)
            start = (view.ctypes.data - spare.ctypes.data) % PAGE
            return spare[start : start + view.nbytes]

        buffers: dict[tuple[str, int], Any] = {}

        def copy(block: Any, into: str) -> Any:
            """Copy ``block`` into a buffer that is warm from the second time on."""
            view = block.numpy() if hasattr(block, "numpy") else block
            buffer = buffers.get((into, view.nbytes))
            if buffer is None:
                buffer = buffers[into, view.nbytes] = out_of_band(view)
            np.copyto(buffer, view)
            return buffer

        def one_way(block: Any) -> int:
            return sweep(copy(block, "there"))

        def back(block: Any) -> Any:
            there = copy(block, "there")
            sweep(there)
            return copy(there, "back")

        once = back if topology.method == "sweep_back" else one_way
        return Path(once, submit=once, receive=lambda result: result)
