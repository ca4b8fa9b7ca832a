"""Gloo: tensors of the CPU over TCP, by torch's own library for it."""

from __future__ import annotations

from conveyor.transport.gloo.transport import GlooTransport

TRANSPORT = GlooTransport()
