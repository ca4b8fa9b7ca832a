"""Tensors of GPUs over NVIDIA's NCCL."""

from __future__ import annotations

from conveyor.device.cuda import DEVICE
from conveyor.transport.nccl.transport import NcclTransport

TRANSPORT = NcclTransport(DEVICE)
