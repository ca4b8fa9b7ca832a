"""What transports have in a process."""

from __future__ import annotations

import threading

import psutil

#: The names of threads that are there only for them begin so.
THREADS = (
    "conveyor-gloo",
    "conveyor-nixl",
    "conveyor-nccl",
    "conveyor-communicator",
    "conveyor-device-ipc",
)


def left_in_this_process() -> list[str]:
    """Their threads and connections. There are none where no graph uses any."""
    found = [t.name for t in threading.enumerate() if t.name.startswith(THREADS)]
    return found + [str(c) for c in psutil.Process().net_connections("tcp")]
