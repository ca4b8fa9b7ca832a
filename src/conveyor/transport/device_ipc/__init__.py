"""Memory of a device that other processes open, as a transport: of any kind of device that can."""

from __future__ import annotations

from conveyor.transport.device_ipc.transport import DeviceIpcTransport

__all__ = ["DeviceIpcTransport"]
