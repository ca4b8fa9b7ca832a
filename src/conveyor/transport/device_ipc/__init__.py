"""Memory of a device that other processes open, as a transport: of CUDA, and of any other kind that can."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conveyor.device import Device
from conveyor.device.cuda import DEVICE
from conveyor.transport.base import Capabilities, Transport, Wire

if TYPE_CHECKING:
    from conveyor.transport.device_ipc.endpoint import DeviceIpcEndpoint

__all__ = ["DeviceIpcTransport"]


class DeviceIpcTransport(Transport):
    """Moves tensors of one kind of device between processes of one node, from memory of the device to memory
    of the device. A reader's task begins when the tensors are complete at the writer, and is enqueued behind
    their copy on the reader's stream. No stream waits for another process.

    The rest of a value, tensors of the CPU too, travels in its frame. If a reader does not see the writer's
    device, for instance where each actor has its own card, its tensors go through host memory.
    """

    def __init__(self, device: Device) -> None:
        """``device``: the kind. The transport is called after it: ``"cuda_ipc"``."""
        self.device = device
        self.name = f"{device.kind}_ipc"
        self.capabilities = Capabilities(
            devices=frozenset({device.kind}), others_in_frame=True, streams="overlap"
        )

    def viable(self) -> str | None:
        """Return why this process cannot use the device, or ``None`` if it can."""
        return self.device.viable()

    def open(self, wire: Wire) -> DeviceIpcEndpoint:
        """Open the writer's or a reader's end, by the rank."""
        from conveyor.transport.device_ipc.endpoint import Reader, Writer  # slow to import

        return (Reader if wire.rank else Writer)(wire, self.device)


#: The transport ``cuda_ipc``.
TRANSPORT = DeviceIpcTransport(DEVICE)
