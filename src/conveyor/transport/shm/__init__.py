"""Shared memory of one host: tensors lie in the arena of the process that has sent them."""

from __future__ import annotations

from conveyor.transport.shm.transport import ShmTransport

TRANSPORT = ShmTransport()
