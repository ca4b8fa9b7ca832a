"""Tensors of CUDA as memory that other processes open: ``transport/device_ipc/`` over it."""

from __future__ import annotations

from conveyor.device.cuda import DEVICE
from conveyor.transport.device_ipc import DeviceIpcTransport

TRANSPORT = DeviceIpcTransport(DEVICE)
