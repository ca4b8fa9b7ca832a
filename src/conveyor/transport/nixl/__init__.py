"""NIXL: readers fetch tensors out of the writer's memory, by the fastest way that UCX finds."""

from __future__ import annotations

from conveyor.transport.nixl.transport import NixlTransport

TRANSPORT = NixlTransport()
